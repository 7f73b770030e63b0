"""Scheduling of queued jobs: by order of submission, over the jobs of one head node; a stage after its dependency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Union

from ascendrun.core.jobs import reasons
from ascendrun.core.jobs.inputs import DependencyFailed, NodesAvailable, WaitingForNodes
from ascendrun.core.jobs.job import ACTIVE_STATES, Cause, Job, State
from ascendrun.text import Text


@dataclass(frozen=True)
class Claim:
    """Use of one host by a job.

    `count` of its `capacity` slots (capacity None: the entire host), or only the devices `ids`.
    """

    host: str
    count: int
    capacity: int | None = None
    ids: tuple[int, ...] | None = None


Decision = Union[NodesAvailable, WaitingForNodes]


def schedule_all(
    jobs: Sequence[tuple[Job, Sequence[Claim]]], find: Callable[[str], Job | None]
) -> Mapping[str, Decision | DependencyFailed]:
    """Return for every QUEUED job, oldest first, whether it may start now. A job that waits for its dependency has no
    place in the queue for nodes. `find` returns a job by its id, None: not found."""
    decisions: dict[str, Decision | DependencyFailed] = {}
    ready = []
    for job, claims in jobs:
        waits = check_dependency(job, find(job.needs)) if job.needs and job.state is State.QUEUED else None
        if waits is None:
            ready.append((job, claims))
        else:
            decisions[job.id] = waits
    return {**decisions, **schedule_queue(ready)}


def schedule_queue(jobs: Sequence[tuple[Job, Sequence[Claim]]]) -> Mapping[str, Decision]:
    """Return for every QUEUED job, oldest first, whether its nodes are available or which job uses them.

    A waiting job keeps its place: a younger job does not overtake it on a host that both require.
    """
    taken: dict[str, list[tuple[Job, Claim]]] = {}
    decisions: dict[str, Decision] = {}
    for job, claims in jobs:
        for claim in claims:
            if job.state in ACTIVE_STATES or claim.host in job.unconfirmed:
                taken.setdefault(claim.host, []).append((job, claim))
    for job, claims in jobs:
        if job.state is not State.QUEUED:
            continue
        blockers = [(claim.host, holder) for claim in claims for holder in _blockers(claim, taken.get(claim.host, ()))]
        decisions[job.id] = WaitingForNodes(_reason(blockers)) if blockers else NodesAvailable()
        for claim in claims:
            taken.setdefault(claim.host, []).append((job, claim))
    return decisions


def check_dependency(job: Job, needed: Job | None) -> None | WaitingForNodes | DependencyFailed:
    """Return whether a QUEUED job may wait for nodes, given its dependency (None: unknown); None: it may.

    A job behind a skipped stage gets the reason of the stage that failed.
    """
    if needed is None:
        return DependencyFailed(reasons.dependency_unknown(str(job.needs)))
    if needed.state is State.SUCCEEDED:
        return None
    if needed.is_terminal and needed.cause is Cause.NEED:
        return DependencyFailed(needed.reason)
    if needed.is_terminal:
        return DependencyFailed(reasons.dependency_failed(needed.id, needed.stage, needed.state.value))
    return WaitingForNodes(reasons.waiting_for_job(needed.id, needed.stage))


def _blockers(claim: Claim, held: Sequence[tuple[Job, Claim]]) -> tuple[Job, ...]:
    if not held:
        return ()
    if claim.ids is not None and all(other.ids is not None for _, other in held):
        return tuple(job for job, other in held if set(claim.ids) & set(other.ids or ()))
    if claim.capacity is None or any(other.capacity is None or other.ids is not None for _, other in held):
        return tuple(job for job, _ in held)
    used = sum(other.count for _, other in held)
    return tuple(job for job, _ in held) if used + claim.count > claim.capacity else ()


def _reason(blockers: Sequence[tuple[str, Job]]) -> Text:
    host, job = blockers[0]
    hosts = sorted({name for name, _ in blockers})
    if job.state is State.QUEUED:
        return reasons.queued_behind(job.id, job.name, hosts)
    if host in job.unconfirmed:
        return reasons.nodes_unconfirmed(job.id, hosts)
    return reasons.nodes_in_use(job.id, job.name, hosts)
