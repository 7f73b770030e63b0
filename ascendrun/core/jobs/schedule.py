"""Scheduling of queued jobs over the hosts of one head node: pure. Higher priorities first, then the oldest; with
shares, the account with the least use of its share is first. Who is first and has waited for RESERVE_S keeps that
place until it starts: hosts that become free for a wide job would else be given to another account as soon as the use
of its own has grown.

A job gets hosts of its pool that are usable and free. The first in line that does not start reserves hosts from the
time at which enough of them are expected to be free (EASY backfill): another job starts there only if it ends before.
Where that time is not known, a job that waits is passed by others until it has waited for RESERVE_S; then hosts are
reserved for it. A job that has too few usable hosts or is above its quota reserves nothing, so that it, or a host that
does not respond or is drained, stops no other job.

The first in line takes hosts from running jobs of lower priorities that allow it: from as few as possible, those of the
lowest priority and the latest start. Only it does, since any other could lose what becomes free to a job before it. Of
another account, only of one that has used more of its share: else it would get the hosts back as soon as it is queued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import field
from typing import Callable, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.endings import Preempted
from ascendrun.core.jobs.fair_share import Account, FairShare
from ascendrun.core.jobs.inputs import DependencyFailed, NodesFree, SparesFree, WaitingForNodes, waits_for_hosts
from ascendrun.core.jobs.job import ACTIVE_STATES, Cause, Job, State
from ascendrun.core.jobs.reasons import Detail, Reason, because, needed
from ascendrun.core.jobs.stage_hosts import bound_hosts, replaced_files

NEVER = float("inf")
PLANNED = 100
"""Jobs, the first in line that do not start, whose start is estimated; Slurm's bf_max_job_test has this purpose."""
RESERVE_S = 600.0
"""Seconds after which hosts are reserved for a job that waits, and for which a job that pauses keeps its hosts."""

BEHIND = ("queued-behind", "nodes-in-use", "preempts")
"""Reasons of a job that waits for nothing but hosts: behind a job that waits, or that uses them."""


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
    that a user has given up with their disks; a stage does not wait for them, and fails where its files are lost.
    `account`: who uses the devices. `limit_s`: how long an attempt may last, None: not known. `started_s`: when the
    present attempt started, None: it has not. `preemptible_after_s`: how long its ranks run before they may be stopped
    for a job of a higher priority, None: for none."""

    job: Job
    claims: Mapping[str, Claim]
    unusable: Mapping[str, Detail] = field(default_factory=dict)
    away: Mapping[str, Detail] = field(default_factory=dict)
    avoided: Set[str] = frozenset()
    places: Mapping[str, str] = field(default_factory=dict)
    lost: Set[str] = frozenset()
    account: Account = Account()
    limit_s: float | None = None
    started_s: float | None = None
    preemptible_after_s: float | None = None

    def is_preemptible(self, now_s: float) -> bool:
        """Return whether its hosts may become free for another job, or do so already."""
        if self.preemptible_after_s is None or self.started_s is None:
            return False
        is_due = self.job.state is State.RUNNING and now_s - self.started_s >= self.preemptible_after_s
        return is_due or self.job.state is State.STOPPING

    def ends_s(self, from_s: float) -> float:
        """Return when an attempt that starts at `from_s` ends at the latest; infinite: not known."""
        return NEVER if self.limit_s is None else from_s + self.limit_s

    def devices(self, hosts: Sequence[str]) -> int:
        return sum(self.claims[host].count for host in hosts if host in self.claims)


Decision = Union[NodesFree, SparesFree, WaitingForNodes, DependencyFailed, Preempted]


def schedule(
    contenders: Sequence[Contender],
    find: Callable[[str], Job | None],
    *,
    now_s: float,
    share: FairShare | None = None,
    first: Set[str] = frozenset(),
) -> Mapping[str, Decision]:
    """Return for every QUEUED job where it starts, or why it waits and when it is expected to start; for jobs that lack
    hosts which ones are free now, if others than they have claimed: hosts that a job in line waits for are not; and
    which running jobs are preempted. `find` returns a job by its id, None: not found. `first`: `first_in_line` of the
    decisions before."""
    loads = None if share is None else share.loads([one.account for one in contenders], now_s)
    taken = _Taken(now_s, share, loads)
    for one in contenders:
        pauses = one.job.state is State.BACKOFF and now_s - one.job.since_s < RESERVE_S
        if pauses or one.job.state in ACTIVE_STATES:
            taken.use(one, one.job.hosts if one.job.lacks_hosts else (*one.job.hosts, *one.job.spares))
    queued = [one for one in contenders if one.job.state is State.QUEUED]
    long = {one.job.id for one in queued if now_s - one.job.since_s >= RESERVE_S}
    queued = _in_line(queued, loads, first & long)
    decisions = {one.job.id: _decide(one, taken, find) for one in queued}
    lacking = [one for one in contenders if one.job.lacks_hosts]
    for one in queued if lacking else ():
        decision = decisions[one.job.id]
        if isinstance(decision, WaitingForNodes) and decision.reason.code in BEHIND:
            taken.reserve(one, [host for host in one.claims if host not in one.unusable])
    kept = {one.job.id: _claim(one, one.job.spares, (), taken) for one in lacking}
    for one in lacking:
        hosts = _claim(one, _others(one), kept[one.job.id], taken)
        if set(hosts) != set(one.job.spares):
            decisions[one.job.id] = SparesFree(hosts)
    return {**decisions, **taken.preempted}


def first_in_line(decisions: Mapping[str, Decision]) -> frozenset[str]:
    """Return the jobs that wait with no other before them: one, or one for each separate part of the hosts."""
    return frozenset(name for name, one in decisions.items() if isinstance(one, WaitingForNodes) and one.is_first)


def _in_line(queued: Sequence[Contender], loads: Mapping[Account, float] | None, first: Set[str]) -> list[Contender]:
    """Return the queued jobs in their order. Accounts with an equal use of their shares take turns. Those that are
    `first` stay so, or give their place to a job of a higher priority of their account."""
    line = sorted(queued, key=lambda one: (-one.job.priority, one.job.created_at_s, one.job.id))
    if loads is None:
        return line
    kept = {one.account: one.job.priority for one in line if one.job.id in first}
    turns, highest = dict[Account, int](), dict[Account, int]()
    places: dict[str, tuple[bool, float, int, float]] = {}
    for one in line:
        turns[one.account] = turn = turns.get(one.account, 0) + 1
        is_highest = one.job.priority == highest.setdefault(one.account, one.job.priority)
        stays = is_highest and (one.job.id in first or turn == 1 and one.job.priority > kept.get(one.account, NEVER))
        places[one.job.id] = (not stays, loads[one.account], turn, one.job.created_at_s)
    return sorted(line, key=lambda one: places[one.job.id])


def _claim(one: Contender, hosts: Sequence[str], claimed: tuple[str, ...], taken: _Taken) -> tuple[str, ...]:
    """Claim those of some hosts that are free, until a running job would have as many as it requested. Return all that
    it has claimed."""
    free = [host for host in hosts if not taken.blockers(one, host)]
    more = tuple(free[: max(0, one.job.request.nodes - len(one.job.hosts) - len(claimed))])
    if taken.above_quota(one, one.devices(more)) is not None:
        return claimed
    taken.use(one, more)
    return (*claimed, *more)


def _others(one: Contender) -> list[str]:
    """Return the hosts that a job could use and has neither in use nor claimed; those to avoid come last."""
    others = [host for host in one.claims if host not in (*one.job.hosts, *one.job.spares, *one.unusable, *one.away)]
    return sorted(others, key=lambda host: host in one.avoided)


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


@dataclass(frozen=True)
class _Hold:
    """Use of a machine from one time to another. `is_only_expected`: it hinders no other job."""

    job: Job
    claim: Claim
    start_s: float
    end_s: float
    is_only_expected: bool = False


class _Taken:
    """The claims on each machine: of jobs that use it, and reservations of queued jobs; and the devices in use by
    each name that has a quota."""

    def __init__(self, now_s: float, share: FairShare | None, loads: Mapping[Account, float] | None) -> None:
        self.now_s, self._loads = now_s, loads
        self._preemptible: list[Contender] = []
        self.preempted: dict[str, Decision] = {}
        self.awaited: dict[str, tuple[str, ...]] = {}
        self._quotas = {} if share is None else share.policy.quotas
        self._held: dict[str, list[_Hold]] = {}
        self._busy: dict[str, dict[object, tuple[Job, ...]]] = {}  # what is in the way now, whatever the limit
        self._free: dict[str, dict[object, float]] = {}  # from when on; both by the form of a claim
        self._devices: dict[str, int] = {}
        self._seconds = {} if share is None else share.used_by_name(now_s)
        self._wanted: set[str] = set()
        self.first: set[str] = set()
        self._planned = 0

    def use(self, one: Contender, hosts: Sequence[str]) -> None:
        """Add the hosts that a job uses now."""
        if one.is_preemptible(self.now_s):
            self._preemptible.append(one)
        end_s = max(self.now_s, one.ends_s(self.now_s if one.started_s is None else one.started_s))
        self._hold(one, hosts, -NEVER, end_s)
        for name in one.account.names:
            self._devices[name] = self._devices.get(name, 0) + one.devices(hosts)

    def reserve(self, one: Contender, hosts: Sequence[str], *, is_only_expected: bool = False) -> None:
        """Add hosts that no job may use from now on."""
        self._hold(one, hosts, -NEVER, NEVER, is_only_expected)

    def _hold(
        self, one: Contender, hosts: Sequence[str], start_s: float, end_s: float, is_only_expected: bool = False
    ) -> None:
        for host in hosts:
            if host in one.claims:
                hold = _Hold(one.job, one.claims[host], start_s, end_s, is_only_expected)
                place = one.places.get(host, host)
                self._held.setdefault(place, []).append(hold)
                self._busy.pop(place, None)
                self._free.pop(place, None)

    def blockers(self, one: Contender, host: str) -> tuple[Job, ...]:
        """Return the jobs that must end before the claim of `one` on a host fits now, as long as it may last; (): it
        fits."""
        place, claim, end_s = one.places.get(host, host), one.claims[host], one.ends_s(self.now_s)
        held, known = self._held.get(place, ()), self._busy.setdefault(place, {})
        form = claim.count, claim.capacity, claim.ids
        if form not in known:
            known[form] = _in_the_way(claim, [h for h in held if h.start_s == -NEVER and not h.is_only_expected])
        return known[form] or _in_the_way(claim, [h for h in held if h.start_s < end_s and not h.is_only_expected])

    def _preempt(self, one: Contender, usable: Sequence[str], bound: Sequence[str]) -> tuple[str, ...]:
        """Return hosts that become free for a job, by jobs that are preempted for it or were before; (): it waits."""
        lower = [other for other in self._preemptible if other.job.priority < one.job.priority]
        if self._loads is not None:
            own_load = self._loads[one.account]
            lower = [other for other in lower if other.account == one.account or own_load < self._loads[other.account]]
        order = sorted(
            lower, key=lambda other: (other.job.state is State.STOPPING, -other.job.priority, other.started_s)
        )
        ending = {other.job.id: other for other in order}
        hosts = self._fitting(one, usable, bound, ending)
        for other in order if hosts else ():
            fewer = {name: each for name, each in ending.items() if name != other.job.id}
            enough = self._fitting(one, usable, bound, fewer)
            hosts, ending = (enough, fewer) if enough else (hosts, ending)
        for name, other in ending.items() if hosts else ():
            if other.job.state is State.RUNNING:
                shared = [host for host in other.job.hosts if host in hosts]
                self.preempted[name] = Preempted(because("preempted-by", shared, job=one.job.id, name=one.job.name))
        return hosts

    def _fitting(
        self, one: Contender, usable: Sequence[str], bound: Sequence[str], ending: Mapping[str, Contender]
    ) -> tuple[str, ...]:
        """Return hosts for a job when others have ended; (): they are too few."""
        free, end_s = set[str](), one.ends_s(self.now_s)
        for host in usable:
            held = self._held.get(one.places.get(host, host), ())
            stay = [hold for hold in held if not hold.is_only_expected and hold.job.id not in ending]
            if not _in_the_way(one.claims[host], [hold for hold in stay if hold.start_s < end_s]):
                free.add(host)
        order = sorted((host for host in usable if host in free), key=lambda host: host not in bound)
        is_enough = len(order) >= one.job.request.least and free >= set(bound)
        return tuple(order[: one.job.request.nodes]) if is_enough else ()

    def above_quota(self, one: Contender, devices: int) -> Reason | None:
        """Return why a job may not use so many devices more; None: it may."""
        for name in one.account.names:
            quota = self._quotas.get(name)
            if quota is None:
                continue
            used, hours = self._devices.get(name, 0), self._seconds[name] / 3600
            if quota.devices is not None and used + devices > quota.devices:
                return because("above-quota", name=name, used=used, count=devices, limit=quota.devices)
            if quota.device_hours is not None and hours >= quota.device_hours:
                return because("above-hours", name=name, used=round(hours), limit=quota.device_hours)
        return None

    def line_up(self, one: Contender, usable: Sequence[str], bound: Sequence[str], free: Set[str]) -> float | None:
        """Reserve hosts for a job that does not start; return when it is expected to, None: not known."""
        places = {one.places.get(host, host) for host in usable}
        is_first = not places & self._wanted
        is_due = self.now_s - one.job.since_s >= RESERVE_S
        self._wanted |= places
        self.first |= {one.job.id} if is_first else set()
        self._planned += 1
        if is_first and (freed := self._preempt(one, usable, bound)):
            self.awaited[one.job.id] = freed
            self.reserve(one, freed)
            return None
        start_s = NEVER
        if self._planned <= PLANNED:
            at_s = {host: self._free_at(one, host) for host in usable}
            order = sorted(usable, key=lambda host: (host not in bound, at_s[host]))
            start_s = max(at_s[host] for host in order[: one.job.request.least])
        if start_s < NEVER:
            late = sorted(
                (host for host in usable if at_s[host] <= start_s), key=lambda host: (host not in bound, -at_s[host])
            )
            hosts = late[: one.job.request.least]
            self._hold(one, hosts, start_s, one.ends_s(start_s), is_only_expected=not (is_first or is_due))
            return start_s
        order = sorted(usable, key=lambda host: (host not in bound, host not in free))
        self.reserve(one, order[: one.job.request.nodes], is_only_expected=not is_due)
        return None

    def _free_at(self, one: Contender, host: str) -> float:
        """Return from when on the claim of `one` on a host is expected to fit; infinite: not known."""
        place, claim = one.places.get(host, host), one.claims[host]
        known, held = self._free.setdefault(place, {}), self._held.get(place, ())
        form = claim.count, claim.capacity, claim.ids
        if form not in known:
            ends = sorted({self.now_s, *(hold.end_s for hold in held)})
            low, high = 0, len(ends) - 1  # what fits once fits later as well
            while low < high:
                middle = (low + high) // 2
                if _in_the_way(claim, [hold for hold in held if hold.end_s > ends[middle]]):
                    low = middle + 1
                else:
                    high = middle
            known[form] = ends[low]
        return known[form]


def _in_the_way(claim: Claim, held: Sequence[_Hold]) -> tuple[Job, ...]:
    """Return the jobs that must end before a claim on the same machine fits; (): it fits."""
    if not held:
        return ()
    if claim.ids is not None and all(hold.claim.ids is not None for hold in held):
        return tuple(hold.job for hold in held if set(claim.ids) & set(hold.claim.ids or ()))
    is_whole = any(hold.claim.capacity is None or hold.claim.ids is not None for hold in held)
    if claim.capacity is None or is_whole:
        return tuple(hold.job for hold in held)
    used = sum(hold.claim.count for hold in held)
    return tuple(hold.job for hold in held) if used + claim.count > claim.capacity else ()


def _decide(one: Contender, taken: _Taken, find: Callable[[str], Job | None]) -> Decision:
    job = one.job
    waits = check_dependency(job, find(job.needs)) if job.needs else None
    if waits is not None:
        return waits
    if job.held_by is not None:
        return WaitingForNodes(because("held-by-user", user=job.held_by))
    if job.engine is not None and not job.pool:
        return WaitingForNodes(job.reason)  # for the hosts that its engine grants
    bound = tuple(host for host in bound_hosts(job, find) if host not in one.lost)[: job.request.nodes]
    usable = _usable(one, bound, taken.now_s)
    missing = [host for host in bound if host not in usable]
    if missing or len(usable) < job.request.least:
        barred = {**one.away, **one.unusable}
        barred = {host: barred[host] for host in missing or barred if host in barred}
        count = len(usable) if not missing else len(bound) - len(missing)
        why = _each(barred)
        return WaitingForNodes(because("too-few-hosts", barred, why=why, needed=job.request.least, usable=count))
    least = sorted(usable, key=lambda host: one.claims[host].count)[: job.request.nodes]
    above = taken.above_quota(one, one.devices(least))
    if above is not None:
        return WaitingForNodes(above)
    blockers = {host: taken.blockers(one, host) for host in usable}
    free = [host for host in usable if not blockers[host]]
    if len(free) >= job.request.least and all(host in free for host in bound):
        hosts = _in_rank_order(job, bound, free)
        spares = tuple(host for host in free if host not in hosts and host not in one.away)[: job.request.spares]
        taken.use(one, (*hosts, *spares))
        return NodesFree(hosts, spares, replaced_files(job, one.lost, hosts, find))
    start_s = taken.line_up(one, usable, bound, set(free))
    waits_for = [host for host in taken.awaited.get(job.id, bound) if blockers[host]]
    waits_for = waits_for or [host for host in usable if blockers[host]]
    reason = _reason({host: blockers[host] for host in waits_for}, preempts=job.id in taken.awaited)
    return WaitingForNodes(reason, start_s, job.id in taken.first)


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


def _reason(blockers: Mapping[str, Sequence[Job]], *, preempts: bool) -> Reason:
    """Return what a job waits for. `blockers`: the jobs before it, by host."""
    job = next(iter(blockers.values()))[0]
    code = BEHIND[2 if preempts else job.state is not State.QUEUED]
    return because(code, sorted(blockers), job=job.id, name=job.name)
