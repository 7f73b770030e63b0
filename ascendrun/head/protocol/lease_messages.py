"""The messages by which a head with a standby gets and keeps its lease from the voters: see node/agent/terms.py."""

from __future__ import annotations

from collections.abc import Sequence

from ascendrun.head.protocol.messages import Message, Request


class Vote(Message):
    """Reply of a voter. `why`: superseded (a higher term was seen), held (a lease is alive), unknown (one may be),
    out-of-sync (the copy of the standby is not complete), overtaken (by a newer renewal); "": granted. `term`: the
    highest that it has seen. `host`: the machine that holds the lease, "": unknown. `wait_s`: until the lease ends."""

    granted: bool
    term: int
    why: str = ""
    host: str = ""
    wait_s: float = 0.0
    in_sync: bool = False
    order: Sequence[int] = (0, 0)


class RenewHead(Request[Vote], op="renew_head"):
    """Extend the lease of a head that has its term by a majority. `order`: [session, number], increasing; of a first
    renewal [0, 0], and the session is the next one after that of the reply. `in_sync`: whether the copy of the
    standby is complete, None: as before."""

    head_id: str
    term: int
    instance: str
    host: str
    lease_s: float
    order: Sequence[int]
    in_sync: bool | None = None


class ClaimHead(Request[Vote], op="claim_head"):
    """Ask for a term. `instance`: random id of the machine's claim, the same when it is repeated. `may_lose`: without a
    complete copy. `asks`: whether it would be granted; nothing changes."""

    head_id: str
    term: int
    instance: str
    host: str
    lease_s: float
    may_lose: bool = False
    asks: bool = False
