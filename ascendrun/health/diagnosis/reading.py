"""A rank's lines with what is known of each: the exception that ended it, known messages, words about others."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Iterable, List, Mapping, Optional, Sequence, Tuple

from ascendrun.ascend.signatures import Hit, scan
from ascendrun.health.diagnosis.afterwards import AFTERWARDS_LIMIT, count_after, spoke_after, survived_lines
from ascendrun.health.diagnosis.clues import (
    CAUSE,
    CONSEQUENCE,
    CREDIBLE,
    STRENGTH,
    SYMPTOM,
    TEARDOWN,
    Clue,
    proof_of,
    same_line,
    same_words,
)
from ascendrun.health.diagnosis.evidence import Evidence, Line, RankEvidence
from ascendrun.health.diagnosis.exits import CRASHES, signal_of
from ascendrun.health.diagnosis.peers import EXEC, Word, accuses, find_words, looks_suffered
from ascendrun.health.diagnosis.places import has_bare_service, is_loopback, services_in
from ascendrun.health.diagnosis.remarks import HANDLED, WENT_ON, is_error_line, is_remark, is_try
from ascendrun.health.diagnosis.times import Moment, is_after_stop, moment
from ascendrun.health.diagnosis.tracebacks import TRACEBACK_HEAD, Chain, Raised, find_chains
from ascendrun.health.diagnosis.verdict import Proof

AFTERWARDS_LINES = 12
"""So many ordinary lines may follow the fatal error: goodbyes, warnings, the residue of progress bars."""
NEAR_THE_END_S = 30.0
LAST_WORDS_LINES, LAST_WORDS_S = 5, 2.0
"""Surely fatal is what so few lines, or so little time, parted from the rank's end."""
EARLIER_S = 5.0
"""What was said so long before the closing words did not end the rank."""
MESSAGE_LINES = 15
"""An exception's message may go on for so many lines."""

RULED = frozenset({
    "EI0002", "EI0005", "EI0006", "EI0009", "EI0013", "EI0015", "EI0016", "hccl-culprit-lost", "hccl-culprit-stuck",
    "hccl-culprit-cqe", "hccl-link-table-row", "hccl-connect-detected", "hccl-transport-init", "hccl-ranks-missing",
    "hccl-root-unreachable", "nccl-ib-completion",
})
"""Signatures that say something of several ranks: waiting.py weighs them together, no rank's story does alone."""

_OF_SEVERAL = frozenset({"cqe", "tls", "differs", "location", "link"})
_TEARDOWN_TYPES = frozenset({"KeyboardInterrupt", "SystemExit", "SignalException", "GracefulExit"})
_TOLD_TO_END = re.compile(r"killed by signal: Terminated|got signal: (?:15|2|SIGTERM|SIGINT)\b|received SIGTERM",
                          re.IGNORECASE)
_VAGUE_TYPES = frozenset({"RuntimeError", "Exception", "SystemError", "CalledProcessError", "AcceleratorError",
                          "ProcessRaisedException", "ProcessExitedException", "ChildFailedError", "BaseException",
                          "InternalError", "OSError"})
_OWN_STATEMENTS = frozenset({"KeyError", "IndexError", "LookupError", "ValueError", "TypeError", "AssertionError",
                             "AttributeError", "NameError", "UnboundLocalError", "ZeroDivisionError", "StopIteration"})
"""With these a program speaks of its own data and code: their words are one line, and no event of the system's."""
_OF_THE_SYSTEM = frozenset({"storage", "network", "host", "limits", "memory", "driver", "signal", "ssh", "hccl"})
_REMARK = re.compile(r"^\s*(?:Possible Causes?|Solutions?|可能原因|解决方案|处理方案)\s*[::]")
_SIDE_REMARKS = frozenset({"numeric", "data"})
"""Families of signatures that a program prints and goes on; what they led to says an exception, or nothing does."""
HARD_FROM = 60
_CARRIED = frozenset({"data", "model", "numeric", "python", "storage"})
"""What goes wrong with what another rank sent, when it comes out of a collective, is that rank's doing."""
_HARD = frozenset({"acl", "cann", "cuda", "driver", "hccl", "memory", "torch_npu"})
_KILLING = frozenset({"memory", "host", "limits", "driver", "launcher"})
"""What can lead to a signal from outside."""
_FROM_OUTSIDE = frozenset({9, 15, 2, 1})
_RERAISED = re.compile(r"Caught \w+ in (?:DataLoader worker|pin memory thread|replica) ")
"""What torch says in place of the words of the exception that it brings from elsewhere."""
_POSTSCRIPT = re.compile(r"^\s*(?:\[\w*\d*\]:\s?)*\[ERROR\] \d{4}-\d\d-\d\d-\S+ \(PID:")


class Reading:
    """A rank's lines with what is known of each."""

    def __init__(self, evidence: Evidence, rank: RankEvidence, lines: Sequence[Line], plog: Sequence[Line]) -> None:
        self._evidence, self._rank = evidence, rank
        self._host = evidence.host(rank.host)
        self._lines, self._plog = lines, plog
        self._hits = [hit for hit in scan((index, line.text) for index, line in enumerate(lines)) if _is_telling(hit)]
        self._chains = find_chains(lines)
        self._stated = {one.last for chain in self._chains for one in chain.raised if one.short_type in _OWN_STATEMENTS}
        self._hits = [hit for hit in self._hits
                      if (hit.line not in self._stated or hit.signature.family not in _OF_THE_SYSTEM)
                      and (hit.signature.role != CAUSE or not is_remark(hit.text))]
        self._after = count_after(lines, self._chains, {hit.line for hit in self._hits})
        self._hits = [hit for hit in self._hits if not (is_try(hit.text) and self._came_through(hit.line))]
        self.fatal: Optional[Chain] = self._fatal_chain()
        self.words = tuple(word for word in (*self._words_at_the_end(), *find_words(plog))
                           if not self.is_late(word.line) and not self._is_of_strangers(word))
        self._has_waited = any(word.wait is not None for word in self.words)

    def _words_at_the_end(self) -> Iterable[Word]:
        """What was said of others while work went on was a trial that is told of, such as those of a meeting."""
        places = {id(line): index for index, line in enumerate(self._lines)}
        return (word for word in find_words(self._lines)
                if self._is_terminal(places[id(word.line)]) and places[id(word.line)] not in self._stated
                and not (is_try(word.line.text) and self._came_through(places[id(word.line)])))

    def _came_through(self, index: int) -> bool:
        """It said something else after a try, or ended in a way in which no try ends."""
        return (self._rank.has_failed and signal_of(self._rank) in CRASHES) or spoke_after(self._lines, index)

    def survived(self) -> Mapping[str, bool]:
        """Known lines, by `clues.same_line`, and exceptions after which the rank went on, and did not fail by itself;
        False: without times it may have."""
        end_s = self._host.stopped_at_s or self._rank.exited_at_s
        hits = () if self._rank.has_failed else self._hits
        chains = () if self._rank.has_failed else self._chains
        said = [(same_line(hit.signature.code, hit.text), hit.line) for hit in hits]
        said += [(f"exception|{same_exception(chain)}", chain.last) for chain in chains]
        return survived_lines(self._lines, said, self._after, end_s=end_s)

    def _is_of_strangers(self, word: Word) -> bool:
        """It names only hosts that have no part in the job: a service's, say."""
        if word.kind != "unreached" or word.values["meeting"]:
            return False
        known = [is_loopback(address) or self._evidence.host_at(address) for address, _ in word.addresses]
        return bool(known) and not any(known)

    def _names_a_service(self, raised: Raised) -> bool:
        """What something outside of the job did not do is no other rank's doing."""
        named = services_in(raised.text)
        return bool(named) and not raised.collective and not any(map(self._evidence.host_at, named))

    def is_late(self, line: Line) -> bool:
        """It came after the rank had been told to stop."""
        return is_after_stop(self._host, line.at_s) and (self._rank.stopped or not self._rank.has_ended)

    def _is_terminal(self, index: int) -> bool:
        """Nothing much came after it: the rank did not go on with its work."""
        line, after = self._lines[index], self._after[index]
        if line.stream == "error" or after <= AFTERWARDS_LINES:
            return True
        end_s = self._rank.exited_at_s
        if end_s is None or line.at_s is None:
            return after <= 5 * AFTERWARDS_LINES
        return end_s - line.at_s <= NEAR_THE_END_S and after <= AFTERWARDS_LIMIT

    def _fatal_chain(self) -> Optional[Chain]:
        """The exception that ended the rank: the last one that Python did not pass over and no work followed; but what
        is only the echo of others' ends does not hide an earlier one of its own."""
        terminal = [chain for chain in self._chains if chain.kind != "ignored" and self._is_terminal(chain.last)]
        ordered = sorted(terminal, key=lambda chain: (chain.kind == "main", chain.last))
        own = [chain for chain in ordered if self._chain_role(chain) == CAUSE and not self._was_handled(chain)]
        return (own or ordered)[-1] if ordered else None

    def suffered_words(self) -> Tuple[Word, ...]:
        """An exception that sounds like waiting for others, or a known message of such, as a word about nobody."""
        chain = self.fatal
        if self.words:
            return ()
        if chain is None or self._chain_role(chain) == CONSEQUENCE:
            return self._known_waits()
        if self._chain_role(chain) != SYMPTOM or self.is_late(self._lines[chain.last]):
            return ()
        others = self._accused(chain.root)
        wait = looks_suffered(chain.root.text) or (EXEC if chain.root.collective or others else None)
        line = self._lines[chain.root.last]
        return () if wait is None else (Word("suffered", line, wait=wait, ranks=others, values={}),)

    def _known_waits(self) -> Tuple[Word, ...]:
        lines = [self._lines[hit.line] for hit in self._hits if hit.signature.role == CONSEQUENCE
                 and hit.signature.blames == "peer" and self._is_terminal(hit.line)]
        return tuple(Word("suffered", line, wait=EXEC, values={}) for line in lines[:1] if not self.is_late(line))

    def _accused(self, raised: Raised) -> Tuple[int, ...]:
        return accuses(raised.text, rank=self._rank.rank, world_size=self._evidence.world_size)

    # --- exceptions

    def chain_clues(self) -> List[Clue]:
        chain = self.fatal
        if chain is None:
            return []
        role = self._chain_role(chain)
        hit = self._hit_of(chain, role)
        last = self._lines[chain.last]
        is_late = self.is_late(last)
        if is_late:
            role = TEARDOWN
        at_line = self._lines[chain.first]
        when = moment(self._evidence, self._rank.host, at_line.at_s if at_line.at_s is not None else last.at_s)
        proofs = tuple(self._proof(one) for one in _distinct((chain.root, chain.final)))
        values = _exception_values(chain, told=self._told(chain, role))
        unsure = not self._is_last_word(chain) or self._was_handled(chain)
        if hit is not None:
            unsure = unsure or (hit.signature.blames in ("peer", "network") and has_bare_service(chain.root.text))
            return [self._clue(hit, role, when or self._end(), proofs, values, sure=not unsure)]
        unsure = unsure or bool(self._known_waits()) or any(
            word.wait is not None or word.kind in _OF_SEVERAL for word in self.words)
        # what a stopped rank printed may be what its program is about, such as text
        was_printed = (last.stream == "out" and self._rank.stopped) or self._was_handled(chain)
        strength = STRENGTH["printed" if was_printed else "suffered" if unsure else "exception"]
        return [Clue("exception", role, strength, self._rank.rank, self._rank.host, when or self._end(), proofs, values,
                     blames="self", retry="unknown", sure=not unsure and chain.kind == "main",
                     key=same_exception(chain))]

    def _chain_role(self, chain: Chain) -> str:
        root = chain.root
        if root.short_type in _TEARDOWN_TYPES or _TOLD_TO_END.search(root.message):
            return TEARDOWN
        lines = [self._lines[index] for index in self._message(chain, root)]
        words = () if root.last in self._stated else tuple(find_words(lines))
        if any(word.wait is not None for word in words):
            return CONSEQUENCE
        if any(word.kind in _OF_SEVERAL for word in words):
            return SYMPTOM
        hit = self._best([hit for hit in self._hits if hit.line in self._message(chain, root) and not _is_neutral(hit)])
        if hit is not None and not (root.collective and hit.signature.family in _CARRIED):
            of_service = hit.signature.blames in ("peer", "network") and self._names_a_service(root)
            return CAUSE if of_service else hit.signature.role
        if self._evidence.world_size > 1 and not self._names_a_service(root) and (
                looks_suffered(root.text) is not None or root.collective or self._accused(root)):
            return SYMPTOM
        return CAUSE

    def _is_last_word(self, chain: Chain) -> bool:
        """Nothing else ended the rank: no work after it, no later exception, no signal from outside."""
        later = [other for other in self._chains if other.last > chain.last and other.kind in ("main", "torn")]
        was_ended = self._rank.stopped or signal_of(self._rank) in _FROM_OUTSIDE
        if was_ended or self._has_torn_head(chain) or any(self._chain_role(other) != TEARDOWN for other in later):
            return False
        line, after = self._lines[chain.last], self._after[chain.last]
        end_s = self._rank.exited_at_s
        lived_s = None if end_s is None or line.at_s is None else end_s - line.at_s
        if line.stream == "error" or after <= LAST_WORDS_LINES:
            return lived_s is None or lived_s <= NEAR_THE_END_S
        return lived_s is not None and lived_s <= LAST_WORDS_S

    def _was_handled(self, chain: Chain) -> bool:
        """The program's next words tell that it went on."""
        after = (line.text for line in self._lines[chain.last + 1:chain.last + 4]
                 if line.stream == self._lines[chain.last].stream and line.text.strip())
        said = next(after, "")
        return HANDLED.search(said) is not None and not said.startswith(("Traceback", " "))

    def _has_torn_head(self, chain: Chain) -> bool:
        """A traceback began after it of which the exception is not here: that one may have ended the rank."""
        known = {index for other in self._chains for one in other.raised for index in range(one.first, one.last + 1)}
        return any(TRACEBACK_HEAD in line.text and index not in known and line.stream == self._lines[chain.last].stream
                   for index, line in enumerate(self._lines[chain.last + 1:], chain.last + 1))

    def _told(self, chain: Chain, role: str) -> Raised:
        """The exception whose words tell most: the last, unless that one is only the echo of others' ends."""
        echo = find_words([self._lines[index] for index in self._message(chain, chain.final)])
        is_echo = role == CAUSE and (any(word.wait is not None for word in echo) or looks_suffered(chain.final.text))
        return chain.root if is_echo or _RERAISED.match(chain.final.message) else chain.final

    def _hit_of(self, chain: Chain, role: str) -> Optional[Hit]:
        """The signature that names the chain's reason: of its root, or of a later part that says it better."""
        root = self._best([hit for hit in self._hits if hit.line in self._message(chain, chain.root)])
        if root is not None and root.signature.role == role:
            return root
        later = self._best([hit for one in chain.raised[1:] for hit in self._hits
                            if hit.line in self._message(chain, one) and hit.signature.role == CAUSE])
        return later if role == CAUSE and later is not None and later.signature.strength >= 80 else None

    def _range(self, chain: Chain, raised: Raised) -> range:
        """The lines of one exception: from its traceback to the end of its message."""
        begins = sorted(one.first for other in self._chains for one in other.raised if one.first > raised.last)
        end = min([raised.last + MESSAGE_LINES, len(self._lines), *begins[:1]])
        stream = self._lines[raised.last].stream
        while end > raised.last + 1 and self._lines[end - 1].stream != stream:
            end -= 1
        return range(raised.first, max(end, raised.last + 1))

    def _message(self, chain: Chain, raised: Raised) -> range:
        """The lines of an exception's own words: not the frames before them, where any code may stand."""
        whole = self._range(chain, raised)
        return range(raised.last, raised.last + 1 if raised.last in self._stated else whole.stop)

    def _best(self, hits: Iterable[Hit]) -> Optional[Hit]:
        found = [hit for hit in hits if hit.signature.code not in RULED]
        return max(found, default=None,
                   key=lambda hit: (hit.signature.role == CAUSE, hit.signature.strength, -hit.line))

    def _proof(self, raised: Raised) -> Proof:
        return proof_of(self._evidence, self._lines[raised.last], rank=self._rank.rank, host=self._rank.host)

    # --- signatures outside of exceptions

    def hit_clues(self) -> List[Clue]:
        """Known lines that stand for themselves. In front of an exception with words of its own they are side
        remarks; a vague one they explain."""
        taken = set(self._range_of_fatal())
        speaks = self.fatal is not None and self._chain_role(self.fatal) == CAUSE \
            and self.fatal.root.short_type not in _VAGUE_TYPES
        was_killed = self.fatal is None and signal_of(self._rank) in _FROM_OUTSIDE
        clues = []
        shown = [hit for hit in self._hits if not (
            hit.line in taken or hit.signature.code in RULED or not self._is_terminal(hit.line)
            or (was_killed and hit.signature.family not in _KILLING) or WENT_ON.search(hit.text))]
        closing = self._closing(shown)
        for hit in shown:
            line = self._lines[hit.line]
            is_last = self._after[hit.line] <= LAST_WORDS_LINES and self._rank.has_failed and not self._has_waited
            since_s = None if line.at_s is None or closing is None or closing.at_s is None else closing.at_s - line.at_s
            has_order = closing is None or closing is line or since_s is not None
            clues.append(self._line_clue(hit, line, weaker=speaks or (since_s or 0.0) > EARLIER_S,
                                         sure=is_last and has_order and self._is_near_the_end(line)))
        for hit in scan((index, line.text) for index, line in enumerate(self._plog)):
            if hit.signature.code not in RULED and _is_telling(hit) and is_error_line(hit.text):
                clues.append(self._line_clue(hit, self._plog[hit.line], weaker=speaks, sure=not self._has_waited))
        return clues

    def _closing(self, shown: Sequence[Hit]) -> Optional[Line]:
        """Where the rank said what ended it: its uncaught exception, or the last of its known lines."""
        chain = self.fatal
        is_main = chain is not None and chain.kind == "main" and self._chain_role(chain) == CAUSE
        if chain is not None and is_main and self._is_last_word(chain):
            return self._lines[chain.first]
        lines = [self._lines[hit.line] for hit in shown if hit.signature.role == CAUSE
                 and hit.signature.strength >= CREDIBLE and hit.signature.family not in _SIDE_REMARKS]
        return max(lines, key=lambda line: line.at_s or 0.0, default=None)

    def _is_near_the_end(self, line: Line) -> bool:
        """And its last words are no other ones that came later."""
        at_s, end_s = line.at_s, self._rank.exited_at_s
        later = (other for other in self._lines[-LAST_WORDS_LINES:] if other.stream == "err" and other.text.strip())
        return at_s is None or ((end_s is None or end_s - at_s <= NEAR_THE_END_S) and not any(
            other.at_s is not None and other.at_s - at_s > EARLIER_S and not is_remark(other.text) for other in later))

    def _range_of_fatal(self) -> Iterable[int]:
        if self.fatal is None:
            return ()
        return (index for one in self.fatal.raised for index in self._range(self.fatal, one))

    def _line_clue(self, hit: Hit, line: Line, *, weaker: bool, sure: bool) -> Clue:
        role = TEARDOWN if self.is_late(line) else hit.signature.role
        if hit.signature.family == "signal" and self._has_waited:
            role = CONSEQUENCE  # how a rank ended that had waited in vain
        when = moment(self._evidence, self._rank.host, line.at_s)
        clue = self._clue(hit, role, when or self._end(),
                          (proof_of(self._evidence, line, rank=self._rank.rank, host=self._rank.host),), {}, sure=sure)
        went_on = self._has_waited or self._rank.stopped  # what ended the rank, or would have, came later
        is_aside = hit.signature.family in _SIDE_REMARKS or (went_on and not _is_hard(hit))
        if weaker or is_aside:
            told = SYMPTOM if is_aside and role == CAUSE else role
            return replace(clue, role=told, strength=min(clue.strength, CREDIBLE - 1), sure=False)
        return clue

    def _clue(self, hit: Hit, role: str, when: Optional[Moment], proofs: Tuple[Proof, ...],
              values: Mapping[str, str], *, sure: bool) -> Clue:
        row = hit.signature
        strength = max(row.strength, STRENGTH["exception"]) if values and role == CAUSE else row.strength
        shown = proofs if any(proof.text == hit.text.strip() for proof in proofs) else (
            *proofs, *([proof_of(self._evidence, self._lines[hit.line], rank=self._rank.rank, host=self._rank.host)]
                       if values else []))
        return Clue(row.code, role, strength, self._rank.rank, self._rank.host, when, shown,
                    {**values, **hit.values}, blames=row.blames, retry=row.retry, sure=sure,
                    key="" if row.blames in ("job", "network") else same_words(hit.text) if not values else row.code)

    def _end(self) -> Optional[Moment]:
        return moment(self._evidence, self._rank.host, self._rank.exited_at_s)


_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")


def without_colours(lines: Sequence[Line]) -> Tuple[Line, ...]:
    return tuple(line._replace(text=_COLOUR.sub("", line.text)) if "\x1b" in line.text else line for line in lines)


def _is_telling(hit: Hit) -> bool:
    """Not the names of Python's own exceptions, which the exception itself says better; not a list of usual causes."""
    row = hit.signature
    return not (row.family == "python" and row.code.startswith("python-")) and not _REMARK.match(hit.text)


def _is_hard(hit: Hit) -> bool:
    return hit.signature.family in _HARD and hit.signature.strength >= HARD_FROM


def _is_neutral(hit: Hit) -> bool:
    """A postscript that every failure carries, such as torch_npu's ERR codes: it says nothing of the reason."""
    return hit.signature.strength < 20 or (hit.signature.role != CAUSE and _POSTSCRIPT.match(hit.text) is not None)


def _exception_values(chain: Chain, *, told: Raised) -> Mapping[str, str]:
    root = chain.root
    values = {"type": told.short_type, "message": told.text[:300], "where": root.where or told.where or "?"}
    if told is not root:
        values["root"] = root.text[:300]
    return values


def same_exception(chain: Chain) -> str:
    """Equal for one exception on several ranks."""
    return f"{chain.root.type}|{chain.root.origin}|{same_words(chain.root.message)}"


def _distinct(raised: Iterable[Raised]) -> List[Raised]:
    found: List[Raised] = []
    for one in raised:
        if one not in found:
            found.append(one)
    return found
