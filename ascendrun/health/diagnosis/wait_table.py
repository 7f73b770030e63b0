"""Table of reports of ranks that waited for each other, for the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ascendrun.ascend.signatures import scan
from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.evidence import Evidence, RankEvidence
from ascendrun.health.diagnosis.indicators import proof_of
from ascendrun.health.diagnosis.peers import CONNECT, EXEC, LOST, PeerLine
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Proof
from ascendrun.health.diagnosis.times import Moment
from ascendrun.text import Rendered

FEW_SHARE = 0.25
"""Ranks without output, and ends of chains, are blamed up to this fraction of all, or if they are entire hosts."""

Report = tuple[RankTimeline, PeerLine]


class Table:
    """The input of the rules."""

    def __init__(self, evidence: Evidence, timelines: Sequence[RankTimeline], reports: Sequence[Report]) -> None:
        self.evidence, self.timelines, self.reports = evidence, timelines, reports
        self.by_rank = {timeline.rank.rank: timeline for timeline in timelines}
        self.waiting = [timeline for timeline in timelines if timeline.waited in (CONNECT, EXEC)]
        self.losing = [timeline for timeline in timelines if timeline.waited == LOST]

    def messages(self, *kinds: str) -> list[Report]:
        return [(timeline, message) for timeline, message in self.reports if message.kind in kinds]

    def rank_at(self, address: str, device: int | None) -> tuple[tuple[int, ...], str | None]:
        """Return the ranks and the host of an address: of a device's network port, or of a server and a device."""
        name = self.evidence.host_at(address)
        if name is None:
            return (), None
        device = self.evidence.host(name).device_addresses.get(address, device)
        return tuple(rank.rank for rank in _on_device(self.evidence.ranks_of(name), device)), name

    def named(self, message: PeerLine) -> tuple[tuple[int, ...], str | None]:
        """Return the ranks and host that a line names: by known address, else by rank number."""
        for address, device in message.addresses:
            ranks, host = self.rank_at(address, device)
            if host is not None and (ranks or not message.ranks):
                return ranks, host
        known = tuple(rank for rank in message.ranks if rank in self.by_rank)
        return known, self.by_rank[known[0]].rank.host if known else None

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(sorted({self.by_rank[rank].rank.host for rank in ranks if rank in self.by_rank}))

    def proofs(self, reports: Sequence[Report], *, limit: int = 3) -> tuple[Proof, ...]:
        return tuple(
            proof_of(self.evidence, message.line, rank=timeline.rank.rank, host=timeline.rank.host)
            for timeline, message in reports[:limit]
        )

    def make(
        self,
        code: str,
        strength: int,
        ranks: Iterable[int],
        reports: Sequence[Report],
        *,
        hosts: Iterable[str] | None = None,
        caveats: str = "by-rule",
        sure: bool = False,
        at: Moment | None = None,
        retry: str = "unknown",
        blames: str = "peer",
        values: Mapping[str, str | Rendered] | None = None,
    ) -> Candidate:
        """Make a candidate; `caveats`: names, separated by spaces."""
        chosen = tuple(sorted(set(ranks)))
        messages = {} if not reports else _values_of(code, reports[0][1].line.text)
        places = tuple(sorted(set(hosts))) if hosts is not None else self.hosts_of(chosen)
        return Candidate(
            code,
            strength,
            chosen,
            places,
            at=at,
            proofs=self.proofs(reports),
            sure=sure,
            blames=blames,
            caveats=tuple(caveats.split()),
            retry=retry,
            values={**messages, **(values or {})},
        )

    def last_output(self, ranks: Iterable[int], *, limit: int = 2) -> tuple[Proof, ...]:
        """Return the last output of at most `limit` of the ranks."""
        found = []
        for rank in [rank for rank in sorted(ranks) if rank in self.by_rank][:limit]:
            one = self.by_rank[rank].rank
            reports = [line for line in one.lines if line.text.strip() and line.at_s is not None]
            if reports:
                last = max(reports, key=lambda line: line.at_s or 0.0)
                found.append(proof_of(self.evidence, last, rank=rank, host=one.host))
        return tuple(found)

    def groups(self) -> dict[int, str]:
        """Return the communication group of each rank's wait; operations of different groups are not comparable."""
        return {
            timeline.rank.rank: message.values["group"] for timeline, message in self.messages("tag")
        }  # the plog is decisive

    def tags(self) -> dict[int, str]:
        """Return the collective of each rank in the largest group."""
        groups = self.groups()
        common = most_common(groups.values())
        return {
            timeline.rank.rank: message.values["tag"]
            for timeline, message in self.messages("tag")
            if groups[timeline.rank.rank] == common
        }

    @property
    def waits(self) -> list[Report]:
        return [(timeline, message) for timeline, message in self.reports if message.wait is not None]


def most_common(values: Iterable[str]) -> str | None:
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None


def _values_of(code: str, text: str) -> Mapping[str, str]:
    """Return the values of a line for the signature of that code."""
    return next((hit.values for hit in scan([(0, text)]) if hit.signature.code == code), {})


def _on_device(ranks: Sequence[RankEvidence], device: int | None) -> Sequence[RankEvidence]:
    if device is None:
        return ranks if len(ranks) == 1 else ()
    exact = [rank for rank in ranks if rank.device == device]
    if exact or any(rank.device is not None for rank in ranks):
        return exact
    return ranks[device : device + 1]


def most_reported(table: Table, *, among: set[int]) -> tuple[int, ...]:
    """Return the rank of `among` that waiting lines name at least twice as often as any other; () for none."""
    votes: Counter[int] = Counter()
    for timeline, message in table.reports:
        if message.wait is None and message.kind not in ("remote", "location"):
            continue
        ranks, _host = table.named(message)
        for rank in {*ranks} & among - {timeline.rank.rank}:
            votes[rank] += 1
    ranked = votes.most_common(2)
    if not ranked or ranked[0][1] < 1:
        return ()
    if len(ranked) > 1 and ranked[0][1] < 2 * ranked[1][1]:
        return ()
    return (ranked[0][0],)


def naming(table: Table, ranks: set[int]) -> list[Report]:
    return [(timeline, message) for timeline, message in table.reports if {*table.named(message)[0]} & ranks]


def minority(values: dict[int, str]) -> tuple[int, ...]:
    """Return the ranks with the rarer of exactly two values; () if they are equally frequent."""
    counts = Counter(values.values())
    if len(counts) != 2:
        return ()
    (_common, many), (rare, few) = counts.most_common(2)
    return tuple(rank for rank, value in values.items() if value == rare) if few < many else ()


def has_finished(rank: RankEvidence) -> bool:
    return rank.code == 0 and not rank.stopped


def finished_early(table: Table, ranks: Sequence[int]) -> Candidate:
    ends = [table.by_rank[rank].end for rank in ranks]
    known = [end for end in ends if end is not None]
    at = min(known, key=lambda end: end.at_s, default=None)
    return table.make("finished-early", 52, ranks, table.waits, retry="never", blames="job", at=at)
