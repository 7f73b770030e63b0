"""Scheduling of queued jobs over the hosts of one head node: pure. Higher priorities first, then the oldest.

A job gets hosts of its pool that are usable and free. A job that waits is passed by others until it has waited for
RESERVE_S; then hosts are reserved for it. A job that has too few usable hosts reserves nothing, so that a host that
does not respond or is drained stops no other job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import field
from typing import Callable, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.inputs import DependencyFailed, NodesFree, SparesFree, WaitingForNodes, waits_for_hosts
from ascendrun.core.jobs.job import ACTIVE_STATES, Cause, Job, StageFiles, State
from ascendrun.core.jobs.reasons import Detail, Reason, because, needed

RESERVE_S = 600.0
"""Seconds after which hosts are reserved for a job that waits, and for which a job that pauses keeps its hosts."""


@dataclass(frozen=True)
class Claim:
    """Use of one host by a job: `count` of its `capacity` slots (capacity None: the entire host), or only the devices
    `ids`."""

    host: str
    count: int
    capacity: int | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Contender:
    """A job that uses hosts or waits for them. `claims`: of each host of its pool, in the order of the hostfile.
    `unusable`: hosts on which no attempt of it may be placed, and why. `away`: hosts that do not respond, and why: only
    the first start of a job is placed there, if there are no others. `avoided`: hosts to choose last. `places`: the
    machine of each host, equal for all its names; a host that is missing has its name only. `lost`: unusable hosts
    that a user has given up with their disks; a stage does not wait for them, and fails where its files are lost."""

    job: Job
    claims: Mapping[str, Claim]
    unusable: Mapping[str, Detail] = field(default_factory=dict)
    away: Mapping[str, Detail] = field(default_factory=dict)
    avoided: Set[str] = frozenset()
    places: Mapping[str, str] = field(default_factory=dict)
    lost: Set[str] = frozenset()


Decision = Union[NodesFree, SparesFree, WaitingForNodes, DependencyFailed]


def schedule(
    contenders: Sequence[Contender], find: Callable[[str], Job | None], *, now_s: float
) -> Mapping[str, Decision]:
    """Return for every QUEUED job where it starts, or why it waits, and for jobs that lack hosts which ones are free.
    `find` returns a job by its id, None: not found."""
    taken = _Taken()
    for one in contenders:
        pauses = one.job.state is State.BACKOFF and now_s - one.job.since_s < RESERVE_S
        if pauses or one.job.state in ACTIVE_STATES:
            taken.add(one, (*one.job.hosts, *one.job.spares))
    queued = [one for one in contenders if one.job.state is State.QUEUED]
    queued.sort(key=lambda one: (-one.job.priority, one.job.created_at_s, one.job.id))
    decisions = {one.job.id: _decide(one, taken, find, now_s) for one in queued}
    for one in queued:
        if isinstance(decisions[one.job.id], WaitingForNodes) and _is_in_line(one.job, find):
            taken.add(one, [host for host in one.claims if host not in one.unusable])
    for one in contenders:
        hosts = _more_hosts(one, taken) if one.job.lacks_hosts else ()
        if hosts:
            taken.add(one, hosts)
            decisions[one.job.id] = SparesFree(hosts)
    return decisions


def _is_in_line(job: Job, find: Callable[[str], Job | None]) -> bool:
    """Return whether a job would start on free hosts: it waits for nothing else."""
    return job.held_by is None and (not job.needs or check_dependency(job, find(job.needs)) is None)


def _more_hosts(one: Contender, taken: _Taken) -> tuple[str, ...]:
    """Return the free hosts with which a running job would have as many as it requested; those to avoid come last."""
    job = one.job
    others = [host for host in one.claims if host not in (*job.hosts, *job.spares, *one.unusable, *one.away)]
    free = sorted((host for host in others if not taken.blockers(one, host)), key=lambda host: host in one.avoided)
    return tuple(free[: max(0, job.request.nodes - len(job.hosts) - len(job.spares))])


def check_dependency(job: Job, before: Job | None) -> None | WaitingForNodes | DependencyFailed:
    """Return whether a QUEUED job may wait for nodes, given its dependency (None: unknown); None: it may.

    A job behind a skipped stage gets the reason of the stage that failed.
    """
    if before is None:
        return DependencyFailed(because("dependency-unknown", job=job.needs))
    if before.state is State.SUCCEEDED:
        return None
    if before.is_terminal and before.cause is Cause.NEED:
        return DependencyFailed(before.reason)
    named = needed(before.id, before.stage)
    if before.is_terminal:
        return DependencyFailed(because("dependency-failed", needed=named, job=before.id, state=before.state.value))
    return WaitingForNodes(because("waiting-for-job", needed=named, job=before.id))


class _Taken:
    """The claims on each machine: of jobs that use it, and reservations of queued jobs."""

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[Job, Claim]]] = {}

    def add(self, one: Contender, hosts: Sequence[str]) -> None:
        for host in hosts:
            if host in one.claims:
                self._held.setdefault(one.places.get(host, host), []).append((one.job, one.claims[host]))

    def blockers(self, one: Contender, host: str) -> tuple[Job, ...]:
        """Return the jobs that must end before the claim of `one` on a host fits; (): it fits."""
        claim, held = one.claims[host], self._held.get(one.places.get(host, host), ())
        if not held:
            return ()
        if claim.ids is not None and all(other.ids is not None for _, other in held):
            return tuple(job for job, other in held if set(claim.ids) & set(other.ids or ()))
        if claim.capacity is None or any(other.capacity is None or other.ids is not None for _, other in held):
            return tuple(job for job, _ in held)
        used = sum(other.count for _, other in held)
        return tuple(job for job, _ in held) if used + claim.count > claim.capacity else ()


def _decide(one: Contender, taken: _Taken, find: Callable[[str], Job | None], now_s: float) -> Decision:
    job = one.job
    waits = check_dependency(job, find(job.needs)) if job.needs else None
    if waits is not None:
        return waits
    if job.held_by is not None:
        return WaitingForNodes(because("held-by-user", user=job.held_by))
    if job.engine is not None and not job.pool:
        return WaitingForNodes(job.reason)  # for the hosts that its engine grants
    bound = tuple(host for host in _bound_hosts(job, find) if host not in one.lost)[: job.request.nodes]
    usable = _usable(one, bound, now_s)
    missing = [host for host in bound if host not in usable]
    if missing or len(usable) < job.request.least:
        barred = {**one.away, **one.unusable}
        barred = {host: barred[host] for host in missing or barred if host in barred}
        count = len(usable) if not missing else len(bound) - len(missing)
        why = _each(barred)
        return WaitingForNodes(because("too-few-hosts", barred, why=why, needed=job.request.least, usable=count))
    blockers = {host: taken.blockers(one, host) for host in usable}
    free = [host for host in usable if not blockers[host]]
    if len(free) >= job.request.least and all(host in free for host in bound):
        hosts = _in_rank_order(job, bound, free)
        spares = tuple(host for host in free if host not in hosts and host not in one.away)[: job.request.spares]
        taken.add(one, (*hosts, *spares))
        return NodesFree(hosts, spares, _replaced(one, hosts, find))
    if now_s - job.since_s >= RESERVE_S:
        order = sorted(usable, key=lambda host: (host not in bound, host not in free))
        taken.add(one, order[: job.request.nodes])
    return WaitingForNodes(_reason({host: blockers[host] for host in bound or usable if blockers[host]}))


def _each(barred: Mapping[str, Detail]) -> Detail:
    """Return why hosts cannot be used: their common reason, else that of each."""
    groups: list[tuple[Detail, list[str]]] = []
    for host, why in barred.items():
        same = next((hosts for own, hosts in groups if own == why), None)
        if same is None:
            groups.append((why, [host]))
        else:
            same.append(host)
    if len(groups) < 2:
        return groups[0][0] if groups else because("host-unknown")
    why, hosts = groups.pop()
    found = because("host-why", hosts, why=why)
    for why, hosts in reversed(groups):
        found = because("host-and-others", hosts, why=why, others=found)
    return found


def _usable(one: Contender, bound: Sequence[str], now_s: float) -> tuple[str, ...]:
    """Return the hosts on which the job may be placed, in the order of choice: those of the attempt before, its spares,
    the others, those that it avoids. At its first start also those that do not respond, if there are no others: it then
    fails with their error at once, unless it continues the work of a stage (`bound`), or was queued long: it waits."""
    hosts = [host for host in one.claims if host not in one.unusable and host not in one.away]
    if not waits_for_hosts(one.job, now_s) and not bound and len(hosts) < one.job.request.least:
        hosts += [host for host in one.away if host in one.claims and host not in one.unusable]
    before = one.job.past[-1].hosts if one.job.past else ()
    return tuple(
        sorted(
            hosts,
            key=lambda host: (host in one.away, host in one.avoided, host not in before, host not in one.job.spares),
        )
    )


def _in_rank_order(job: Job, bound: Sequence[str], free: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts of the attempt: those of the attempt before keep their node ranks, others take the places that
    are left."""
    before = job.past[-1].hosts if job.past else ()
    chosen = list(dict.fromkeys((*bound, *free)))[: job.request.nodes]
    kept = {rank: host for rank, host in enumerate(before[: len(chosen)]) if host in chosen}
    rest = iter([host for host in chosen if host not in kept.values()])
    return tuple(kept.get(rank) or next(rest) for rank in range(len(chosen)))


def _bound_hosts(job: Job, find: Callable[[str], Job | None]) -> Iterator[str]:
    """Yield the hosts that have files of the job: of the stages before it, the newest first."""
    seen: set[str] = set()
    source = job.request.same_as
    while source is not None:
        before = find(source)
        if before is None:
            return
        for host in before.hosts:
            if host not in seen and host in job.pool:
                seen.add(host)
                yield host
        source = before.request.same_as


def _replaced(one: Contender, hosts: Sequence[str], find: Callable[[str], Job | None]) -> Mapping[str, StageFiles]:
    """Return, for each host that takes the place of a host that a user gave up, the files that a stage requires."""
    files: dict[str, StageFiles] = {}
    source = one.job.needs
    while source is not None and (before := find(source)) is not None:
        for node in before.nodes:
            if node.host in one.job.pool and node.machine_key is not None:
                files[node.host] = StageFiles(node.host, node.machine_key, before.stage)
        source = before.needs
    required = list(files)[: one.job.request.nodes]
    lost = [files[host] for host in required if host in one.lost]
    return dict(zip([host for host in hosts if host not in required], lost))


def _reason(blockers: Mapping[str, Sequence[Job]]) -> Reason:
    """Return what a job waits for. `blockers`: the jobs before it, by host."""
    job = next(iter(blockers.values()))[0]
    code = "queued-behind" if job.state is State.QUEUED else "nodes-in-use"
    return because(code, sorted(blockers), job=job.id, name=job.name)
