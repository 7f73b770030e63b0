"""How an attempt ended, by its records alone: what failed first, and the kind of its failure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from ascendrun.core.jobs import reasons
from ascendrun.core.jobs.job import Cause, Exit, Job, NodeProgress, Phase
from ascendrun.core.jobs.reasons import Reason, because
from ascendrun.core.jobs.restart import Failure, Kind
from ascendrun.core.jobs.roles import named_rank, rank_labels

NO_LABELS: Mapping[int, str] = {}


def first_failure(nodes: Sequence[NodeProgress], clocks: Mapping[str, float | None], *, forks: bool) -> Reason | None:
    """Return the rank that failed first, or what starts the ranks of its node; None: none failed.

    `clocks`: by host, how far its clock is before that of the head, None: not measured. `forks`: the process of a node
    may start its ranks, so that its end is no rank's.
    """
    failed = [(rank, node.host, end) for node in nodes for rank, end in node.exits.items() if end.is_failure]
    if not failed:
        return None

    def order(one: tuple[int, str, Exit]) -> tuple[bool, float, int]:
        rank, host, end = one
        return rank < 0, end.at_ns - (clocks.get(host) or 0.0) * 1e9, rank  # a launcher follows its ranks

    started = [
        (rank, node.host, one.exit)
        for node in nodes
        for rank, one in node.forked.items()
        if one.exit is not None and one.exit.is_failure and one.exit.signal != signal.SIGTERM  # sent by a launcher
    ]
    forked = min(started, key=order, default=None)
    if forked is not None and (forked[2].code, forked[2].signal) != (None, None):
        return exit_reason(*forked)
    rank, host, end = min(failed, key=order)
    return exit_reason(-1 if forks else rank, host, end, rank_labels(nodes))


def completing_ranks(job: Job) -> tuple[int, ...]:
    """Return the ranks whose ends complete the job while it has other nodes, which are stopped then; (): it goes on.

    All nodes that end the job, of one role if it has roles, have ended with success, and none that ends it has failed.
    Those that only serve may have, because these have ended."""
    ending = [node for node in job.nodes if node.ends_job]
    if any(end.is_failure for node in ending for end in node.exits.values()):
        return ()
    for role in dict.fromkeys(node.role for node in ending):
        own = [node for node in ending if node.role == role]
        if len(own) < len(job.nodes) and all(node.phase is Phase.ENDED and node.has_succeeded for node in own):
            return tuple(rank for node in own for rank in node.ranks)
    return ()


def exit_reason(rank: int, host: str, end: Exit, labels: Mapping[int, str] = NO_LABELS) -> Reason:
    """Return how a rank ended, or a launcher (a negative number). `labels`: of the ranks of roles."""
    who, ranks = ("launcher", ()) if rank < 0 else ("rank", (rank,))
    named = named_rank(ranks, labels)
    if end.signal is not None:
        return because(f"{who}-killed", [host], ranks, signal=end.signal, **named)
    return because(f"{who}-exited", [host], ranks, code=end.code, **named)


def judge_quickly(job: Job) -> Failure:
    """Return the failure of an attempt by its records alone, without a diagnosis."""
    hosts, ranks = job.reason.hosts, job.reason.ranks
    if job.cause is Cause.PREEMPTED:
        return Failure(Kind.PREEMPTED, "preempted", confidence="certain")
    if job.cause is Cause.REFUSED:
        return Failure(Kind.INFRA, "preflight-failed", hosts)
    if job.cause is Cause.HUNG:
        kind = Kind.INFRA if job.reason.code == "hung-without-host" else Kind.HANG
        return Failure(kind, "hang", hosts, ranks, "likely")
    if job.cause is Cause.START_TIMEOUT:
        return Failure(Kind.INFRA, "start-timeout", hosts)
    if job.first_failure is None:
        is_lost = job.cause is Cause.NODE_LOST
        return Failure(Kind.INFRA, "supervisor-lost") if is_lost else Failure(Kind.UNKNOWN, "unknown")
    first = job.first_failure.reason
    if first.code in reasons.LOST.values():
        return Failure(Kind.INFRA, first.code, first.hosts, first.ranks, "certain")
    if first.code in ("rank-start-failed", "host-start-failed"):
        return Failure(Kind.USER, "start-failed", first.hosts, first.ranks, "likely")
    return Failure(Kind.UNKNOWN, first.code, first.hosts, first.ranks)
