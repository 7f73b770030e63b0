"""The jobs of all users that share a queue, and what is decided about them: no socket, no file."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import ConflictError, NotFoundError, UnreachableError
from ascendrun.core.jobs.fair_share import FairShare
from ascendrun.core.jobs.inputs import NodesFree, SparesFree, WaitingForNodes
from ascendrun.core.jobs.job import ACTIVE_STATES, Job, State
from ascendrun.core.jobs.reasons import Reason, because, rename_job
from ascendrun.core.jobs.schedule import Contender, Decision, first_in_line, schedule
from ascendrun.core.reachability import UNKNOWN
from ascendrun.head.queue.entries import Entry, check_count
from ascendrun.head.queue.messages import Answer, QueueRow, StopOrder

SETTLE_S = 10.0
"""Seconds after the start in which nothing is granted: the controllers report first what they use."""
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


class _Order:
    """A stop that a controller has not fetched yet."""

    def __init__(self, stop: StopOrder) -> None:
        self.stop, self.is_fetched = stop, threading.Event()


@dataclass
class _Session:
    """The newest report of one controller. `passed`: until when a job is passed over that did not use its grant."""

    user: str
    prefix: str
    heard: float
    entries: Mapping[str, Entry] = field(default_factory=dict)
    grants: dict[str, _Grant] = field(default_factory=dict)
    passed: dict[str, float] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    orders: list[_Order] = field(default_factory=list)

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
        self._opens, self._counted_s = clock() + SETTLE_S, wall()
        self._sessions: dict[str, _Session] = {}
        self._first: frozenset[str] = frozenset()

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
        session.heard = now
        if entries is not None:
            session.report(entries)

    def answers(self, user: str, head: str) -> dict[str, Answer]:
        """Return what was decided last about the jobs of a controller."""
        session = self._sessions[f"{user}/{head}/"]
        return {job: replace(one, reason=_shown_to(one.reason, session.prefix)) for job, one in session.answers.items()}

    def take_stops(self, user: str, head: str) -> tuple[StopOrder, ...]:
        """Return the stops for a controller, each once."""
        session = self._sessions[f"{user}/{head}/"]
        orders, session.orders = session.orders, []
        for order in orders:
            order.is_fetched.set()
        return tuple(order.stop for order in orders)

    # Decisions

    def decide(self) -> None:
        """Decide about the jobs of all controllers."""
        now = self._clock()
        self._sessions = {key: one for key, one in self._sessions.items() if now - one.heard <= KEPT_S}
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
                contenders.append(one)
                owners[one.job.id] = session, entry
                if source is not None:
                    found[source.id] = source
        self._count_use([one for one in contenders if one.job.state in ACTIVE_STATES])
        decisions = self._schedule(contenders, found)
        self._first = first_in_line(decisions)
        for job_id, decision in decisions.items():
            session, entry = owners[job_id]
            self._settle(session, entry, decision, now)

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

    def order_stop(self, user: str, job: str, by: str, *, now: bool) -> threading.Event:
        """Leave a stop for the controller that has the job; return what is set when it has fetched it. Raises
        NotFoundError; ConflictError if two controllers have such a job; UnreachableError if the controller is silent.
        """
        found = [one for one in self._sessions.values() if one.user == user and job in one.entries]
        if not found:
            raise NotFoundError.of("queue.no-job", "{user} has no job {job} in the shared queue", user=user, job=job)
        if len(found) > 1:
            raise ConflictError.of("queue.two-jobs", "two controllers of {user} have a job {job}", user=user, job=job)
        [session] = found
        if self._clock() - session.heard > FRESH_S:
            raise UnreachableError.of("queue.silent", "the controller of {user} does not respond", user=user)
        order = _Order(StopOrder(job, by, now))
        session.orders.append(order)
        return order.is_fetched


def _shown_to(reason: Reason | None, prefix: str | None) -> Reason | None:
    """Return a reason with the job that it names as a user knows it: own jobs by their id, others as USER/ID."""

    def rename(job: str) -> str:
        user, _, own = job.split("/")
        return own if prefix is not None and job.startswith(prefix) else f"{user}/{own}"

    return None if reason is None else rename_job(reason, rename)
