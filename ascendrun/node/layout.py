"""Paths of ascendrun on a node; no other module joins these paths.

    ROOT/                           ~/.ascendrun, or $ASCENDRUN_NODE_ROOT; 0700
      agent-<sha256, 16 chars>.pyz  the agent
      trees/<sha256>/               staged code: immutable, named by the hash of its content
      runs/<run>/work/              the ranks' working directory: kept over attempts; stages of a pipeline share one
      runs/<run>/checkpoints/       checkpoints, unless the job names a directory
      runs/<run>/attempt-<n>/       one start: records, logs, metrics; see below

A `run` is one job (or pipeline) of one head: "<head id>-<job id>". A `tag`, "<run>.<attempt>", names one attempt
everywhere; every rank carries it in its environment as ASCENDRUN_RUN_ID.

Files that the head pulls are named "<file>.<generation>", generations counting from 0:

    events          JSON lines, the supervisor's record of events
    rank-3.out      standard output of rank 3, byte for byte;  rank-3.err  its standard error
    rank-3.out.times, rank-3.err.times
                    16 bytes a record: end offset in the log, arrival time (ns UTC), both big-endian u64
                    Closed generations of these may be removed, oldest first, when the head has them
                    completely and the attempt's logs exceed the head's limit (16 GiB); never the newest.
    rank-3.metrics  JSON lines that the program writes ($ASCENDRUN_METRICS_FILE)
    rank-3.error    torch elastic's error file ($TORCHELASTIC_ERROR_FILE)
    samples         JSON lines of the sampler (node/sampler/sample.py); the oldest generations are removed
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

ROOT_VARIABLE = "ASCENDRUN_NODE_ROOT"
TAG_VARIABLE = "ASCENDRUN_RUN_ID"
SAMPLER_VARIABLE = "ASCENDRUN_SAMPLER"
OURS = (ROOT_VARIABLE, TAG_VARIABLE, SAMPLER_VARIABLE, "ASCENDRUN_FAILPOINT", "ASCENDRUN_EXEC")
"""Variables that no rank inherits from the agent; root and tag are set for it, to identify its processes."""

PULLED_FILE = re.compile(r"^(events|samples|rank-\d+\.(?:out|err)(?:\.times)?|rank-\d+\.(?:metrics|error))\.(\d+)$")

PREPARED, IDENTITY, STOP, ENDED, LOST = "prepared.json", "supervisor.json", "stop.json", "ended.json", "lost.json"
STOP_TAKEN = "stop.taken.json"
"""Files of an attempt: preparation; owner; stop request; end; loss of its owner."""


def node_root(environ: Mapping[str, str]) -> str:
    """Return the agent's directory on this node, absolute."""
    return os.path.abspath(environ.get(ROOT_VARIABLE) or os.path.join(os.path.expanduser("~"), ".ascendrun"))


def make_run(head_id: str, job_id: str) -> str:
    return f"{head_id}-{job_id}"


def make_tag(run: str, attempt: int) -> str:
    return "%s.%d" % (run, attempt)


def split_tag(tag: str) -> tuple[str, int]:
    """Return (run, attempt). Raises ValueError on an invalid tag; a tag never names a path outside ROOT/runs."""
    match = re.match(r"^([A-Za-z0-9][A-Za-z0-9_-]{0,80})\.([1-9][0-9]{0,6})\Z", tag)
    if not match:
        raise ValueError(f"not a tag: {tag!r}")
    return match.group(1), int(match.group(2))


def tree_dir(root: str, sha256: str) -> str:
    if not re.match(r"^[0-9a-f]{64}\Z", sha256):
        raise ValueError(f"not a tree hash: {sha256!r}")
    return os.path.join(root, "trees", sha256)


def run_dir(root: str, run: str) -> str:
    return os.path.join(root, "runs", run)


def work_dir(root: str, run: str) -> str:
    return os.path.join(run_dir(root, run), "work")


def checkpoints_dir(root: str, run: str) -> str:
    return os.path.join(run_dir(root, run), "checkpoints")


def attempt_dir(root: str, tag: str) -> str:
    run, attempt = split_tag(tag)
    return os.path.join(run_dir(root, run), "attempt-%d" % attempt)


def root_of(attempt_folder: str) -> str:
    """Return the node root above an attempt's directory."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(attempt_folder))))
