"""Comparison of what a node reports about an attempt with the record of its job: a pure table."""

from __future__ import annotations

from enum import Enum

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, NodeProgress, Phase, State


@dataclass(frozen=True)
class NodeState:
    """Report of a node. `live`: tags of attempts without a recorded end; None: not readable, or an older agent."""

    boot_id: str
    incarnation: str | None = None
    live: frozenset[str] | None = None


@dataclass(frozen=True)
class AttemptState:
    """Report of a node about one attempt. `phase`: prepared, running, ended or lost (its supervisor is gone); None: the
    node has no records of it. `processes`: whether any process of it lives."""

    phase: str | None
    processes: bool


class Verdict(Enum):
    """What the difference between the node and the record requires.

    QUERY: the attempt's state on the node decides. GO: send GO again. STOP: end what runs there by its tag.
    ABORT: remove what was prepared for a start that was never decided; nothing runs and nothing is recorded there.
    REBOOTED, GONE: the attempt's processes there are lost. FREED: the leftovers are gone. FOUND: an attempt of this
    head node that no record explains.
    """

    AGREES = "agrees"
    QUERY = "query"
    GO = "go"
    STOP = "stop"
    ABORT = "abort"
    REBOOTED = "rebooted"
    GONE = "gone"
    FREED = "freed"
    FOUND = "found"


_BEFORE_PREPARE = (State.QUEUED, State.CHECKING, State.STAGING)
"""States in which no node has anything of the attempt."""


def node_stopped(host: str, tag: str, why: str, now_s: float) -> Event:
    """Return the event of a stop on one host that no decision about the job caused. `why`: a code."""
    return Event("node-stopped", {"why": why}, (host,), attempt=int(tag.rpartition(".")[2]), at_s=now_s)


def compare(
    job: Job | None, host: str | None, tag: str, node: NodeState, attempt: AttemptState | None = None
) -> Verdict:
    """Return what has to be done about the attempt `tag` on a node.

    `tag`: valid, of this head node. `job`: by the tag, None: unknown. `host`: the job's name of the node, None: not one
    of its hosts. `attempt`: the node's answer to QUERY, None: not asked.
    """
    is_live = node.live is not None and tag in node.live
    number = int(tag.rpartition(".")[2])
    if job is None or number > job.attempt or (number == job.attempt and job.state in _BEFORE_PREPARE):
        return Verdict.FOUND if is_live else Verdict.AGREES
    known = next((one for one in job.nodes if one.host == host), None)
    if number == job.attempt and known is not None:
        if known.may_run_processes:
            return _compare_running(job, known, is_live, node, attempt)
        if known.leftovers:
            return _compare_leftovers(known, node, attempt)
    if not is_live:
        return Verdict.AGREES
    if number == job.attempt and job.go_sent_at_s is None:
        return Verdict.ABORT if job.is_terminal else Verdict.AGREES
    if number == job.attempt and job.state in (State.STARTING, State.RUNNING):
        return Verdict.AGREES  # the attempt of the present GO, which the job itself ends
    return Verdict.STOP


def _compare_running(
    job: Job, known: NodeProgress, is_live: bool, node: NodeState, attempt: AttemptState | None
) -> Verdict:
    """Compare a node on which the record expects processes."""
    if known.boot_id and node.boot_id != known.boot_id:
        return Verdict.REBOOTED
    is_same = known.incarnation is None or node.incarnation == known.incarnation
    if node.live is None or (is_live and is_same):
        return Verdict.AGREES
    if job.state is State.STARTING and known.phase is Phase.GO_SENT:
        return Verdict.GO
    if attempt is None:
        return Verdict.QUERY
    if attempt.phase == "running" or (is_same and attempt.phase in ("ended", "lost")):
        return Verdict.AGREES  # marked by nobody (an older agent), or its end is on the way
    return Verdict.STOP if attempt.processes else Verdict.GONE


def _compare_leftovers(known: NodeProgress, node: NodeState, attempt: AttemptState | None) -> Verdict:
    """Compare a node on which processes outlived the end. A recreated container does not show them."""
    if known.boot_id and node.boot_id != known.boot_id:
        return Verdict.FREED
    if node.live is None or node.incarnation != known.incarnation:
        return Verdict.AGREES
    if attempt is None:
        return Verdict.QUERY
    return Verdict.AGREES if attempt.processes else Verdict.FREED
