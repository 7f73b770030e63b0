"""The exception that ended a rank, and whether the rank itself or another rank caused it."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from ascendrun.ascend import vocabularies
from ascendrun.ascend.peer_messages import EXEC, LOST
from ascendrun.ascend.signatures import Hit
from ascendrun.ascend.vocabularies import (
    alike,
    is_kind,
    is_of_several,
    is_warning,
    says,
    strength_of,
    values_in,
    wording,
)
from ascendrun.health.diagnosis.evidence import Evidence, Line, RankEvidence
from ascendrun.health.diagnosis.lines import rank_lines
from ascendrun.health.diagnosis.lines.exits import is_signal, signal_of
from ascendrun.health.diagnosis.lines.tracebacks import TORN_LINES, Chain, Raised, same_exception
from ascendrun.health.diagnosis.result import CAUSE, CONSEQUENCE, CREDIBLE, SYMPTOM, TEARDOWN, Suspect, without_quotes

MESSAGE_CHARACTERS = 1000
MESSAGE_LINES = 15
"""Maximum number of lines of an exception's message."""
SPECIFIC_FROM, NEUTRAL_BELOW = 80, 20
"""Strengths of rows that say more than the exception that led to them, and of postscripts that every failure has."""


class Mark(Enum):
    """What a line near the end is. REPORT: the first that reports a wait, a code of the runtime, or an abort; CAUSE: it
    names an exception without a traceback; POINTER: such a one that refers to another; AFTERMATH: one after the report,
    which is of helper processes."""

    REPORT = "report"
    CAUSE = "cause"
    POINTER = "pointer"
    AFTERMATH = "aftermath"


class Fatal(rank_lines.RankLines):
    """A rank's lines with the fatal exception. `chain`: exceptions that led to the rank's end, None: none found."""

    def __init__(self, evidence: Evidence, rank: RankEvidence, lines: Sequence[Line], plog: Sequence[Line]) -> None:
        super().__init__(evidence, rank, lines, plog)
        self.marks = self._mark()
        until = min((at for at, mark in self.marks.items() if mark is Mark.REPORT), default=len(lines))
        ended = min([until, *(one.last for one in self.chains if one.final.was_uncaught)])
        self.chains = tuple(one for one in self.chains if not (one.first > ended and one.final.is_of_helper))
        self.raised = {at for chain in self.chains for one in chain.raised for at in range(one.first, one.last + 1)}
        late = {at for at, mark in self.marks.items() if mark is Mark.AFTERMATH} - self.raised
        self.hits = [one for one in self.hits if one.line not in late or one.signature.family in alike("report-an-end")]
        self.chain = self._find() or self._find_bare()
        self.role = None if self.chain is None else self.role_of(self.chain)

    def _find(self) -> Chain | None:
        """Return the last chain that Python did not ignore and no work followed, a cause if there is any.
        Prepend an earlier chain that led to it, such as that of a failed helper thread."""
        lasting = [one for one in self.chains if one.kind == "main" or not self.outlived(one.last)]
        candidates = [one for one in lasting if one.kind != "ignored" and self.is_terminal(one.last)]
        ordered = sorted(candidates, key=lambda one: (one.kind == "main", one.last))
        own = [one for one in ordered if self.role_of(one) == CAUSE]
        own = [one for one in own if not says(one.root.text, "of-failed-child")] or own
        if not own:
            return ordered[-1] if ordered else None
        before = [one for one in self.chains if self._led_to(one, own[-1]) and self.role_of(one) == CAUSE]
        if not before:
            return own[-1]
        led, last = before[-1], own[-1]
        kind = "thread" if led.kind == "thread" else last.kind
        return Chain((*led.leading, *last.leading), kind=kind, is_argued=led.is_argued or last.is_argued)

    def _find_bare(self) -> Chain | None:
        """Return the last exception that a line near the end names without a traceback, a cause if there is any;
        further from the end only if no known line elsewhere is the cause."""
        if self.rank.stopped or not (self.rank.code or (self.rank.inner and not self.rank.has_ended)):
            return None
        causes = {hit.line for hit in self.hits if hit.signature.role == CAUSE and hit.signature.strength >= CREDIBLE}
        known, last = causes & {*self.near}, len(self.lines) - TORN_LINES
        marked = [at for at in reversed(self.marks) if self.marks[at] is not Mark.AFTERMATH]
        near = [self.bare[at] for at in marked if at in self.bare and at not in self.raised]
        found = [one for one in near if one.last >= last or known <= {*self.message_of(one.root)}]
        own = [one for one in found if self.role_of(one) == CAUSE and self.marks[one.last] is not Mark.POINTER]
        return next(iter([*own, *found]), None)

    def _mark(self) -> dict[int, Mark]:
        """Mark the lines near the end, in one pass; a line that is none of these has no mark."""
        waits = (one.line for one in self.messages if one.wait is not None)
        own = {id(line) for line in waits if not (says(line.text, "less") or is_warning(line.text))}
        coded = {hit.line for hit in self.hits if hit.signature.family in alike("report-an-end")}
        marks: dict[int, Mark] = {}
        after = False
        for at in self.near:
            if not after and (at in coded or id(self.lines[at]) in own):
                marks[at], after = Mark.REPORT, True
            elif at in self.bare:
                is_pointer = says(self.bare[at].root.text, "points-elsewhere")
                marks[at] = Mark.AFTERMATH if after else Mark.POINTER if is_pointer else Mark.CAUSE
        return marks

    def _led_to(self, earlier: Chain, chain: Chain) -> bool:
        """Return whether an uncaught exception follows from an earlier one: it refers to that, or that is of a helper
        thread, without work in between; or a thread failed in a system call, at any time, and it is about its work."""
        if chain.kind != "main" or earlier.kind == "ignored" or earlier.last >= chain.first:
            return False
        is_of_the_system = any(one.domain in alike("system-domains") for one in values_in(earlier.root.text))
        if earlier.kind != "main" and is_of_the_system and says(chain.root.text, "work-of-threads"):
            return True
        has_worked = self.after[earlier.last] - self.after[chain.first] >= rank_lines.WORK_LINES
        if has_worked or not (says(chain.root.text, "points-elsewhere") or earlier.kind == "thread"):
            return False
        times = [self.lines[index].at_s for index in (earlier.last, chain.first)]
        return times[0] is None or times[1] is None or times[1] - times[0] <= rank_lines.NEAR_THE_END_S

    # --- the culprit

    def role_of(self, chain: Chain) -> str:
        root = chain.root
        if is_kind(root.type, "ends"):
            return TEARDOWN
        message = self.message_of(root)
        stated = () if root.last in self.stated else (self.lines[index] for index in message)
        messages = [one for line in stated for one in rank_lines.peer_lines_of(line)]
        if any(one.wait is not None for one in messages):
            return CONSEQUENCE
        if any(one.kind in alike("several-messages") for one in messages):
            return SYMPTOM
        hit = self._best_in(root, at_least=NEUTRAL_BELOW)
        if says(root.text, "points-elsewhere") and self._later_hit(chain) is not None:
            return CAUSE
        if hit is not None and not (root.collective and hit.signature.domain in alike("carried")):
            return hit.signature.role
        is_of_peers = self.evidence.world_size > 1 and (root.collective or any(self._suffered(root)))
        return SYMPTOM if is_of_peers and not any(_is_own(value) for value in values_in(root.text)) else CAUSE

    def suffered_lines(self) -> Iterable[rank_lines.PeerLine]:
        """Return an exception or known message that indicates a wait, as a message that usually names no rank."""
        if self.messages:
            return ()
        if self.chain is None or self.role == CONSEQUENCE:
            known = (hit for hit in self.hits if hit.signature.role == CONSEQUENCE and hit.signature.is_of_others)
            lines = [self.lines[hit.line] for hit in known if self.is_terminal(hit.line)]
            found = [rank_lines.PeerLine("suffered", EXEC, line=line) for line in lines[:1]]
        else:
            root = self.chain.root
            wait, others = self._suffered(root)
            is_of_others = wait or others or (root.collective and not says(root.text, "library-failure"))
            line = rank_lines.PeerLine("suffered", wait or EXEC, others, line=self.lines[root.last])
            found = [line] if is_of_others and self.role == SYMPTOM else []
        return (one for one in found if not self.is_late(one.line))

    def _suffered(self, raised: Raised) -> tuple[str | None, tuple[int, ...]]:
        """Return the kind of wait, and the ranks that an exception reports as gone. Quoted parts of a message about the
        program's data are not evidence, and one that names only services outside the job is of no other rank."""
        named = rank_lines.services_in(raised.text)
        if named and not raised.collective and not any(map(self.evidence.host_at, named)):
            return None, ()
        text = without_quotes(raised.text) if raised.last in self.stated else raised.text
        found = {int(rank) for match in wording("other-rank").findall(raised.text) for rank in match if rank}
        others = (rank for rank in found - {self.rank.rank} if rank < self.evidence.world_size)
        return rank_lines.suffered_wait(text), tuple(sorted(others))

    # --- certainty that it ended the rank

    def is_last_output(self, chain: Chain) -> bool:
        """Return whether it ended the rank: no work after it, no later exception, no signal from outside."""
        later = [other for other in self.chains if other.last > chain.last and other.kind in ("main", "torn")]
        bare = (one for at, one in self.bare.items() if at > chain.last and at not in self.raised)
        later += (one for one in bare if one.rank != chain.rank or one.last > chain.last + TORN_LINES)
        was_ended = self.rank.stopped or is_signal(self.rank, "from-outside")
        if was_ended or self.torn[-1:] > [chain.last] or any(self.role_of(other) != TEARDOWN for other in later):
            return False
        if self._left_the_program(chain):
            return True
        line, after = self.lines[chain.last], self.after[chain.last]
        lived_s = self.lived_s(line)
        if line.stream == "error" or after <= rank_lines.LAST_OUTPUT_LINES:
            return lived_s is None or lived_s <= rank_lines.NEAR_THE_END_S
        return lived_s is not None and lived_s <= rank_lines.LAST_OUTPUT_S

    def _left_the_program(self, chain: Chain) -> bool:
        """Return whether it passed the outermost line of the main program, without output after it: shutdown was slow,
        or its own watchdog ended it."""
        at_s = self.lines[chain.last].at_s
        if chain.kind != "main" or not chain.final.was_uncaught or at_s is None:
            return False
        ended_so = self.rank.code == 1 or signal_of(self.rank) == signal.SIGABRT
        return ended_so and all(
            line.stream != "out" or (line.at_s is not None and line.at_s <= at_s + rank_lines.LAST_OUTPUT_S)
            for line in self.lines
        )

    def _was_handled(self, chain: Chain) -> bool:
        """Return whether the next output of the program shows that it continued."""
        last, *after = self.lines[chain.last : chain.last + 4]
        text = next((line.text for line in after if line.stream == last.stream and line.text.strip()), "")
        return says(text, "handled") and not text.startswith(("Traceback", " "))

    def _has_known_after(self, chain: Chain) -> bool:
        """Return whether a known reason or the end of a wait follows outside of its message: that may have ended the
        rank."""
        taken = {index for one in chain.raised for index in self.message_of(one)}
        after = [hit for hit in self.hits if hit.line > chain.last and hit.line not in taken]
        known = [self.lines[hit.line] for hit in after if hit.signature.role == SYMPTOM or _is_specific(hit)]
        return any(line.stream == self.lines[chain.last].stream and not self.is_late(line) for line in known)

    # --- as a reason

    def indicators(self) -> list[Suspect]:
        chain, lines = self.chain, self.lines
        if chain is None or self.role is None:
            return []
        root = self._best_in(chain.root)
        is_of_root = root is not None and root.signature.role == self.role
        hit = root if is_of_root else self._later_hit(chain) if self.role == CAUSE else None
        last = lines[chain.last]
        role = TEARDOWN if self.is_late(last) else self.role
        begin = lines[chain.first] if lines[chain.first].at_s is not None else last
        proofs = tuple(self.proof(lines[index]) for index in dict.fromkeys((chain.root.last, chain.final.last)))
        was_handled = self._was_handled(chain)
        shown = self._most_specific(chain, role)
        values = _values_of(chain, shown=shown)
        is_torn = chain.kind in ("torn", "bare") and last.at_s is None
        has_other = not self._left_the_program(chain) and self._has_known_after(chain)  # it may have ended the rank
        is_aside = chain.kind == "thread" or is_torn or has_other
        unsure = not self.is_last_output(chain) or was_handled or is_aside or chain.is_argued
        if hit is not None:
            row, texts = hit.signature, (lines[index].text for index in self.message_of(chain.root))
            is_inner = vocabularies.hides_cause(row.code, texts)
            may_be_others = row.is_of_others and rank_lines.services_in(chain.root.text, by_address=True)
            unsure = unsure or is_inner or bool(may_be_others)
            strength = max(row.strength, strength_of("exception")) if role == CAUSE else row.strength
            if all(proof.text != hit.text.strip() for proof in proofs):
                proofs = (*proofs, self.proof(lines[hit.line]))
            known, made = {**values, **hit.values}, self.suspect(row.code, strength, begin)
            return [replace(made, proofs=proofs, values=known, sure=not unsure, role=role)]
        has_several = any(message.kind in alike("several-messages") for message in self.messages)
        is_pointer = says(shown.text, "points-elsewhere")
        unsure = unsure or is_pointer or self.has_waited or has_several
        # the output of a stopped rank may be its program's data, such as text
        was_printed = (last.stream == "out" and self.rank.stopped) or was_handled
        weaker = "printed" if was_printed else "error-line" if is_pointer else "suffered"
        strength = strength_of(weaker if was_printed or unsure else "exception")
        is_sure, key = not unsure and chain.kind == "main", same_exception(chain)
        made = self.suspect("exception", strength, begin)
        return [replace(made, proofs=proofs, values=values, sure=is_sure, role=role, key=key)]

    def _most_specific(self, chain: Chain, role: str) -> Raised:
        """Return the most specific exception: the last, unless it only reports other ranks' ends or refers to an
        earlier one."""
        final = next((one for one in reversed(chain.leading) if not says(one.text, "points-elsewhere")), chain.final)
        echo = (one for index in self.message_of(final) for one in rank_lines.peer_lines_of(self.lines[index]))
        is_echo = role == CAUSE and (self._suffered(final)[0] or any(one.wait is not None for one in echo))
        return chain.root if is_echo or chain.kind == "thread" or says(final.message, "reraised") else final

    def _later_hit(self, chain: Chain) -> Hit | None:
        """Return the more specific signature of an exception after the root."""
        later = self._best_in(*chain.leading[1:])
        return later if later is not None and _is_specific(later) else None

    def missed_a_child(self) -> bool:
        """Return whether it reports a lost child, or a broken pipe in the host."""
        if self.chain is None or self.role not in (CAUSE, SYMPTOM):
            return False
        final = self.chain.final
        is_pipe = self._suffered(final)[0] == LOST and not final.collective
        points = says(final.text, "points-elsewhere") and final is self._most_specific(self.chain, CAUSE)
        return is_pipe or points

    def lines_of(self) -> Iterable[int]:
        """Return all lines of the chain, with those of exceptions handled before it."""
        raised = set(() if self.chain is None else self.chain.raised)
        whole = (chain for chain in self.chains if raised & set(chain.raised))
        return (index for chain in whole for one in chain.raised for index in self._range(one))

    def _range(self, raised: Raised) -> range:
        """Return the lines of one exception: from its traceback to the end of its message."""
        lines = self.lines
        begins = [one.first for other in self.chains for one in other.raised if one.first > raised.last]
        end = min([raised.last + MESSAGE_LINES, len(lines), *begins])
        while end > raised.last + 1 and lines[end - 1].stream != lines[raised.last].stream:
            end -= 1
        own = raised.last + 1
        while raised.was_uncaught and own < end and _goes_on(lines[raised.last], lines[own]):
            own += 1
        return range(raised.first, own if raised.was_uncaught else max(end, own))

    def _best_in(self, *raised: Raised, at_least: int = 0) -> Hit | None:
        """Return the best known message in exceptions' own, a cause if there is any; not one that concerns several
        ranks."""
        messages = [self.message_of(one) for one in raised]
        hits = [hit for hit in self.hits if any(hit.line in message for message in messages)]
        own = [one for one in hits if one.signature.strength >= at_least and not is_of_several(one.signature.code)]
        return max(own, default=None, key=lambda hit: (hit.signature.role == CAUSE, hit.signature.strength, -hit.line))

    def message_of(self, raised: Raised) -> range:
        """Return the lines of an exception's message, without its frames, which may contain any code."""
        return range(raised.last, raised.last + 1 if raised.last in self.stated else self._range(raised).stop)


def _is_own(value: vocabularies.Value) -> bool:
    """Return whether it is of this rank also where a collective raised it: an exact value of its process or host."""
    return value.is_exact and value.party == "self" and value.depth > 2 and value.domain not in alike("carried")


def _is_specific(hit: Hit) -> bool:
    """Return whether it is more specific than the exception that led to it."""
    row = hit.signature
    return row.role == CAUSE and row.strength >= SPECIFIC_FROM and not is_of_several(row.code)


def _goes_on(first: Line, line: Line) -> bool:
    """Return whether the message continues: it is written at one time, and C++ logs are not part of it."""
    is_later = first.at_s is not None and line.at_s is not None and line.at_s - first.at_s > rank_lines.LAST_OUTPUT_S
    return line.stream == first.stream and not is_later and not says(line.text, "of-cpp")


def _values_of(chain: Chain, *, shown: Raised) -> Mapping[str, str]:
    root = chain.root
    placed = root if root.message == shown.message else shown  # from another process, with its message
    where = placed.where or shown.where or root.where or "?"
    text = shown.text if shown.message or not shown.statement else f"{shown.type}: {shown.statement}"
    values = {"type": shown.short_type, "message": text[:MESSAGE_CHARACTERS], "where": where}
    if shown is not root:
        values["root"] = root.text[:300]
    return values
