"""One rank's end in its own output: its activity, effects of other ranks, and the end itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from ascendrun.core.dataclass import dataclass
from ascendrun.health.diagnosis.evidence import Evidence, RankEvidence
from ascendrun.health.diagnosis.indicators import CAUSE, CONSEQUENCE, SYMPTOM, TEARDOWN, Indicator, same_line
from ascendrun.health.diagnosis.lines.exits import child_indicator, exit_indicator
from ascendrun.health.diagnosis.lines.fatal import Fatal
from ascendrun.health.diagnosis.lines.known_lines import known_line_indicators
from ascendrun.health.diagnosis.lines.rank_lines import RankLines
from ascendrun.health.diagnosis.lines.tracebacks import Chain, unfold, without_colours
from ascendrun.health.diagnosis.peers import PeerLine
from ascendrun.health.diagnosis.times import Moment, moment, with_stamps


@dataclass(frozen=True)
class RankTimeline:
    """One rank. `own`: the best reason for its end in its own output, None: not found. `messages`: its reports
    about others before it was stopped. `waited`: effect of others, as in peers.PeerLine.wait. `survived`:
    as RankLines.survived."""

    rank: RankEvidence
    own: Indicator | None
    indicators: tuple[Indicator, ...] = ()
    messages: tuple[PeerLine, ...] = ()
    chain: Chain | None = None
    end: Moment | None = None
    waited: str | None = None
    waited_at: Moment | None = None
    has_no_trace: bool = False
    survived: Mapping[str, bool] = field(default_factory=dict)

    @property
    def has_cause(self) -> bool:
        return self.own is not None and self.own.role == CAUSE


def read_timeline(evidence: Evidence, rank: RankEvidence) -> RankTimeline:
    """Read a rank's evidence; a rank without any output has `has_no_trace`."""
    host = evidence.host(rank.host)
    rank = replace(rank, lines=unfold(without_colours(rank.lines)), error=without_colours(rank.error))
    plog = with_stamps(rank.plog or (), until_s=rank.exited_at_s or host.stopped_at_s)
    lines = RankLines(evidence, rank, (*rank.error, *rank.lines), plog)
    fatal = Fatal(lines)
    indicators = [*fatal.indicators(), *known_line_indicators(lines, fatal)]
    missed = fatal.missed_a_child()
    child = None if missed is None else child_indicator(evidence, rank, points=missed)
    indicators += [indicator for indicator in (child, exit_indicator(evidence, rank)) if indicator is not None]
    messages = (*lines.messages, *fatal.suffered_lines())
    waits = [message for message in messages if message.wait is not None]
    own = choose_own(indicators, has_failed=rank.has_failed, waited=bool(waits))
    suffered = waits[0] if waits else None
    return RankTimeline(
        rank=rank,
        own=own,
        indicators=tuple(indicators),
        messages=messages,
        chain=fatal.chain,
        end=moment(evidence, rank.host, rank.exited_at_s),
        waited=suffered.wait if suffered else None,
        waited_at=None if suffered is None else moment(evidence, rank.host, suffered.line.at_s),
        has_no_trace=not rank.has_ended and not rank.lines,
        survived=lines.survived(),
    )


def without_survived(timelines: Sequence[RankTimeline]) -> list[RankTimeline]:
    """Remove known lines and caught exceptions that most other ranks had too and survived: they ended no rank.
    Without times a line stays, uncertain. The others are the ranks that did not fail, if
    there are any. Lines inside an exception's message are part of the exception."""
    calm = [timeline for timeline in timelines if not timeline.rank.has_failed]
    return [
        _without(timeline, _common([other for other in calm or timelines if other is not timeline]))
        for timeline in timelines
    ]


def _common(others: Sequence[RankTimeline]) -> Mapping[str, bool]:
    """Return lines that at least half of them wrote and survived; True: certainly."""
    counts = Counter(line for timeline in others for line in timeline.survived)
    surely = Counter(line for timeline in others for line, is_sure in timeline.survived.items() if is_sure)
    return {line: 2 * surely[line] >= len(others) for line, count in counts.items() if 2 * count >= len(others)}


def _without(timeline: RankTimeline, common: Mapping[str, bool]) -> RankTimeline:
    """Remove `common` lines: those of most other ranks; True: certainly survived."""
    kept = []
    for indicator in timeline.indicators:
        line = (
            f"exception|{indicator.key}"
            if indicator.code == "exception"
            else (
                ""
                if "type" in indicator.values or not indicator.proofs
                else same_line(indicator.code, indicator.proofs[0].line)
            )
        )
        if not common.get(line):
            kept.append(replace(indicator, sure=False) if line in common else indicator)
    waited = timeline.waited is not None
    return replace(
        timeline, indicators=tuple(kept), own=choose_own(kept, has_failed=timeline.rank.has_failed, waited=waited)
    )


def choose_own(indicators: Sequence[Indicator], *, has_failed: bool, waited: bool) -> Indicator | None:
    """Choose one indicator of a rank: a cause before a symptom before a consequence; the strongest cause.

    A vague end (a crash, a code) is not a reason if the rank's output shows an effect of other ranks:
    programs crash during cleanup.
    """
    causes = [indicator for indicator in indicators if indicator.role == CAUSE]
    decisive = [indicator for indicator in causes if not indicator.is_vague]
    suffered = [
        indicator
        for indicator in indicators
        if indicator.role in (SYMPTOM, CONSEQUENCE) and indicator.code != "terminated"
    ]
    vague = [indicator for indicator in causes if indicator.is_vague]
    if decisive:
        best = max(decisive, key=lambda indicator: indicator.strength)
        is_unsure = not best.sure and not suffered and not waited
        return max([best, *vague], key=lambda indicator: indicator.strength) if is_unsure else best
    if vague and not suffered and not waited:
        return max(vague, key=lambda indicator: indicator.strength)
    if suffered:
        return max(suffered, key=lambda indicator: (indicator.role == SYMPTOM, indicator.strength))
    rest = [indicator for indicator in indicators if indicator.role == TEARDOWN or not waited]
    if waited and has_failed:
        return None
    return max(rest, key=lambda indicator: indicator.strength, default=None)
