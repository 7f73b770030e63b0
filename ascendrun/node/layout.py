"""Paths of ascendrun on a node; no other module joins these paths.

    ROOT/                           ~/.ascendrun, or $ASCENDRUN_NODE_ROOT; 0700
      agent-<sha256, 16 chars>.pyz  the agent
      trees/<sha256>/               staged code: immutable, named by the hash of its content
      runs/<run>/checkpoints/       checkpoints, unless the job names a directory
      nodes/<machine key>/          everything else belongs to one machine: several may share a home
        incarnation.json            random id of this directory: a home that was wiped or copied has another
        live/<tag>                  empty: an attempt that was prepared and has not ended
        heads/<head id>.json        terms of a head that has a standby (node/agent/terms.py); on a local disk, as below
        runs/<run>/work/            the ranks' working directory: kept over attempts; stages of a pipeline share one
        runs/<run>/attempt-<n>/     one start: records, logs, metrics; see below

Runs of releases before 0.10 are in ROOT/runs/<run>/ and stay there until they are removed.

A `run` is one job (or pipeline) of one head: "<head id>-<job id>". A `tag`, "<run>.<attempt>", names one attempt
everywhere; every rank carries it in its environment as ASCENDRUN_RUN_ID.

Where ROOT is on a network file system, an attempt has a file where.json, and its growing files are in
/var/tmp/ascendrun-<uid>/<machine key>/<root>/<tag>/ (0700): a server that hangs then delays a stop, not a step.

Files that the head pulls are named "<file>.<generation>", generations counting from 0:

    events          JSON lines, the supervisor's record of events
    rank-3.out      standard output of rank 3, byte for byte;  rank-3.err  its standard error
    rank-3.out.times, rank-3.err.times
                    16 bytes a record: end offset in the log, arrival time (ns UTC), both big-endian u64
                    Closed generations of these may be removed, oldest first, when the head has them
                    completely and the attempt's logs exceed the head's limit (16 GiB); never the newest.
    node-1.out      the same of the process of node 1 that starts the ranks itself;  node-1.err, node-1.out.times, …
    rank-3.metrics  JSON lines that the program writes ($ASCENDRUN_METRICS_FILE)
    rank-3.error    torch elastic's error file ($TORCHELASTIC_ERROR_FILE)
    samples         JSON lines of the sampler (node/sampler/sample.py); the oldest generations are removed
"""

from __future__ import annotations

import functools
import os
import re

from ascendrun.node import procs
from ascendrun.node.files import names_in

try:
    from _sha256 import sha256 as sha256  # type: ignore[import-not-found, unused-ignore]  # Python's own; hashlib brings OpenSSL, for 4 ms at each start
except ImportError:
    from hashlib import sha256 as sha256

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

ROOT_VARIABLE = "ASCENDRUN_NODE_ROOT"
TAG_VARIABLE = "ASCENDRUN_RUN_ID"
SAMPLER_VARIABLE = "ASCENDRUN_SAMPLER"
JOIN_VARIABLE = "ASCENDRUN_JOIN"
"""Name of the supervisor's socket (node/join.py), in the environment of a launcher, not of its ranks."""
FORKS_VARIABLE = "ASCENDRUN_FORKS"
"""In the environment of a process that may start the ranks of its node itself, and so of all below it: its own RANK,
WORLD_SIZE and LOCAL_WORLD_SIZE. A process with others is a rank. Equal to core/rank_env.FORKS_VARIABLE."""
HOLDER_VARIABLE = "ASCENDRUN_HOLDER"
"""Name of the holder (node/hold.py) that starts supervisors; without it they are children of the agent."""
OURS = (
    ROOT_VARIABLE,
    TAG_VARIABLE,
    SAMPLER_VARIABLE,
    JOIN_VARIABLE,
    "ASCENDRUN_FAILPOINT",
    "ASCENDRUN_EXEC",
    HOLDER_VARIABLE,
)
"""Variables that no rank inherits from the agent; root and tag are set for it, to identify its processes."""

PULLED_FILE = re.compile(
    r"^(events|samples|(?:rank|node)-\d+\.(?:out|err)(?:\.times)?|(?:rank|node)-\d+\.(?:metrics|error))\.(\d+)$"
)

_ATTEMPT = re.compile(r"^attempt-([1-9][0-9]{0,6})\Z")

PREPARED, IDENTITY, STOP, ENDED, LOST = "prepared.json", "supervisor.json", "stop.json", "ended.json", "lost.json"
STOP_TAKEN, JOB, WHERE, ROLL, RENEWED = "stop.taken.json", "job.json", "where.json", "roll.json", "renewed"
"""Files of an attempt: preparation; owner; stop request; end; loss of its owner; copy of the job (job_copy.py);
place of its growing files; {boot_id, seen: [[pid, start time]]} of the processes that its supervisor saw last; empty,
its modification time is the clock since boot at which its lease began (node/reap.py)."""

LOCAL = "/var/tmp"


def node_root(environ: Mapping[str, str]) -> str:
    """Return the agent's directory on this node, absolute."""
    return os.path.abspath(environ.get(ROOT_VARIABLE) or os.path.join(os.path.expanduser("~"), ".ascendrun"))


@functools.lru_cache(maxsize=None)
def machine_key() -> str:
    """Return the key of this machine: nodes that share a home are kept apart by it."""
    return make_machine_key(procs.read_line("/etc/machine-id"), os.uname().nodename)


def make_machine_key(machine_id: str, hostname: str) -> str:
    """Return 12 hex digits. The host name too: machines that were cloned from one image have equal machine ids."""
    return str(sha256(f"{machine_id}\n{hostname}".encode("utf-8", "surrogateescape")).hexdigest()[:12])


def node_dir(root: str, key: str | None = None) -> str:
    """Return the directory of one machine's state. `key`: None is this machine."""
    return os.path.join(root, "nodes", key or machine_key())


def term_file(root: str, head_id: str, *, is_local: bool) -> str:
    """Return the file of a head's terms on this machine. `is_local`: ROOT is on a local disk. Raises ValueError."""
    if not re.match(r"^[0-9a-f]{8}\Z", head_id):
        raise ValueError(f"not a head id: {head_id!r}")
    return os.path.join(node_dir(root) if is_local else local_root(root), "heads", head_id + ".json")


def live_dir(root: str) -> str:
    return os.path.join(node_dir(root), "live")


def live_mark(attempt_folder: str) -> str:
    """Return the empty file that exists from the attempt's preparation until its end is written or it is aborted."""
    return os.path.join(live_dir(root_of(attempt_folder)), tag_of(attempt_folder))


def local_base() -> str:
    """Return the directory of this user on a local disk."""
    return os.path.join(LOCAL, "ascendrun-%d" % os.geteuid())


def local_root(root: str) -> str:
    """Return the directory on a local disk for ROOT on this machine, which may have several."""
    return os.path.join(local_base(), machine_key(), str(sha256(os.fsencode(root)).hexdigest()[:8]))


def local_streams_dir(attempt_folder: str) -> str:
    """Return the place of an attempt's growing files on a local disk."""
    return os.path.join(local_root(root_of(attempt_folder)), tag_of(attempt_folder))


def short_dir(attempt_folder: str) -> str:
    """Return a directory of the attempt whose path has at most 38 bytes, for Unix sockets; it ends with the attempt."""
    name = sha256(os.fsencode(local_streams_dir(attempt_folder))).hexdigest()[:8]
    return os.path.join(local_base(), str(name))


def streams_dir(attempt_folder: str) -> str:
    """Return the directory of an attempt's growing files. Raises OSError if this cannot be found out."""
    try:
        os.stat(os.path.join(attempt_folder, WHERE))
    except (FileNotFoundError, NotADirectoryError):
        return attempt_folder
    return local_streams_dir(attempt_folder)


def tag_of(attempt_folder: str) -> str:
    """Return the tag of the attempt with this directory."""
    folder = os.path.abspath(attempt_folder)
    return os.path.basename(os.path.dirname(folder)) + "." + os.path.basename(folder).rpartition("-")[2]


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


def runs_dir(root: str, key: str | None = None) -> str:
    return os.path.join(node_dir(root, key), "runs")


def run_dir(root: str, run: str, key: str | None = None) -> str:
    """Return a run's directory on one machine. `key`: None is this machine."""
    return os.path.join(runs_dir(root, key), run)


def shared_run_dir(root: str, run: str) -> str:
    """Return the directory of what the machines that share ROOT have of a run in common: its checkpoints."""
    return os.path.join(root, "runs", run)


def work_dir(root: str, run: str, key: str | None = None) -> str:
    return os.path.join(run_dir(root, run, key), "work")


def checkpoints_dir(root: str, run: str) -> str:
    return os.path.join(shared_run_dir(root, run), "checkpoints")


def attempt_dir(root: str, tag: str, key: str | None = None) -> str:
    """Return an attempt's directory on one machine. `key`: None is this machine."""
    run, attempt = split_tag(tag)
    return os.path.join(run_dir(root, run, key), "attempt-%d" % attempt)


def attempts_of(root: str, run: str) -> list[int]:
    """Return the numbers of the run's attempts on this machine, ascending."""
    found = map(_ATTEMPT.match, names_in(run_dir(root, run)))
    return sorted(int(match.group(1)) for match in found if match)


def runs_of(root: str) -> list[str]:
    """Return the runs that have a directory on this machine."""
    return names_in(runs_dir(root))


def root_of(attempt_folder: str) -> str:
    """Return the node root above an attempt's directory: ROOT/nodes/KEY/runs/RUN/ATTEMPT."""
    return os.path.abspath(attempt_folder).rsplit(os.sep, 5)[0]


def process_number(node_rank: int) -> int:
    """Return the number in records of a node's process that starts its ranks: below 0, since it is not a rank's."""
    return -1 - node_rank


def forks_ranks(plan: dict[str, Any]) -> bool:
    """Return whether the process of a plan may start the ranks of its node itself."""
    return FORKS_VARIABLE in plan["env"]


def rank_in(environ: bytes) -> tuple[int | None, int | None]:
    """Return (rank, local rank) of a process by its environment, NUL-separated; None: not known.

    What it only inherits from a process that starts the ranks is not its own.
    """
    values = procs.variables_of(environ)
    inherited = values.get(FORKS_VARIABLE.encode("ascii"))
    own = (values.get(name, b"") for name in (b"RANK", b"WORLD_SIZE", b"LOCAL_WORLD_SIZE"))
    if inherited is not None and inherited == b" ".join(own):
        return None, None
    rank, local = values.get(b"RANK", b""), values.get(b"LOCAL_RANK", b"")
    return int(rank) if rank.isdigit() else None, int(local) if local.isdigit() else None


def process_name(number: int) -> str:
    """Return the name of a process's files: rank-3, or node-1 for `process_number(1)`."""
    return "rank-%d" % number if number >= 0 else "node-%d" % (-1 - number)
