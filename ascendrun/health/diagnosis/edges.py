"""The facts of all ranks as one graph: what a rank reports is an edge to whom it names, or a cell of a matrix.

An edge leads from the rank that waited (the effect) to the ranks or the host that it names (the cause). First is the
node that is named or silent and does not wait itself, or the minority of the first row of the matrix that differs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Optional

from ascendrun.ascend.signatures import scan
from ascendrun.ascend.vocabularies import alike
from ascendrun.health.diagnosis.evidence import Evidence, Moment
from ascendrun.health.diagnosis.lines.rank_lines import PeerLine
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Proof, Suspect, proof_of
from ascendrun.text import Rendered, Text, listed

COUNTED = ("tag", "index", "sequence", "progress")
"""Kinds of messages with the number or the name of an operation of a communication group."""
_TLS_ENTRY = re.compile(r"([0-9a-fA-F.:]+)/(\d+)")


class Edge(NamedTuple):
    """What one rank says about others. `ranks`, `target`: the ranks and the host that it names; () and None: none, or
    unknown ones."""

    timeline: RankTimeline
    message: PeerLine
    ranks: tuple[int, ...]
    target: str | None

    @property
    def rank(self) -> int:
        return self.timeline.rank.rank

    @property
    def host(self) -> str:
        return self.timeline.rank.host


class Found(NamedTuple):
    """Whom a rule blames. `edges`: its proof. `code`, `caveats`: instead of the rule's; `hosts` None: of the ranks.
    `seen`: what was observed of ranks."""

    ranks: Iterable[int]
    edges: Sequence[Edge]
    code: str = ""
    hosts: Iterable[str] | None = None
    caveats: str | None = None
    at: Moment | None = None
    values: Mapping[str, str | Rendered] | None = None
    seen: Sequence[tuple[int, Text]] = ()


class Edges:
    """The input of the rules. `waits`: the edges of an effect of others. `counted`: of operations. `suffering`: ranks
    that waited for others, or lost others."""

    def __init__(self, evidence: Evidence, timelines: Sequence[RankTimeline]) -> None:
        self.evidence, self.timelines = evidence, timelines
        self.by_rank = {timeline.rank.rank: timeline for timeline in timelines}
        self.all = [Edge(one, message, *self._named(message)) for one in timelines for message in one.messages]
        self.counted = self.of(*COUNTED)
        self.waits = [one for one in self.all if one.message.wait is not None]
        self.suffering = [timeline for timeline in timelines if timeline.waited is not None]
        self.hosts = {timeline.rank.host for timeline in timelines}

    def of(self, *kinds: str) -> list[Edge]:
        return [one for one in self.all if one.message.kind in kinds]

    def _named(self, message: PeerLine) -> tuple[tuple[int, ...], str | None]:
        """Return the ranks and host that a line names: by known address, else by rank number."""
        for address, device in message.addresses:
            ranks, host = self._rank_at(address, device)
            if host is not None and (ranks or not message.ranks):
                return ranks, host
        known = tuple(rank for rank in message.ranks if rank in self.by_rank)
        return known, self.by_rank[known[0]].rank.host if known else None

    def _rank_at(self, address: str, device: int | None) -> tuple[tuple[int, ...], str | None]:
        """Return the ranks and the host of an address: of a device's network port, or of a server and a device."""
        name = self.evidence.host_at(address)
        if name is None:
            return (), None
        here = self.evidence.ranks_of(name)
        device = self.evidence.host(name).device_addresses.get(address, device)
        if device is None:
            return tuple(rank.rank for rank in here if len(here) == 1), name
        if all(rank.device is None for rank in here):
            return tuple(rank.rank for rank in here[device : device + 1]), name
        return tuple(rank.rank for rank in here if rank.device == device), name

    def ranks_on(self, hosts: Iterable[str]) -> list[int]:
        return [rank.rank for host in hosts for rank in self.evidence.ranks_of(host)]

    def row(self, name: str, reports: Sequence[Edge]) -> Mapping[int, str]:
        """Return each rank's value of this name by these reports, its own before those of others. Operations are those
        of the largest communication group: those of two groups are not comparable."""
        if name == "step":
            return {one.rank.rank: str(one.rank.last_step) for one in self.timelines if one.rank.last_step is not None}
        if name == "worked":
            return {one.rank.rank: str(one.worked_until.at_s) for one in self.timelines if one.worked_until is not None}
        found: dict[int, str] = {}
        groups = {one.rank: one.message.values["group"] for one in self.of("tag")}
        named = groups.values() or [one.message.values.get("group") for one in self.counted]
        common = next((group for group, _ in Counter[Optional[str]](named).most_common(1)), None)
        for one in sorted(reports, key=lambda one: one.message.kind not in ("mismatch-elsewhere", "link")):
            kind, ranks, values = one.message.kind, one.message.ranks, one.message.values
            if kind == "models":
                found.update({rank: values["own" if rank == ranks[0] else "theirs"] for rank in range(ranks[0] + 1)})
            elif kind == "tls":
                entries = [(side, *entry) for side in ("on", "off") for entry in _TLS_ENTRY.findall(values[side])]
                found.update({rank: side for side, at, dev in entries for rank in self._rank_at(at, int(dev))[0]})
            elif values.get(name) and (
                kind not in COUNTED or groups.get(one.rank, values.get("group") or common) == common
            ):
                found[ranks[1] if kind == "mismatch-elsewhere" else one.rank] = values[name].lower()
        return found

    def suspect(self, found: Found, code: str, strength: int, caveats: str) -> Suspect:
        """Make a suspect of what a rule found."""
        ranks = tuple(sorted(set(found.ranks)))
        known = [self.by_rank[rank] for rank in ranks if rank in self.by_rank]
        hosts = {one.rank.host for one in known} if found.hosts is None else found.hosts
        code, caveats = found.code or code, caveats if found.caveats is None else found.caveats
        shown = [(one.message.line, one.timeline.rank) for one in found.edges[:3]]
        for one in reversed(known[:2] if code in alike("by-silence") else ()):
            written = [line for line in one.rank.lines if line.text.strip() and line.at_s is not None]
            shown[:0] = [(max(written, key=lambda line: line.at_s or 0.0), one.rank)] if written else []
        own = known[0].own if code == "exception" and known else None
        # The line of the first edge has the values of the code's signature.
        hits = scan((0, one.message.line.text) for one in found.edges[:1])
        values = next((hit.values for hit in hits if hit.signature.code == code), {} if own is None else own.values)
        seen = [Proof(text, rank, self.by_rank[rank].rank.host) for rank, text in found.seen]
        group = next(filter(None, (one.message.values.get("group") for one in found.edges)), "")
        members = {*ranks, *(one.rank for one in self.counted if one.message.values.get("group") == group)}
        if group and len(members) < len(self.timelines):
            seen.append(Proof(listed("diagnosis.of-group", group=group, ranks=sorted(members))))
        proofs = (*seen, *(proof_of(self.evidence, *one) for one in shown))
        values = {**values, **(found.values or {})}
        made = Suspect(code, strength, ranks, tuple(sorted(set(hosts))), found.at, proofs, values, not caveats)
        return replace(made, caveats=tuple(caveats.split()))
