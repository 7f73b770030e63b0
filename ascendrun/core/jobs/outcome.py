"""How an attempt ended, by its records alone: the rank that failed first, and the kind of its failure."""

from __future__ import annotations

import signal

from ascendrun.core.jobs import reasons
from ascendrun.core.jobs.job import Cause, Exit, Job
from ascendrun.core.jobs.reasons import FirstFailure
from ascendrun.core.jobs.restart import Failure, Kind


def find_first_failure(job: Job) -> FirstFailure | None:
    """Return the rank, or what starts the ranks of a node, that failed first, clock offsets removed; None: none did."""
    failures = [
        (exit.at_ns - int((node.clock_offset_s or 0.0) * 1e9), rank, node.host, exit)
        for node in job.nodes
        for rank, exit in node.exits.items()
        if exit.is_failure
    ]
    if not failures:
        return None
    _, rank, host, first = min(failures, key=lambda failure: (failure[1] < 0, *failure[:2]))  # a launcher follows
    forked = _first_forked_failure(job)
    if forked is not None:
        rank, host, first = forked
    elif rank < 0 or job.forks:
        kind = "launcher-killed" if first.signal is not None else "launcher-exited"
        return FirstFailure(kind, host, code=first.code, signal=first.signal)
    kind = "rank-killed" if first.signal is not None else "rank-exited"
    return FirstFailure(kind, host, rank, code=first.code, signal=first.signal)


def _first_forked_failure(job: Job) -> tuple[int, str, Exit] | None:
    """Return the rank that failed first of those that the processes of the nodes started; None: not known for certain.

    SIGTERM is how a launcher ends the other ranks.
    """
    failures = [
        (one.exit.at_ns - int((node.clock_offset_s or 0.0) * 1e9), number, node.host, one.exit)
        for node in job.nodes
        for number, one in node.forked.items()
        if one.exit is not None and one.exit.is_failure and one.exit.signal != signal.SIGTERM
    ]
    _, rank, host, first = min(failures, key=lambda failure: failure[:2], default=(0, 0, "", None))
    return None if first is None or (first.code, first.signal) == (None, None) else (rank, host, first)


def judge_quickly(job: Job) -> Failure:
    """Return the failure of an attempt by its records alone, without a diagnosis."""
    first = job.first_failure
    if job.cause is Cause.PREEMPTED:
        return Failure(Kind.PREEMPTED, "preempted", confidence="certain")
    if job.cause is Cause.REFUSED:
        return Failure(Kind.INFRA, "preflight-failed", tuple(job.reason.values.get("hosts") or ()))
    if job.cause is Cause.HUNG:
        kind = Kind.INFRA if job.reason.key == "reason.hung-without-host" else Kind.HANG
        hosts, ranks = (tuple(job.reason.values.get(name) or ()) for name in ("hosts", "ranks"))
        return Failure(kind, "hang", hosts, ranks, "likely")
    if job.cause is Cause.START_TIMEOUT:
        return Failure(Kind.INFRA, "start-timeout", tuple(job.reason.values.get("hosts") or ()))
    if first is None:
        is_lost = job.cause is Cause.NODE_LOST
        return Failure(Kind.INFRA, "supervisor-lost") if is_lost else Failure(Kind.UNKNOWN, "unknown")
    ranks = () if first.rank is None else (first.rank,)
    if first.kind in reasons.LOST.values():
        return Failure(Kind.INFRA, first.kind, (first.host,), ranks, "certain")
    if first.kind == "start-failed":
        return Failure(Kind.USER, first.kind, (first.host,), ranks, "likely")
    return Failure(Kind.UNKNOWN, first.kind, (first.host,), ranks)
