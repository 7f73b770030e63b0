"""Edges from the ranks that waited for or lost others to the ranks and hosts that they name, for the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Optional

from ascendrun.ascend.signatures import scan
from ascendrun.health.diagnosis.evidence import Evidence, Moment, RankEvidence
from ascendrun.health.diagnosis.lines.line_kinds import PeerLine
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Proof, Suspect, proof_of
from ascendrun.text import Rendered

COUNTED = ("tag", "index", "sequence", "progress")
"""Kinds of messages with the number or the name of an operation of a communication group."""
FEW_SHARE = 0.25
"""Ranks without output, and ends of chains, are blamed up to this fraction of all, or if they are entire hosts."""


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
    `shows_output`: prove it with the ranks' last output, too."""

    ranks: Iterable[int]
    edges: Sequence[Edge]
    code: str = ""
    hosts: Iterable[str] | None = None
    caveats: str | None = None
    at: Moment | None = None
    values: Mapping[str, str | Rendered] | None = None
    proofs: tuple[Proof, ...] = ()
    shows_output: bool = False


class Edges:
    """The input of the rules. `waits`: the edges of an effect of others. `suffering`: ranks that waited for others,
    or lost others."""

    def __init__(self, evidence: Evidence, timelines: Sequence[RankTimeline]) -> None:
        self.evidence, self.timelines = evidence, timelines
        self.by_rank = {timeline.rank.rank: timeline for timeline in timelines}
        self.all = [Edge(one, message, *self._named(message)) for one in timelines for message in one.messages]
        self.waits = [one for one in self.all if one.message.wait is not None]
        self.suffering = [timeline for timeline in timelines if timeline.waited is not None]
        self.hosts = {timeline.rank.host for timeline in timelines}

    def of(self, *kinds: str) -> list[Edge]:
        return [one for one in self.all if one.message.kind in kinds]

    def to(self, ranks: set[int]) -> list[Edge]:
        return [one for one in self.all if ranks & {*one.ranks}]

    def rank_at(self, address: str, device: int | None) -> tuple[tuple[int, ...], str | None]:
        """Return the ranks and the host of an address: of a device's network port, or of a server and a device."""
        name = self.evidence.host_at(address)
        if name is None:
            return (), None
        device = self.evidence.host(name).device_addresses.get(address, device)
        return tuple(rank.rank for rank in _on_device(self.evidence.ranks_of(name), device)), name

    def _named(self, message: PeerLine) -> tuple[tuple[int, ...], str | None]:
        """Return the ranks and host that a line names: by known address, else by rank number."""
        for address, device in message.addresses:
            ranks, host = self.rank_at(address, device)
            if host is not None and (ranks or not message.ranks):
                return ranks, host
        known = tuple(rank for rank in message.ranks if rank in self.by_rank)
        return known, self.by_rank[known[0]].rank.host if known else None

    def most_reported(self, *, among: set[int]) -> tuple[int, ...]:
        """Return the rank of `among` that waiting lines name at least twice as often as any other; () for none."""
        votes: Counter[int] = Counter()
        for one in self.all:
            if one.message.wait is not None or one.message.kind in ("remote", "location"):
                votes.update({*one.ranks} & among - {one.rank})
        (first, most), (_, second) = (*votes.most_common(2), (0, 0), (0, 0))[:2]
        return (first,) if most and most >= 2 * second else ()

    def ranks_on(self, hosts: Iterable[str]) -> list[int]:
        return [rank.rank for host in hosts for rank in self.evidence.ranks_of(host)]

    def is_few(self, ranks: Sequence[int] | set[int]) -> bool:
        return len(ranks) <= max(1, FEW_SHARE * len(self.timelines))

    def in_largest_group(self, name: str) -> dict[int, str]:
        """Return each rank's last value of this name in the largest communication group, by what it reports of its
        wait: operations of two groups are not comparable."""
        found: dict[int, str] = {}
        groups = {one.rank: one.message.values["group"] for one in self.of("tag")}
        counted = self.of(*COUNTED)
        named = groups.values() or [one.message.values.get("group") for one in counted]
        common = next((group for group, _ in Counter[Optional[str]](named).most_common(1)), None)
        for one in counted:
            if groups.get(one.rank, one.message.values.get("group") or common) == common and name in one.message.values:
                found[one.rank] = one.message.values[name]
        return found

    def suspect(self, found: Found, code: str, strength: int, caveats: str) -> Suspect:
        """Make a suspect of what a rule found."""
        ranks = tuple(sorted(set(found.ranks)))
        hosts = found.hosts
        if hosts is None:
            hosts = {self.by_rank[rank].rank.host for rank in ranks if rank in self.by_rank}
        proofs = [proof_of(self.evidence, one.message.line, one.timeline.rank) for one in found.edges[:3]]
        # The line of the first edge has the values of the code's signature.
        line = found.edges[0].message.line.text if found.edges else ""
        code, caveats = found.code or code, caveats if found.caveats is None else found.caveats
        known = next((hit.values for hit in scan([(0, line)]) if hit.signature.code == code), {})
        return Suspect(
            code,
            strength,
            ranks,
            tuple(sorted(set(hosts))),
            at=found.at,
            proofs=(*found.proofs, *(self._last_output(ranks) if found.shows_output else ()), *proofs),
            sure=not caveats,
            caveats=tuple(caveats.split()),
            values={**known, **(found.values or {})},
        )

    def _last_output(self, ranks: Iterable[int]) -> list[Proof]:
        """Return the last output of two of the ranks."""
        found = []
        for rank in [rank for rank in ranks if rank in self.by_rank][:2]:
            one = self.by_rank[rank].rank
            written = [line for line in one.lines if line.text.strip() and line.at_s is not None]
            if written:
                last = max(written, key=lambda line: line.at_s or 0.0)
                found.append(proof_of(self.evidence, last, one))
        return found


def _on_device(ranks: Sequence[RankEvidence], device: int | None) -> Sequence[RankEvidence]:
    if device is None:
        return ranks if len(ranks) == 1 else ()
    exact = [rank for rank in ranks if rank.device == device]
    if exact or any(rank.device is not None for rank in ranks):
        return exact
    return ranks[device : device + 1]


def minority(values: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks with the rarer of exactly two values; () if they are equally frequent."""
    counts = Counter(values.values()).most_common()
    if len(counts) != 2 or counts[0][1] == counts[1][1]:
        return ()
    return tuple(rank for rank, value in values.items() if value == counts[1][0])
