"""The jobs of all users that share a queue, and what is decided about them: no socket, no file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import ConflictError
from ascendrun.core.jobs.fair_share import Account, FairShare, Usage
from ascendrun.core.jobs.inputs import NodesFree, SparesFree, WaitingForNodes
from ascendrun.core.jobs.job import ACTIVE_STATES, Job, State
from ascendrun.core.jobs.reasons import Reason, because, rename_job
from ascendrun.core.jobs.schedule import Contender, Decision, first_in_line, schedule
from ascendrun.core.machines import Closure, MachineState, QueueDrain, merge_drains
from ascendrun.core.reachability import UNKNOWN
from ascendrun.head.queue.entries import Entry, check_count
from ascendrun.head.queue.messages import Answer, QueueRow

SETTLE_S = 10.0
"""Seconds after the first report in which nothing is granted: all controllers report first what they use. They come
at once when the server starts again, or when the standby machine on which it waited becomes the head."""
FRESH_S = 15.0
"""Age of a report after which its waiting jobs get nothing, and its states are not shown as present."""
GRANT_S = 30.0
"""Seconds for which granted hosts wait for their job, and for which a job that did not come for them is passed over."""
KEPT_S = 600.0
"""Seconds for which the hosts of running jobs stay taken while their controller is silent; then leases protect them."""
HEADS = 8
"""Controllers of one user, each with its own state directory."""


@dataclass(frozen=True)
class _Grant:
    """Hosts for a job that has not reported them yet. `since_s`: of the report that they are for."""

    hosts: tuple[str, ...]
    spares: tuple[str, ...]
    since_s: float
    at: float


@dataclass
class _Session:
    """The newest report of one controller. `passed`: until when a job is passed over that did not use its grant;
    `used`: by all its jobs when it connected, None: not reported."""

    user: str
    prefix: str
    heard: float
    entries: Mapping[str, Entry] = field(default_factory=dict)
    grants: dict[str, _Grant] = field(default_factory=dict)
    passed: dict[str, float] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    used: Usage | None = None

    def report(self, entries: Sequence[Entry]) -> None:
        """Take a report, and end the grants that it has taken up or given back."""
        self.entries = {entry.id: entry for entry in entries}
        self.grants = {job: grant for job, grant in self.grants.items() if self._is_open(job, grant)}
        self.passed = {job: until for job, until in self.passed.items() if job in self.entries}
        waiting = {job: one for job, one in self.answers.items() if job in self.entries and one.reason is not None}
        self.answers = {**waiting, **{job: self.answers[job] for job in self.grants}}

    def _is_open(self, job: str, grant: _Grant) -> bool:
        entry = self.entries.get(job)
        if entry is None or entry.since_s != grant.since_s or {*grant.hosts, *grant.spares} & {*entry.unusable}:
            return False
        return entry.is_queued if grant.hosts else {*grant.spares} != {*entry.spares}

    def may_keep(self, job: str, answer: Answer) -> bool:
        """Return whether an answer holds until the next one: not a preemption, which may be needed no longer."""
        return answer.reason is None or (job in self.entries and self.entries[job].is_queued)

    def expire(self, now: float) -> None:
        for job in [job for job, grant in self.grants.items() if now - grant.at > GRANT_S]:
            del self.grants[job]
            self.passed[job] = now + GRANT_S

    def contender(self, entry: Entry) -> tuple[Contender, Job | None]:
        """Return a job for `schedule`: one with a grant has its hosts already."""
        one, source = entry.contender(self.user, self.prefix + entry.id)
        grant = self.grants.get(entry.id)
        if grant is not None and grant.hosts:
            one = replace(one, job=replace(one.job, state=State.CHECKING, hosts=grant.hosts, spares=grant.spares))
        elif grant is not None:
            one = replace(one, job=replace(one.job, spares=grant.spares))
        return one, source


class Board:
    """Not safe for threads: the server locks it."""

    def __init__(
        self, share: FairShare, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        """`share`: its usage grows by what is reported as running. `clock`: seconds that are never set; `wall`: UTC
        seconds."""
        self.share, self._clock, self._wall = share, clock, wall
        self._opens, self._counted_s = float("inf"), wall()
        self._sessions: dict[str, _Session] = {}
        self._first: frozenset[str] = frozenset()
        self.drains: tuple[QueueDrain, ...] = ()
        """Of administrators; newer ones of a machine replace those before."""

    def decided_drains(self, new: Sequence[QueueDrain], by: str) -> tuple[QueueDrain, ...]:
        """Return the drains with those that an administrator decides now. A time that is over is that of `undrain`."""
        now_s = max([self._wall(), *(one.closure.since_s + 1e-3 for one in self.drains)])
        closures = [
            replace(one.closure, state=MachineState.DRAINED, by=by, since_s=now_s, is_lost=False) for one in new
        ]
        return self.newer_drains([replace(one, closure=closure) for one, closure in zip(new, closures)])

    def newer_drains(self, known: Sequence[QueueDrain]) -> tuple[QueueDrain, ...]:
        """Return the drains with those of some machines that are the newest of theirs."""
        latest = {place: one.closure.since_s for one in self.drains for place in one.places}
        named = [one for one in known if one.hosts]
        new = [one for one in named if one.closure.since_s > max(latest.get(place, 0.0) for place in one.places)]
        return merge_drains(self.drains, new)

    # Controllers

    def report(self, user: str, head: str, entries: Sequence[Entry] | None) -> None:
        """Take the report of a controller. Raises ConflictError if there was none before, or for too many of a user."""
        key, now = f"{user}/{head}/", self._clock()
        session = self._sessions.get(key)
        others = [one for one in self._sessions.values() if one.user == user and one is not session]
        check_count(len(entries or ()) + sum(len(one.entries) for one in others))
        if session is None:
            if entries is None or len(others) >= HEADS:
                raise ConflictError.of(
                    "queue.unknown-controller", "the shared queue does not know this controller of {user}", user=user
                )
            session = self._sessions[key] = _Session(user, key, now)
            self._opens = min(self._opens, now + SETTLE_S)
        session.heard = now
        if entries is not None:
            session.report(entries)

    def take_used(self, user: str, head: str, used: Mapping[str, float]) -> None:
        """Take what the jobs of a controller have used, by project: a server before this one may have counted it."""
        now_s = self._wall()
        session = self._sessions[f"{user}/{head}/"]
        session.used = Usage(self.share.usage.half_life_s)
        for project, seconds in used.items():
            session.used.add(Account(user, project or None), seconds, now_s)
        known = [one.used.at(now_s) for one in self._sessions.values() if one.user == user and one.used is not None]
        for account in session.used.at(now_s):
            self.share.usage.raise_to(account, sum(one.get(account, 0.0) for one in known), now_s)

    def answers(self, user: str, head: str) -> dict[str, Answer]:
        """Return what was decided last about the jobs of a controller."""
        session = self._sessions[f"{user}/{head}/"]
        return {job: replace(one, reason=_shown_to(one.reason, session.prefix)) for job, one in session.answers.items()}

    # Decisions

    def decide(self) -> None:
        """Decide about the jobs of all controllers."""
        now = self._clock()
        self._sessions = {key: one for key, one in self._sessions.items() if now - one.heard <= KEPT_S}
        closures = {place: one.closure for one in self.drains for place in one.places}
        contenders: list[Contender] = []
        found: dict[str, Job] = {}
        owners: dict[str, tuple[_Session, Entry]] = {}
        for session in self._sessions.values():
            session.expire(now)
            session.answers = {job: one for job, one in session.answers.items() if session.may_keep(job, one)}
            is_silent = now - session.heard > FRESH_S
            if now - session.heard > GRANT_S:
                session.grants.clear()
            for entry in session.entries.values():
                is_waiting = entry.is_queued and entry.id not in session.grants
                if is_waiting and (is_silent or session.passed.get(entry.id, now) > now):
                    session.answers[entry.id] = Answer(entry.since_s, reason=because("queue-passed-over"))
                    continue
                one, source = session.contender(entry)
                contenders.append(self._without_drained(one, closures) if closures else one)
                owners[one.job.id] = session, entry
                if source is not None:
                    found[source.id] = source
        self._count_use([one for one in contenders if one.job.state in ACTIVE_STATES])
        decisions = self._schedule(contenders, found)
        self._first = first_in_line(decisions)
        for job_id, decision in decisions.items():
            session, entry = owners[job_id]
            self._settle(session, entry, decision, now)

    def _without_drained(self, one: Contender, closures: Mapping[str, Closure]) -> Contender:
        """Return a job that uses no host which an administrator has drained, also before its controller knows that."""
        now_s = self._wall()
        known = {host: closures[place] for host, place in one.places.items() if place in closures}
        barred = {
            host: closure.message(now_s)
            for host, closure in known.items()
            if closure.bars(now_s, one.ends_s(now_s))
            and not (one.job.request.examines and closure.by == one.account.user)
        }
        return replace(one, unusable={**one.unusable, **barred}) if barred else one

    def _count_use(self, used: Sequence[Contender]) -> None:
        """Add the time since the last decision to the use of those who have hosts."""
        start_s, self._counted_s = self._counted_s, self._wall()
        for one in used:
            devices = max(1, one.devices((*one.job.hosts, *one.job.spares)))
            self.share.usage.add_span(one.account, devices, max(start_s, self._counted_s - FRESH_S), self._counted_s)

    def _schedule(self, contenders: Sequence[Contender], found: Mapping[str, Job]) -> Mapping[str, Decision]:
        if self._clock() < self._opens:
            reason = because("queue-opens", until_s=self._wall() + self._opens - self._clock())
            return {one.job.id: WaitingForNodes(reason) for one in contenders if one.job.state is State.QUEUED}
        return schedule(contenders, found.get, now_s=self._wall(), share=self.share, first=self._first)

    def _settle(self, session: _Session, entry: Entry, decision: Decision, now: float) -> None:
        if isinstance(decision, (NodesFree, SparesFree)):
            hosts, spares = (
                (decision.hosts, decision.spares) if isinstance(decision, NodesFree) else ((), decision.hosts)
            )
            session.grants[entry.id] = _Grant(hosts, spares, entry.since_s, now)
            session.answers[entry.id] = Answer(entry.since_s, hosts, spares)
        else:
            start_s = decision.start_s if isinstance(decision, WaitingForNodes) else None
            session.answers[entry.id] = Answer(entry.since_s, reason=decision.reason, start_s=start_s)

    # Everybody

    def rows(self) -> tuple[QueueRow, ...]:
        """Return the jobs of all users, those that were submitted first at the top."""
        rows = [self._row(session, entry) for session in self._sessions.values() for entry in session.entries.values()]
        return tuple(sorted(rows, key=lambda row: (row.created_at_s, row.user, row.job)))

    def _row(self, session: _Session, entry: Entry) -> QueueRow:
        answer = session.answers.get(entry.id) if entry.is_queued else None
        age_s = round(self._clock() - session.heard, 1)
        return QueueRow(
            user=session.user,
            project=entry.project,
            job=entry.id,
            name=entry.name,
            state=UNKNOWN if age_s > FRESH_S else entry.state.value,
            last_state=entry.state.value,
            nodes=entry.nodes,
            hosts=entry.hosts,
            reason=None if answer is None else _shown_to(answer.reason, None),
            created_at_s=entry.created_at_s,
            start_s=None if answer is None else answer.start_s,
            age_s=age_s,
        )


def _shown_to(reason: Reason | None, prefix: str | None) -> Reason | None:
    """Return a reason with the job that it names as a user knows it: own jobs by their id, others as USER/ID."""

    def rename(job: str) -> str:
        user, _, own = job.split("/")
        return own if prefix is not None and job.startswith(prefix) else f"{user}/{own}"

    return None if reason is None else rename_job(reason, rename)
