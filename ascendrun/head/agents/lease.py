"""The lease of a head that has a standby: claimed from its voters, renewed, lost while most of them do not reply."""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import SupersededError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import Reason, because
from ascendrun.core.node_messages import Failure
from ascendrun.head.agents.connections import Connections, Links, ask
from ascendrun.head.protocol.agent_bootstrap import AgentImage
from ascendrun.head.protocol.lease_messages import ClaimHead, RenewHead, Vote
from ascendrun.head.protocol.remote import ConnectionListener, Reply, boot_s
from ascendrun.head.ssh.transport import Backend
from ascendrun.head.state.store_file import HeadFile, StoreFile, continues_elsewhere
from ascendrun.head.waiting import get_within
from ascendrun.node import wire
from ascendrun.node.loader import read_sources
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.standby_settings import Standby

CLAIM_S = 8.0
FIRST_S = 30.0
"""Seconds for a claim, and for the first one: the agents may have to be sent."""
TICK_S = 0.1
DRIFT, MARGIN_S = 0.02, 1.0
"""The clock of a voter may be faster by DRIFT; between a look at the lease and an action may be MARGIN_S."""
RENEWALS = 4
"""Renewals in the time of a lease."""


@dataclass(frozen=True)
class Votes:
    """Replies to a claim, by voter; one that did not reply in time may be missing."""

    majority: int
    votes: Mapping[str, Vote | Failure] = field(default_factory=dict)

    @property
    def is_granted(self) -> bool:
        return sum(isinstance(vote, Vote) and vote.granted for vote in self.votes.values()) >= self.majority

    @property
    def term(self) -> int:
        """Return the highest term that any voter has seen."""
        return max((vote.term for vote in self.votes.values() if isinstance(vote, Vote)), default=0)


class Voters:
    """Connections to the voters of a machine that is not the head yet; kept between claims. Use from one thread."""

    def __init__(self, backend: Backend, standby: Standby) -> None:
        self._standby = standby
        listener = ConnectionListener(lambda link: None, lambda link, error: None, lambda link, event, body: None)
        self._links = Connections(backend, AgentImage(read_sources()), listener, lambda call: call())

    def claim(self, request: ClaimHead, *, timeout_s: float = CLAIM_S) -> Votes:
        """Claim a term, if most voters reply that they would grant it: a claim of few would only disturb the head."""
        asked = self.ask(replace(request, asks=True), timeout_s)
        return self.ask(request, timeout_s) if asked.is_granted else asked

    def ask(self, request: ClaimHead, timeout_s: float = CLAIM_S) -> Votes:
        """Return the votes once a majority grants the claim, all voters have replied, or the time is over."""
        replies: queue.SimpleQueue[tuple[str, Reply[Vote]]] = queue.SimpleQueue()
        for host in self._standby.voters:
            done = partial(lambda name, reply: replies.put((name, reply)), host.name)
            self._links.get(host).call(request, deadline_s=timeout_s, done=done)
        votes = Votes(self._standby.majority)
        while len(votes.votes) < len(self._standby.voters) and not votes.is_granted:
            try:
                name, reply = get_within(replies, TICK_S)
            except queue.Empty:
                self._links.tick()  # ends what has waited for too long
                continue
            votes = replace(votes, votes={**votes.votes, name: reply.error or reply.message})
        return votes

    def close(self) -> None:
        self._links.close()


@dataclass(frozen=True)
class FixedTerm:
    """The term of a head that had a standby, as `Fence`: it needs no lease any more."""

    head_id: str
    term: int

    def allows(self, op: str) -> bool:
        return True


def claim_first(backend: Backend, standby: Standby, store: StoreFile) -> None:
    """Claim the first term of a head. Raises SupersededError, UnreachableError: it has none, and may be repeated."""
    instance = store.update_head().instance or os.urandom(8).hex()
    store.update_head(instance=instance)  # before the claim, so that it can be repeated
    voters = Voters(backend, standby)
    try:
        request = ClaimHead(store.head_id, 1, instance, os.uname().nodename, standby.lease_s)
        votes = voters.claim(request, timeout_s=FIRST_S)
    finally:
        voters.close()
    if votes.is_granted:
        store.update_head(term=1)
        return
    newer = next((vote for vote in votes.votes.values() if isinstance(vote, Vote) and vote.term), None)
    if newer is not None:
        raise SupersededError(
            continues_elsewhere(newer.host), hint=Text("standby.status", "run `ascendrun controller status` there")
        )
    names = [host.name for host in standby.voters if not isinstance(votes.votes.get(host.name), Vote)]
    raise UnreachableError.of(
        "standby.no-voters",
        "{voters} did not reply; {majority} of {count} voters must grant the first lease of this head",
        "run `ascendrun nodes -H FILE`, or remove `standby` from {file}",
        voters=names,
        majority=standby.majority,
        count=len(standby.voters),
        file=standby.file,
    )


def note_superseded(backend: Backend, standby: Standby, state_dir: Path) -> None:
    """Write into head.json that another machine continues, if a voter has seen a higher term. Call it before the store
    is opened: a superseded head writes nothing to it. Raises OSError."""
    head = HeadFile.load(state_dir)
    if head is None or not head.term or head.superseded is not None:
        return
    voters = Voters(backend, standby)
    try:
        own = head.head_id, head.term, head.instance, os.uname().nodename
        votes = voters.ask(ClaimHead(*own, standby.lease_s, asks=True)).votes.values()
    finally:
        voters.close()
    newer = next((vote for vote in votes if isinstance(vote, Vote) and vote.term > head.term), None)
    if newer is not None:
        replace(head, superseded=newer.host).write(state_dir)


class HeadLease:
    """The lease of the head whose term is in `head`, as `Fence` of its connections. Use from the controller's thread;
    `is_held` and `allows` from any. `superseded` is called with the vote of a voter that has seen a higher term.
    `in_sync`: what the voters are to know of the copy of the standby, None: what they know from before."""

    def __init__(self, standby: Standby, head: HeadFile, host: str, superseded: Callable[[Vote], None]) -> None:
        self.standby, self.head_id, self.term = standby, head.head_id, head.term
        self._instance, self._host, self._superseded = head.instance, host, superseded
        self._links: Links | None = None
        self.in_sync: bool | None = None
        self._granted_s: dict[str, float] = {}
        self._sessions: dict[str, int] = {}
        self._number = self._change = 0
        self._noted: dict[str, int] = {}
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._due_s = float("-inf")

    @property
    def is_held(self) -> bool:
        """Return whether most voters have granted it so recently that no other machine can have got it."""
        since_s = self._since_s()
        return sum(sent_s > since_s for sent_s in tuple(self._granted_s.values())) >= self.standby.majority

    def _since_s(self) -> float:
        return boot_s() - self.standby.lease_s * (1 - DRIFT) + MARGIN_S

    def allows(self, op: str) -> bool:
        """Return whether a node may get this request now. The ranks' leases are renewed without it: it ends none."""
        return op in wire.READING or op == "renew" or self.is_held

    def begin(self, links: Links) -> None:
        """Renew it from now on, over these connections."""
        self._links = links
        self.tick()

    def tick(self) -> None:
        """Renew it when it is due; may be called at any rate."""
        if boot_s() >= self._due_s:
            self._renew_all()

    def set_in_sync(self, in_sync: bool, done: Callable[[], None]) -> None:
        """Have the voters note whether the copy of the standby is complete. `done` is called when most of them have."""
        self.in_sync, self._change = in_sync, self._change + 1
        self._waiting.append((self._change, done))
        self._renew_all()

    def why_waiting(self) -> Reason:
        """Return why nothing is started now: the voters that have not granted the lease."""
        held = {name for name, sent_s in self._granted_s.items() if sent_s > self._since_s()}
        away = [host.name for host in self.standby.voters if host.name not in held]
        voters = len(self.standby.voters)
        return because("head-without-lease", away, needed=self.standby.majority, voters=voters)

    def status(self) -> dict[str, Any]:
        """Return what `controller status` shows: seconds since each voter granted it, None: it has not."""
        now_s = boot_s()
        ages = {host.name: self._granted_s.get(host.name) for host in self.standby.voters}
        voters = {name: None if sent_s is None else round(now_s - sent_s, 1) for name, sent_s in ages.items()}
        shown = {"term": self.term, "lease": self.is_held, "in_sync": self.in_sync, "voters": voters}
        return {**shown, "heads": list(self.standby.heads)}

    def _renew_all(self) -> None:
        if self._links is not None:
            self._due_s = boot_s() + self.standby.lease_s / RENEWALS
            for host in self.standby.voters:
                self._renew(host)

    def _renew(self, host: Host) -> None:
        assert self._links is not None
        session, self._number = self._sessions.get(host.name), self._number + 1
        is_first = session is None
        order = (0, 0) if session is None else (session, self._number)
        own = self.head_id, self.term, self._instance, self._host
        request = RenewHead(*own, self.standby.lease_s, order, None if is_first else self.in_sync)
        then = partial(self._replied, host, boot_s(), 0 if is_first else self._change)
        ask(self._links, host, request, deadline_s=self.standby.lease_s / 2, then=then)

    def _replied(self, host: Host, sent_s: float, change: int, reply: Reply[Vote]) -> None:
        if reply.error is not None:
            return
        vote, session = reply.message, self._sessions.get(host.name)
        if vote.why == "superseded":
            self._superseded(vote)
        elif not vote.granted:  # of an earlier controller
            if session is None or session < vote.order[0]:
                self._sessions[host.name] = vote.order[0] + 1
                self._renew(host)
        else:
            self._granted_s[host.name] = max(sent_s, self._granted_s.get(host.name, sent_s))
            self._note(host, change)
            if session is None:
                self._sessions[host.name] = 0
                self._renew(host)

    def _note(self, host: Host, change: int) -> None:
        self._noted[host.name] = max(change, self._noted.get(host.name, 0))
        if len(self._noted) >= self.standby.majority:
            reached = sorted(self._noted.values(), reverse=True)[self.standby.majority - 1]
            due, self._waiting = (
                [done for number, done in self._waiting if number <= reached],
                [one for one in self._waiting if one[0] > reached],
            )
            for done in due:
                done()
