"""Candidates for the first failure, with reasons, from the ranks' timelines and the hosts' facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from ascendrun.ascend.signatures import signature_of
from ascendrun.core.dataclass import dataclass
from ascendrun.health.diagnosis.evidence import Evidence, HostEvidence
from ascendrun.health.diagnosis.indicators import CAUSE, CREDIBLE, SIGN_FROM, STRENGTH, SYMPTOM, Indicator, normalised
from ascendrun.health.diagnosis.lines.rank_lines import OF_SEVERAL
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Proof
from ascendrun.health.diagnosis.times import Moment, earliest
from ascendrun.text import Rendered, Text

PROOFS_LIMIT = 6
AT_ONCE_S = 0.5


@dataclass(frozen=True)
class Candidate:
    """A possible first failure. `ranks`: with this reason; `at`: their earliest time. `sure`: the reason is a fact.
    `caveats`: why it may be wrong. `is_vague`: the kind of end is known, its reason is not. `retry`: of the rule that
    concluded it, None: that of the code."""

    code: str
    strength: int
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    at: Moment | None = None
    proofs: tuple[Proof, ...] = ()
    values: Mapping[str, str | Rendered] = field(default_factory=dict)
    sure: bool = True
    is_vague: bool = False
    caveats: tuple[str, ...] = ()
    retry: str | None = None

    @property
    def is_credible(self) -> bool:
        return self.strength >= CREDIBLE


def candidates_of(evidence: Evidence, timelines: Sequence[RankTimeline]) -> tuple[Candidate, ...]:
    """Return ranks with their own reason, grouped by reason; then hosts and devices."""
    causes = [timeline.own for timeline in timelines if timeline.own is not None and timeline.has_cause]
    found = _by_reason(indicator for indicator in causes if not indicator.is_vague)
    found += [make_candidate(group) for group in _together(indicator for indicator in causes if indicator.is_vague)]
    found += _of_symptoms(timelines)
    found += _of_sufferers(timelines)
    hosts = [one for host in evidence.hosts for one in _of_host(evidence, host)]
    return (*found, *hosts, *_of_devices(evidence, timelines, found))


def _by_reason(indicators: Iterable[Indicator]) -> list[Candidate]:
    groups: dict[str, list[Indicator]] = {}
    for indicator in indicators:
        groups.setdefault(indicator.sameness, []).append(indicator)
    return [make_candidate(group) for group in groups.values()]


def _together(ends: Iterable[Indicator]) -> list[list[Indicator]]:
    """Group ends without a reason: at the same time, within the uncertainty of the clocks, or with the same last
    output."""
    groups: list[list[Indicator]] = []
    for end in sorted(ends, key=lambda one: (one.sameness, one.host, one.at.at_s if one.at else 0.0)):
        known = next((group for group in groups if _is_one_end(group[-1], end)), None)
        if known is not None:
            known.append(end)
        else:
            groups.append([end])
    return groups


def _is_one_end(one: Indicator, other: Indicator) -> bool:
    if one.sameness != other.sameness:
        return False
    messages = [normalised(str(indicator.values.get("last", "-"))) for indicator in (one, other)]
    if messages[0] == messages[1] != "-":
        return True
    if one.at is None or other.at is None:
        return False
    if one.host == other.host:
        return abs(other.at.at_s - one.at.at_s) <= AT_ONCE_S
    return not one.at.is_before(other.at, by_s=AT_ONCE_S) and not other.at.is_before(one.at, by_s=AT_ONCE_S)


def _of_symptoms(timelines: Sequence[RankTimeline]) -> list[Candidate]:
    """Return ranks that failed by themselves without waiting; their output shows where, not why."""
    made = _by_reason(
        own
        for timeline, own in _with_symptom(timelines)
        if timeline.waited is None
        and own.code not in ("exception", "terminated")
        and not _is_of_others(own.code)
        and own.strength >= SIGN_FROM
    )
    return [replace(one, strength=max(one.strength, CREDIBLE), sure=False, caveats=("only-symptom",)) for one in made]


def _of_sufferers(timelines: Sequence[RankTimeline]) -> list[Candidate]:
    """Return few ranks with an exception that resembles waiting (a download, a lock), if the others lost them."""
    made = _by_reason(
        own
        for timeline, own in _with_symptom(timelines)
        if "type" in own.values
        and not (timeline.chain is not None and timeline.chain.root.collective)
        and all(message.kind == "suffered" for message in timeline.messages if message.wait is not None)
    )
    others = sum(1 for timeline in timelines if timeline.waited is not None)
    return [
        replace(one, strength=STRENGTH["suffered"], sure=False, caveats=("only-symptom",))
        for one in made
        if 2 * len(one.ranks) < others
    ]


def _with_symptom(timelines: Sequence[RankTimeline]) -> Iterator[tuple[RankTimeline, Indicator]]:
    """Yield the failed ranks with a symptom, without those whose messages the rules evaluate with those of others."""
    for timeline in timelines:
        own = timeline.own
        is_of_several = any(message.kind in OF_SEVERAL for message in timeline.messages)
        if own is not None and own.role == SYMPTOM and timeline.rank.has_failed and not is_of_several:
            yield timeline, own


def _is_of_others(code: str) -> bool:
    """Return whether the catalogue blames another rank or the network."""
    row = signature_of(code)
    return row is not None and row.blames in ("peer", "network")


def make_candidate(indicators: Sequence[Indicator]) -> Candidate:
    """Make a candidate from observations of one reason, of one or many ranks."""
    ordered = sorted(indicators, key=lambda one: (one.at is None, one.at.at_s if one.at else 0.0, one.rank or 0))
    first = ordered[0]
    return Candidate(
        code=first.code,
        strength=max(indicator.strength for indicator in indicators),
        ranks=tuple(sorted({indicator.rank for indicator in indicators})),
        hosts=tuple(sorted({indicator.host for indicator in indicators})),
        at=earliest(indicator.at for indicator in indicators),
        proofs=tuple(proof for indicator in ordered[:2] for proof in indicator.proofs)[:PROOFS_LIMIT],
        values=first.values,
        sure=any(indicator.sure for indicator in indicators),
        is_vague=all(indicator.is_vague for indicator in indicators),
    )


def _of_host(evidence: Evidence, host: HostEvidence) -> list[Candidate]:
    ranks = tuple(rank.rank for rank in evidence.ranks_of(host.host))
    lost = {"rebooted": "node-rebooted", "directory-gone": "node-directory-gone"}.get(host.lost or "")
    codes = [code for code in (lost, "supervisor-lost" if host.supervisor_lost else None) if code is not None]
    return [
        Candidate(code, STRENGTH[code], ranks, (host.host,), proofs=_events_of(evidence, host.host, f"reason.{code}"))
        for code in codes
    ]


def _events_of(evidence: Evidence, host: str, key: str) -> tuple[Proof, ...]:
    """Return the state transitions with this reason for the host."""
    return tuple(
        Proof(text=event.message(), host=host, at_s=event.at_s)
        for event in evidence.events
        if host in event.hosts and getattr(event.values.get("reason"), "key", None) == key
    )[:2]


def _of_devices(evidence: Evidence, timelines: Sequence[RankTimeline], found: Sequence[Candidate]) -> list[Candidate]:
    """Return devices that are unhealthy afterwards, if nothing else is credible or the failed rank used them."""
    by_rank = {timeline.rank.rank: timeline for timeline in timelines}
    credible = {rank for one in found if one.is_credible and not one.is_vague for rank in one.ranks}
    unclear = {rank: one for one in found if is_of_some_device(one) for rank in one.ranks}
    alarms = []
    for host, fact in [(one, fact) for one in evidence.hosts for fact in one.devices]:
        here = evidence.ranks_of(host.host)
        ranks = tuple(rank.rank for rank in here if rank.device == fact.device)
        ended = [by_rank[rank] for rank in ranks if rank in by_rank]
        is_unused = not ranks and any(rank.device is not None for rank in here)
        if is_unused or (credible and not credible & set(ranks)):
            continue
        if not credible and ranks and not any(map(_has_ended_somehow, ended)):
            continue
        text = Text("device.problem", "device {device}: {problem}", device=fact.device, problem=fact.problem)
        proof = Proof(text=text, host=host.host, file=fact.file, rank=ranks[0] if ranks else None)
        explained = [unclear[rank] for rank in ranks if rank in unclear]
        strength = max([STRENGTH["device-alarm"], *(one.strength + 1 for one in explained)])
        when = earliest([*(timeline.end for timeline in ended), *(one.at for one in explained)])
        values = {"device": str(fact.device), "problem": fact.problem}
        made = Candidate("device-alarm", strength, ranks, (host.host,), when, (proof,), values, sure=False)
        alarms.append(replace(made, caveats=("only-afterwards",)))
    return alarms


def _has_ended_somehow(timeline: RankTimeline) -> bool:
    rank = timeline.rank
    return rank.has_failed or timeline.waited is not None or rank.stopped or timeline.has_no_trace


_DEVICE_FAMILIES = frozenset({"acl", "cann", "cuda", "driver", "torch_npu"})
UNCLEAR_BELOW = 80


def is_of_some_device(one: Candidate) -> bool:
    """Return whether it is a runtime code for a fault of the device or driver; other lines may be more exact."""
    row = signature_of(one.code)
    return (
        row is not None
        and row.role == CAUSE
        and row.blames == "node"
        and row.family in _DEVICE_FAMILIES
        and row.strength < UNCLEAR_BELOW
    )
