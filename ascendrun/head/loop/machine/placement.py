"""Where queued jobs start: the machines that a job may use now, and why not the others."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ascendrun.core.hosts import Host
from ascendrun.core.jobs.draft import PASSED_OVER_S
from ascendrun.core.jobs.fair_share import Account
from ascendrun.core.jobs.inputs import NodesFree
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import Detail, because
from ascendrun.core.jobs.restart import avoided_hosts, excluded_hosts
from ascendrun.core.jobs.schedule import Claim, Contender, Decision, first_in_line, schedule
from ascendrun.core.machines import Machine, MachineRecord, address_of, machine_id
from ascendrun.head.agents.connections import Connections, dialled
from ascendrun.head.loop.machine.machines import Machines
from ascendrun.head.loop.machine.share_use import ShareUse
from ascendrun.head.loop.steps import JobSteps
from ascendrun.head.protocol.remote import AgentConnection
from ascendrun.head.state.job_files import read_plan
from ascendrun.head.state.store import Store
from ascendrun.head.survey.submission import Submission, claims_of, make_job
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.queue.client import SharedQueue

    Pool = tuple[Job, JobSpec, Sequence[Host], Mapping[str, Claim]]

SCARCE_S = 30.0
"""Seconds for which a host that was not ready for a job is not used by it, if there are too few others."""


class Placement:
    """Use from the controller's thread."""

    def __init__(
        self, machines: Machines, links: Connections, jobs: JobSteps, store: Store, queue: SharedQueue | None = None
    ) -> None:
        """`queue`: decides for all users, None: this controller decides for its own."""
        self._machines, self._links, self._jobs, self._queue = machines, links, jobs, queue
        self._state_dir, self._use = store.path.parent, ShareUse(store.jobs)
        self._planned_s: dict[str, tuple[int, float | None]] = {}
        self._seen: tuple[object, ...] = ()
        self._first: frozenset[str] = frozenset()

    def schedule(self) -> None:
        """Decide again where queued jobs start: when a job, a machine or a connection has changed, else once a
        second."""
        connected = [(link.is_up, link.failures) for link in self._links]
        jobs = [runner.job for runner in self._jobs]
        turn = None if self._queue is None else self._queue.turn
        seen = (jobs, self._machines.records.version, connected, int(time.time()), turn)
        if seen == self._seen:
            return
        self._seen = seen
        if self._queue is not None:
            self._machines.take_drains(self._queue.drains)
        decisions = self._decide() if self._queue is None else self._queue.decide(self._contenders(), self._jobs.find)
        self._first = first_in_line(decisions)
        for job_id, decision in decisions.items():
            self._jobs.feed(job_id, decision)

    def _decide(self, *more: Pool) -> Mapping[str, Decision]:
        now_s = time.time()
        share = self._use.share(tuple(self._jobs), now_s)
        return schedule(self._contenders(*more), self._jobs.find, now_s=now_s, share=share, first=self._first)

    def _terms(self, job: Job, spec: JobSpec) -> dict[str, Any]:
        """Return whose job it is, and when its attempt ends at the latest; of one that runs also as planned, if it has
        no limit."""
        limit_s = None if spec.timeouts.run_s is None else spec.timeouts.run_s + job.grace_s
        if limit_s is None and job.state is State.RUNNING:
            attempt, limit_s = self._planned_s.get(job.id, (None, None))
            if attempt != job.attempt:
                hours = read_plan(self._state_dir, job.id).get("hours") or [None]
                limit_s = None if hours[-1] is None else hours[-1] * 3600
                self._planned_s[job.id] = job.attempt, limit_s
        account = Account(job.user, (spec.labels or {}).get("project"))
        terms = {"account": account, "limit_s": limit_s, "started_s": job.started_at_s}
        return {**terms, "preemptible_after_s": spec.preemptible_after_s}

    def end(self, runner: JobRunner) -> None:
        """Note that a job has no runner any more."""
        self._use.end(runner)
        self._planned_s.pop(runner.job.id, None)

    def place(self, submission: Submission) -> tuple[Host, ...]:
        """Return the hosts on which a job would start now; if it would wait, those of its pool that come first."""
        job = make_job(submission, "j-new", "dry-run", time.time())
        new = (job, submission.spec, submission.hosts, claims_of(submission.spec, submission.hosts))
        decision = self._decide(new)[job.id]
        names = decision.hosts if isinstance(decision, NodesFree) else job.pool[: job.request.nodes]
        return tuple(host for name in names for host in submission.hosts if host.name == name)

    def _contenders(self, *more: Pool) -> tuple[Contender, ...]:
        """Return the live jobs, and more with the hosts and claims of their pools, with what the machines say."""
        jobs: list[Pool] = [*((runner.job, runner.spec, *_offered(runner)) for runner in self._jobs), *more]
        held, now_s = self._machines.held(), time.time()
        must_know = bool(held) or self._queue is not None  # a machine may be in use under another name
        links = {dialled(link.host): link for link in self._links}
        records = self._machines.records.all()
        barred = {False: _Barred(held, records, links.values(), now_s)}
        if any(job.request.examines for job, _, _, _ in jobs):
            examiners = {job.user for job, _, _, _ in jobs if job.request.examines}
            opened = [record.opened_for(examiners) for record in records]
            barred[True] = _Barred(held, opened, links.values(), now_s)
        found = []
        for job, spec, hosts, claims in jobs:
            closed, terms = barred[job.request.examines], self._terms(job, spec)
            one = self._contender(job, hosts, claims, closed, links, now_s, must_know=must_know)
            one = replace(one, **terms)
            planned = closed.planned(hosts, one.ends_s(now_s)) if job.state is State.QUEUED or job.lacks_hosts else {}
            found.append(replace(one, unusable={**planned, **one.unusable}) if planned else one)
        return tuple(found)

    def _contender(
        self,
        job: Job,
        pool: Sequence[Host],
        claims: Mapping[str, Claim],
        barred: _Barred,
        links: Mapping[str, AgentConnection],
        now_s: float,
        *,
        must_know: bool,
    ) -> Contender:
        is_open = job.state is State.QUEUED or job.lacks_hosts
        used = {*job.hosts, *job.spares}
        hosts = [host for host in pool if is_open or host.name in used]
        places = {host.name: barred.place(host) for host in hosts}
        if job.engine is not None:  # two allocations may share a node
            places = {host.name: f"{host.allocation}/{host.name}" for host in hosts}
        if not is_open:
            return Contender(job, claims, places=places)
        unusable: dict[str, Detail] = {host.name: why for host in hosts if (why := barred.why(host)) is not None}
        excluded = excluded_hosts(job.policy, job.past)
        unusable.update((name, because("host-excluded")) for name in excluded)
        passed = {name: at_s for name, at_s in job.passed_over.items() if at_s > now_s and name not in unusable}
        avoided = avoided_hosts(job.past, now_s)
        away: dict[str, Detail] = {}
        unknown: list[Host] = []
        for host in hosts if links or must_know else ():
            link = links.get(dialled(host))
            if host.name in unusable or (link is not None and link.is_up):
                continue
            if link is not None and link.failures:
                away[host.name] = because("host-away", why=link.last_error.message if link.last_error else None)
            elif must_know and not barred.is_known(host):
                unknown.append(host)
        is_scarce = len({host.name for host in hosts} - {*unusable, *away, *passed}) < job.request.least
        for name, until_s in passed.items():
            again_s = until_s - PASSED_OVER_S + SCARCE_S if is_scarce else until_s
            if again_s > now_s:
                unusable[name] = because("host-passed-over", until_s=again_s)
                away.pop(name, None)
            else:
                avoided |= {name}
        is_short = len(hosts) - len(unusable) - len(away) - len(unknown) < job.request.nodes
        some = 0 if self._queue is None else job.request.nodes  # others may use those that are known for long
        for host in unknown if is_short else unknown[:some]:
            self._links.get(host)  # it connects
        unusable.update((host.name, because("host-unidentified")) for host in unknown)
        lost = frozenset(host.name for host in hosts if barred.is_lost(host))
        return Contender(job, claims, unusable, away, avoided, places, lost)


def _offered(runner: JobRunner) -> tuple[Sequence[Host], Mapping[str, Claim]]:
    """Return the hosts of a job's pool with its claims: of a job of an engine only those of its allocation."""
    if runner.job.engine is None:
        return runner.hosts, runner.claims
    hosts = [host for host in runner.hosts if host.name in runner.job.pool]
    return hosts, {host.name: runner.claims[host.name] for host in hosts}


class _Barred:
    """Machines that no job may use now, by their names in hostfiles."""

    def __init__(
        self, held: Sequence[Machine], records: Iterable[MachineRecord], links: Iterable[AgentConnection], now_s: float
    ) -> None:
        self._keys: dict[str, str] = {}
        self._why: dict[str, Text] = {}
        self._lost: set[str] = set()
        self._planned: dict[str, tuple[float, Text]] = {}
        for record in records:
            drain = record.planned(now_s)
            if drain is not None and drain.starts_at_s is not None:
                plan = drain.starts_at_s, drain.message(now_s)
                self._planned.update(dict.fromkeys((record.key, *record.addresses), plan))
            if record.is_identified:
                self._keys.update(dict.fromkeys(record.addresses, record.key))
            for closure in record.closures(now_s)[:1]:
                self._why.update(dict.fromkeys((record.key, *record.addresses), closure.message()))
            if any(closure.is_lost for closure in record.closures(now_s)):
                self._lost |= {record.key, *record.addresses}
        for link in links:
            key = machine_id(link.host, link.info.machine_key) if link.is_up else None
            if key is not None:
                self._keys[address_of(link.host)] = key
        for machine in held:
            places = (*machine.addresses, *([] if machine.key is None else [machine.key]))
            self._why.update(dict.fromkeys(places, machine.holds[0].reason()))

    def planned(self, hosts: Sequence[Host], end_s: float) -> dict[str, Detail]:
        """Return the hosts that are to be drained before a job ends, and why."""
        plans = {host.name: self._planned.get(self.place(host)) for host in hosts}
        return {name: plan[1] for name, plan in plans.items() if plan is not None and plan[0] < end_s}

    def is_known(self, host: Host) -> bool:
        """Return whether the host has been identified as a certain machine."""
        address = address_of(host)
        return address in self._keys or address in self._why

    def place(self, host: Host) -> str:
        """Return the machine of a host, equal for all its names; its address if the machine is not known."""
        address = address_of(host)
        return self._keys.get(address, address)

    def is_lost(self, host: Host) -> bool:
        """Return whether a user has given up the machine with its disks."""
        return bool({address_of(host), self.place(host)} & self._lost)

    def why(self, host: Host) -> Text | None:
        """Return why no job may use the host, None: jobs may."""
        return self._why.get(address_of(host)) or self._why.get(self.place(host))
