"""One rank's end in its own output: exceptions, known messages, effects of other ranks, and the end itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from ascendrun.ascend.signatures import Hit, scan
from ascendrun.ascend.vocabularies import alike, class_of, hides_cause, is_error_line, is_of_several, says, strength_of
from ascendrun.core.dataclass import dataclass
from ascendrun.health.cut_frames import told_in, without_logger
from ascendrun.health.diagnosis import result
from ascendrun.health.diagnosis.evidence import Evidence, Line, Moment, RankEvidence, moment, with_stamps
from ascendrun.health.diagnosis.lines import rank_lines
from ascendrun.health.diagnosis.lines.exits import exit_indicator
from ascendrun.health.diagnosis.lines.fatal import MESSAGE_LINES, Fatal, Mark
from ascendrun.health.diagnosis.lines.rank_lines import PeerLine, RankLines, is_specific, peer_lines_of
from ascendrun.health.diagnosis.lines.tracebacks import TORN_LINES, Chain, split_prefix, unfold, without_colours


@dataclass(frozen=True)
class RankTimeline:
    """One rank. `own`: the best reason for its end in its own output, None: not found. `messages`: its reports
    about others before it was stopped. `waited`: effect of others, as in peers.PeerLine.wait. `survived`:
    as RankLines.survived. `said`, `frames`: all lines of the exceptions' messages, else of a known report, and of their
    tracebacks. `details`: errors that it logged just before them, or before its end. `is_torn`: a traceback is not
    whole. `worked_until`: its last ordinary output."""

    rank: RankEvidence
    own: result.Suspect | None
    indicators: tuple[result.Suspect, ...] = ()
    messages: tuple[PeerLine, ...] = ()
    chain: Chain | None = None
    end: Moment | None = None
    waited: str | None = None
    waited_at: Moment | None = None
    survived: frozenset[str] = frozenset()
    said: tuple[str, ...] = ()
    frames: str = ""
    plog: tuple[Line, ...] = ()
    details: tuple[Line, ...] = ()
    is_torn: bool = False
    worked_until: Moment | None = None

    @property
    def seen_at(self) -> Moment | None:
        return self.waited_at or self.end

    @property
    def has_cause(self) -> bool:
        return self.own is not None and self.own.role == result.CAUSE


def read_timeline(evidence: Evidence, rank: RankEvidence) -> RankTimeline:
    """Read a rank's evidence."""
    host = evidence.host(rank.host)
    rank = replace(rank, lines=unfold(without_colours(rank.lines)), error=without_colours(rank.error))
    plog = with_stamps(rank.plog or (), until_s=rank.exited_at_s or host.stopped_at_s)
    fatal = Fatal(evidence, rank, (*rank.error, *rank.lines), plog)
    indicators = [*fatal.indicators(), *known_line_indicators(fatal)]
    end = exit_indicator(evidence, rank, missed_a_child=fatal.missed_a_child())
    indicators += [] if end is None else [end]
    messages = (*fatal.messages, *fatal.suffered_lines())
    waits = sorted((one for one in messages if one.wait is not None), key=lambda one: one.kind == "thrown")
    own = choose_own(indicators, waited=bool(waits))
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
        survived=fatal.survived(),
        said=tuple(text for index in _report(fatal, own) if not says(text := fatal.lines[index].text, "usual-causes")),
        frames="\n".join(_frames(fatal)),
        plog=tuple(plog),
        details=tuple(_details(fatal)),
        is_torn=bool(fatal.torn) or _may_lack_others(fatal),
        worked_until=moment(evidence, rank.host, fatal.worked_until_s),
    )


def _frames(fatal: Fatal) -> Iterator[str]:
    """Yield the lines of its frames: without a head those shortly before it, without an exception what is there."""
    if fatal.chain is None:
        first = next((at for at in fatal.torn if fatal.is_terminal(at)), len(fatal.lines))
        texts = without_logger([split_prefix(line.text)[2] for line in fatal.lines[first:]])
        yield from (text for text in texts if text[:1].isspace())
        return
    for raised in fatal.chain.leading:
        is_torn = fatal.chain.kind == "torn" and raised.first == raised.last
        first = max(0, raised.first - TORN_LINES) if is_torn else raised.first
        yield from (line.text for line in fatal.lines[first : raised.last])


def _report(fatal: Fatal, own: result.Suspect | None) -> Iterator[int]:
    """Yield the lines of the exceptions' messages; without an exception the known line, and those that follow it."""
    if fatal.chain is not None:
        yield from (index for one in fatal.chain.leading for index in fatal.message_of(one))
    elif own is not None and own.proofs and own.proofs[0].file is not None:
        proof, lines = own.proofs[0], fatal.lines
        there = (at for at in reversed(range(len(lines))) if lines[at].offset == proof.offset)
        first = next((at for at in there if lines[at].text.strip().startswith(proof.line)), len(lines))
        yield from (
            index for index in range(first, len(lines))[:MESSAGE_LINES] if fatal.marks.get(index) is not Mark.AFTERMATH
        )


def _may_lack_others(fatal: Fatal) -> bool:
    """Return whether exceptions may be lost before or after the one that ended it: one has no frame, or an empty line
    among its frames; only empty lines part it from another traceback; or a function caught it, and programs do so with
    its kind."""
    chain = fatal.chain
    if chain is None:
        return False
    last = chain.raised[-1]
    left = last.was_uncaught or chain.rank is not None or says(last.caught_in[0], "library")  # torch names the rank
    before = max((one.last + 1 for one in fatal.chains if one.last < chain.first), default=chain.first)
    between = [line.text.strip() for line in fatal.lines[before : chain.first]]
    lacks_frames = len(chain.raised) > 1 and not all(one.caught_in[0] for one in chain.raised)
    has_gap = any(not line.text.strip() for line in fatal.lines[last.first : last.last])
    is_next = bool(between) and not any(between)
    return lacks_frames or has_gap or is_next or (last.short_type in alike("tried") and not left)


DETAIL_LINES, DETAIL_S = 40, 5.0
"""Errors that were logged so shortly before an exception belong to it."""


def _details(fatal: Fatal) -> Iterator[Line]:
    """Yield errors that the rank logged before its exception, or before its end: a general exception only repeats that
    something failed. Reports about other ranks are no details, except why one is not reached."""
    chain = fatal.chain
    end = len(fatal.lines) if chain is None else chain.first
    closing_s = fatal.rank.exited_at_s if chain is None else fatal.lines[end].at_s
    for line in told_in(fatal.lines[max(0, end - DETAIL_LINES) : end]):
        is_near = line.at_s is None or closing_s is None or closing_s - line.at_s <= DETAIL_S
        if is_near and says(line.text, "logged-error", "stated"):
            yield from [line] if all(message.kind == "unreached" for message in peer_lines_of(line)) else ()


def without_survived(timelines: Sequence[RankTimeline]) -> list[RankTimeline]:
    """Remove known lines and caught exceptions that at least half of the others had too and survived: they ended no
    rank. The others are the ranks that did not fail, if any. Lines of an exception's message are part of it."""
    calm = [one for one in timelines if not one.rank.has_failed]
    made = []
    for one in timelines:
        others = [other for other in calm or timelines if other is not one]
        counts = Counter(line for other in others for line in other.survived)
        made.append(_without(one, {line for line, count in counts.items() if 2 * count >= len(others)}))
    return made


def _without(timeline: RankTimeline, common: Container[str]) -> RankTimeline:
    is_bare = timeline.chain is not None and timeline.chain.kind == "bare"
    named = ((one, one.proofs[:1] if is_bare or "type" not in one.values else ()) for one in timeline.indicators)
    known = ((one, [result.same_line(one.code, proof.line) for proof in proofs]) for one, proofs in named)
    lines = ((one, [f"exception|{one.key}"] if one.code == "exception" else line) for one, line in known)
    kept = [one for one, line in lines if not line or line[0] not in common]
    return replace(timeline, indicators=tuple(kept), own=choose_own(kept, waited=timeline.waited is not None))


def choose_own(indicators: Sequence[result.Suspect], *, waited: bool) -> result.Suspect | None:
    """Choose one indicator of a rank: a cause before a symptom before a consequence; the strongest cause.

    A vague end (a crash, a code) is not a reason if the rank's output shows an effect of other ranks:
    programs crash during cleanup.
    """
    decisive = [one for one in indicators if one.role == result.CAUSE and not one.is_vague]
    less = [one for one in indicators if one.role in (result.SYMPTOM, result.CONSEQUENCE)]
    suffered = [one for one in less if one.code != "terminated"]
    if decisive:
        best = max(decisive, key=lambda one: one.strength)
        is_unsure = not best.sure and not suffered and not waited
        vague = [one for one in indicators if one.role == result.CAUSE and one.is_vague and is_unsure]
        return max([best, *vague], key=lambda one: one.strength)
    if suffered:
        return max(suffered, key=lambda one: (one.role == result.SYMPTOM, one.strength))
    rest = [one for one in indicators if one.role == result.TEARDOWN or not waited]
    return max(rest, key=lambda one: (one.role == result.CAUSE, one.strength), default=None)


EARLIER_S = 5.0
"""A line this long before the last output did not end the rank."""
HARD_FROM = 60
REPORT_LINES = 3


def known_line_indicators(lines: Fatal) -> list[result.Suspect]:
    """Return known lines outside of exceptions. They are secondary to a later exception with its own message, and
    explain a vague exception."""
    chain = lines.chain
    has_own_cause = chain is not None and lines.role == result.CAUSE and class_of(chain.root.short_type).depth >= 0
    taken = set(lines.lines_of())
    own = [hit for hit in lines.hits if not (hit.line in taken or is_of_several(hit.signature.code))]
    shown = [hit for hit in own if lines.is_terminal(hit.line) and not says(hit.text, "went-on")]
    closing = _closing(lines, shown)
    last = {hit.signature.code: hit for hit in shown}
    indicators = []
    # of NCCL's warnings only the last came right before the failure
    for hit in (one for one in shown if not one.signature.is_general or one is last[one.signature.code]):
        line = lines.lines[hit.line]
        is_last = lines.after[hit.line] <= rank_lines.LAST_OUTPUT_LINES and not lines.has_waited
        since_s = None if line.at_s is None or closing is None or closing.at_s is None else closing.at_s - line.at_s
        has_order = closing is None or closing is line or since_s is not None
        is_near = (lines.lived_s(line) or 0.0) <= rank_lines.NEAR_THE_END_S
        sure = is_last and has_order and is_near and not hides_cause(hit.signature.code, _around(hit, lines.lines))
        weaker = has_own_cause or (since_s or 0.0) > EARLIER_S
        indicator = _indicator(lines, hit, line, weaker=weaker, sure=sure)
        weak = replace(indicator, strength=min(indicator.strength, strength_of("outlived")), sure=False)
        indicators.append(weak if lines.outlived(hit.line) else indicator)
    for hit in scan((index, line.text) for index, line in enumerate(lines.plog)):
        if not is_of_several(hit.signature.code) and is_specific(hit) and is_error_line(hit.text):
            sure = not lines.has_waited and not hides_cause(hit.signature.code, _around(hit, lines.plog))
            indicators.append(_indicator(lines, hit, lines.plog[hit.line], weaker=has_own_cause, sure=sure))
    return indicators


def _around(hit: Hit, lines: Sequence[Line]) -> Sequence[str]:
    """Return the lines of one report: that of the hit and its neighbours."""
    return [line.text for line in lines[max(0, hit.line - REPORT_LINES) : hit.line + REPORT_LINES + 1]]


def _closing(lines: Fatal, shown: Sequence[Hit]) -> Line | None:
    """Return the line that reports the reason of the end: an uncaught exception, or the last known line."""
    chain = lines.chain
    if chain is not None and chain.kind == "main" and lines.role == result.CAUSE and lines.is_last_output(chain):
        return lines.lines[chain.first]
    rows = ((hit.signature, lines.lines[hit.line]) for hit in shown)
    decisive = (line for row, line in rows if row.role == result.CAUSE and row.strength >= result.CREDIBLE)
    return max(decisive, key=lambda line: line.at_s or 0.0, default=None)


def _indicator(lines: RankLines, hit: Hit, line: Line, *, weaker: bool, sure: bool) -> result.Suspect:
    role = result.TEARDOWN if lines.is_late(line) else hit.signature.role
    if hit.signature.family == "signal" and lines.has_waited:
        role = result.CONSEQUENCE  # the end of a rank whose wait timed out
    row = hit.signature
    made = lines.suspect(row.code, row.strength, line)
    indicator = replace(made, values=hit.values, sure=sure, role=role)
    went_on = lines.has_waited or lines.rank.stopped  # the reason of the end came later
    is_hard = row.family in {*alike("runtimes"), "hccl", "memory"} and row.strength >= HARD_FROM
    is_aside = row.family in alike("not-fatal") or (went_on and not is_hard)
    if weaker or is_aside:
        weak_role = result.SYMPTOM if is_aside and role == result.CAUSE else role
        return replace(indicator, role=weak_role, strength=min(indicator.strength, result.CREDIBLE - 1), sure=False)
    return indicator
