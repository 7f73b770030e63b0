"""Table of reports of ranks that waited for each other, for the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ascendrun.ascend.peer_messages import CONNECT, EXEC, LOST
from ascendrun.ascend.signatures import scan
from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.evidence import Evidence, Moment, RankEvidence, earliest
from ascendrun.health.diagnosis.kinds import RULE_RETRIES
from ascendrun.health.diagnosis.lines.line_kinds import PeerLine
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Proof, proof_of
from ascendrun.text import Rendered


class Report(NamedTuple):
    """What one rank says about others."""

    timeline: RankTimeline
    message: PeerLine

    @property
    def rank(self) -> int:
        return self.timeline.rank.rank

    @property
    def host(self) -> str:
        return self.timeline.rank.host


class Table:
    """The input of the rules. `waits`: the reports of an effect of others. `suffering`: ranks that waited for others,
    then those that lost others."""

    def __init__(self, evidence: Evidence, timelines: Sequence[RankTimeline]) -> None:
        self.evidence, self.timelines = evidence, timelines
        self.reports = [Report(timeline, message) for timeline in timelines for message in timeline.messages]
        self.waits = [one for one in self.reports if one.message.wait is not None]
        self.by_rank = {timeline.rank.rank: timeline for timeline in timelines}
        self.waiting = [timeline for timeline in timelines if timeline.waited in (CONNECT, EXEC)]
        self.losing = [timeline for timeline in timelines if timeline.waited == LOST]
        self.suffering = [*self.waiting, *self.losing]

    def messages(self, *kinds: str) -> list[Report]:
        return [one for one in self.reports if one.message.kind in kinds]

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

    def naming(self, ranks: set[int]) -> list[Report]:
        return [one for one in self.reports if {*self.named(one.message)[0]} & ranks]

    def most_reported(self, *, among: set[int]) -> tuple[int, ...]:
        """Return the rank of `among` that waiting lines name at least twice as often as any other; () for none."""
        votes: Counter[int] = Counter()
        for one in self.reports:
            if one.message.wait is not None or one.message.kind in ("remote", "location"):
                votes.update({*self.named(one.message)[0]} & among - {one.rank})
        ranked = votes.most_common(2)
        if not ranked or (len(ranked) > 1 and ranked[0][1] < 2 * ranked[1][1]):
            return ()
        return (ranked[0][0],)

    def ranks_on(self, hosts: Iterable[str]) -> list[int]:
        return [rank.rank for host in hosts for rank in self.evidence.ranks_of(host)]

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
        values: Mapping[str, str | Rendered] | None = None,
        shows_output: bool = False,
    ) -> Candidate:
        """Make a candidate; `caveats`: names, separated by spaces. `shows_output`: prove it with the ranks' last
        output."""
        chosen = tuple(sorted(set(ranks)))
        if hosts is None:
            hosts = {self.by_rank[rank].rank.host for rank in chosen if rank in self.by_rank}
        proofs = [proof_of(self.evidence, one.message.line, one.timeline.rank) for one in reports[:3]]
        # The line of the first report has the values of the code's signature.
        line = reports[0].message.line.text if reports else ""
        found = next((hit.values for hit in scan([(0, line)]) if hit.signature.code == code), {})
        return Candidate(
            code,
            strength,
            chosen,
            tuple(sorted(set(hosts))),
            at=at,
            proofs=(*(self._last_output(chosen) if shows_output else ()), *proofs),
            sure=sure,
            caveats=tuple(caveats.split()),
            retry=RULE_RETRIES.get(code, "unknown"),
            values={**found, **(values or {})},
        )

    def finished_early(self, ranks: Sequence[int]) -> Candidate:
        """Blame ranks that exited 0 while others waited for them."""
        at = earliest(self.by_rank[rank].end for rank in ranks)
        return self.make("finished-early", 52, ranks, self.waits, at=at)

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

    def groups(self) -> dict[int, str]:
        """Return the communication group of each rank's wait, by its plog: operations of two groups are not
        comparable."""
        return {one.rank: one.message.values["group"] for one in self.messages("tag")}

    def tags(self) -> dict[int, str]:
        """Return the collective of each rank in the largest group."""
        groups = self.groups()
        common = most_common(groups.values())
        return {one.rank: one.message.values["tag"] for one in self.messages("tag") if groups[one.rank] == common}


def has_finished(rank: RankEvidence) -> bool:
    return rank.code == 0 and not rank.stopped


def most_common(values: Iterable[str]) -> str | None:
    return next((value for value, _ in Counter(values).most_common(1)), None)


def minority(values: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks with the rarer of exactly two values; () if they are equally frequent."""
    counts = Counter(values.values())
    if len(counts) != 2:
        return ()
    (_common, many), (rare, few) = counts.most_common(2)
    return tuple(rank for rank, value in values.items() if value == rare) if few < many else ()


def _on_device(ranks: Sequence[RankEvidence], device: int | None) -> Sequence[RankEvidence]:
    if device is None:
        return ranks if len(ranks) == 1 else ()
    exact = [rank for rank in ranks if rank.device == device]
    if exact or any(rank.device is not None for rank in ranks):
        return exact
    return ranks[device : device + 1]
