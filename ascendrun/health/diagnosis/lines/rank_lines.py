"""A rank's lines, annotated: known messages, exceptions, messages about other ranks, later activity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ascendrun.ascend.signatures import Hit, scan
from ascendrun.health.diagnosis.evidence import Evidence, Line, RankEvidence
from ascendrun.health.diagnosis.indicators import CAUSE, STRENGTH, Indicator, normalised, proof_of, same_line
from ascendrun.health.diagnosis.lines.after_error import (
    AFTERWARDS_LIMIT,
    SURVIVED_S,
    count_after,
    survived_lines,
    worked_until,
    wrote_after,
    wrote_until,
)
from ascendrun.health.diagnosis.lines.exception_chains import without_handled
from ascendrun.health.diagnosis.lines.exits import CRASHES, signal_of
from ascendrun.health.diagnosis.lines.line_kinds import is_informational, is_list_of_causes, is_try
from ascendrun.health.diagnosis.lines.tracebacks import find_chains, same_exception
from ascendrun.health.diagnosis.peers import PeerLine, find_peer_lines, is_loopback
from ascendrun.health.diagnosis.result import Proof
from ascendrun.health.diagnosis.times import Moment, is_after_stop, moment

AFTERWARDS_LINES = 12
"""Maximum number of ordinary lines after the fatal error: final output, warnings, rest of progress bars."""
NEAR_THE_END_S = 30.0
LAST_OUTPUT_LINES, LAST_OUTPUT_S = 5, 2.0
"""An error is certainly fatal within these lines, or this time, of the rank's end."""

RULED = frozenset({
    "EI0002", "EI0005", "EI0006", "EI0009", "EI0013", "EI0015", "EI0016", "hccl-culprit-lost", "hccl-culprit-stuck",
    "hccl-culprit-cqe", "hccl-link-table-row", "hccl-connect-detected", "hccl-transport-init", "hccl-ranks-missing",
    "hccl-root-unreachable", "nccl-ib-completion", "collectives-mismatch", "models-differ",
})  # fmt: skip
"""Signatures that concern several ranks: the rules in wait_rules.py evaluate them together, not per rank."""
OF_SEVERAL = frozenset({"cqe", "tls", "differs", "mismatch", "models", "location", "link"})
"""Kinds of messages that concern several ranks too."""

_OWN_STATEMENTS = frozenset({
    "KeyError", "IndexError", "LookupError", "ValueError", "TypeError", "AssertionError", "AttributeError",
    "NameError", "UnboundLocalError", "ZeroDivisionError", "StopIteration",
})  # fmt: skip
"""Exceptions about a program's own data and code: their message is one line, and not a system event."""
OF_THE_SYSTEM = frozenset({"storage", "network", "host", "limits", "memory", "driver", "signal", "ssh", "hccl"})


class RankLines:
    """A rank. `hits`: known messages; `stated`: lines of exceptions about the program's data; `messages`: about other
    ranks, before the rank was stopped."""

    def __init__(self, evidence: Evidence, rank: RankEvidence, lines: Sequence[Line], plog: Sequence[Line]) -> None:
        self.evidence, self.rank, self.host = evidence, rank, evidence.host(rank.host)
        self.lines, self.plog = lines, plog
        self.chains = find_chains(lines)
        self.stated = {one.last for chain in self.chains for one in chain.raised if one.short_type in _OWN_STATEMENTS}
        hits = [
            hit
            for hit in scan((index, line.text) for index, line in enumerate(lines))
            if is_specific(hit)
            and (hit.line not in self.stated or hit.signature.family not in OF_THE_SYSTEM)
            and (hit.signature.role != CAUSE or not is_informational(hit.text))
        ]
        known = {hit.line for hit in hits}
        self.after = count_after(lines, self.chains, known)
        self._worked_until_s = worked_until(lines, self.chains, known)
        self.chains = tuple(without_handled(chain, hits, lines) for chain in self.chains)
        self.hits = [hit for hit in hits if not (is_try(hit.text) and self._came_through(hit.line))]
        self.messages = tuple(
            message
            for message in (*self._peer_lines_at_the_end(), *find_peer_lines(plog))
            if not self.is_late(message.line) and not self._is_of_strangers(message)
        )

    @property
    def has_waited(self) -> bool:
        return any(message.wait is not None for message in self.messages)

    def _peer_lines_at_the_end(self) -> Iterable[PeerLine]:
        """Return messages about others, without those during work: retries, as of a rendezvous, are no evidence."""
        places = {id(line): index for index, line in enumerate(self.lines)}
        return (
            message
            for message in find_peer_lines(self.lines)
            if self.is_terminal(places[id(message.line)])
            and places[id(message.line)] not in self.stated
            and (
                message.kind == "tried"
                or not (is_try(message.line.text) and self._came_through(places[id(message.line)]))
            )
        )

    def _came_through(self, index: int) -> bool:
        """Return whether it printed more after an attempt, or crashed, as no attempt does."""
        return (self.rank.has_failed and signal_of(self.rank) in CRASHES) or wrote_after(self.lines, index)

    def _is_of_strangers(self, message: PeerLine) -> bool:
        """Return whether it names only hosts outside of the job, such as that of a service."""
        if message.kind != "unreached" or message.values["meeting"]:
            return False
        known = [is_loopback(address) or self.evidence.host_at(address) for address, _ in message.addresses]
        return bool(known) and not any(known)

    def survived(self) -> Mapping[str, bool]:
        """Return known lines (by `same_line`) and exceptions after which the rank kept running; False: possibly, times
        unknown. For a rank that failed: those long before its last work, and lines long before its last output."""
        end_s = self.host.stopped_at_s or self.rank.exited_at_s
        loose = [(same_line(hit.signature.code, hit.text), hit.line) for hit in self.hits]
        loose += [(f"exception|{same_exception(chain)}", chain.last) for chain in self.chains if chain.kind != "main"]
        uncaught = [(f"exception|{same_exception(chain)}", chain.last) for chain in self.chains if chain.kind == "main"]
        if not self.rank.has_failed:
            return survived_lines(self.lines, [*loose, *uncaught], self.after, end_s=end_s)
        wrote_s = wrote_until(self.lines)
        found = {name: True for name, index in (*loose, *uncaught) if self.outlived(index)}
        return {**found, **{name: True for name, index in loose if self._is_long_before(index, wrote_s)}}

    def outlived(self, index: int) -> bool:
        """Return whether the rank kept working long after that line, so that it was not fatal."""
        return self._is_long_before(index, self._worked_until_s)

    def _is_long_before(self, index: int, until_s: float | None) -> bool:
        at_s = self.lines[index].at_s
        return at_s is not None and until_s is not None and until_s - at_s >= SURVIVED_S

    def is_late(self, line: Line) -> bool:
        """Return whether it came after the rank was stopped."""
        return is_after_stop(self.host, line.at_s) and (self.rank.stopped or not self.rank.has_ended)

    def is_terminal(self, index: int) -> bool:
        """Return whether little output came after it: the rank did not keep working."""
        line, after = self.lines[index], self.after[index]
        if line.stream == "error" or after <= AFTERWARDS_LINES:
            return True
        end_s = self.rank.exited_at_s
        if end_s is None or line.at_s is None:
            return after <= 5 * AFTERWARDS_LINES
        return end_s - line.at_s <= NEAR_THE_END_S and after <= AFTERWARDS_LIMIT

    # --- conversion of lines

    def moment_of(self, line: Line) -> Moment | None:
        """Return its time, else the time of the rank's end."""
        at_s = line.at_s if line.at_s is not None else self.rank.exited_at_s
        return moment(self.evidence, self.rank.host, at_s)

    def proof(self, line: Line) -> Proof:
        return proof_of(self.evidence, line, self.rank)

    def indicator(
        self,
        hit: Hit,
        role: str,
        when: Moment | None,
        proofs: tuple[Proof, ...],
        values: Mapping[str, str],
        *,
        sure: bool,
    ) -> Indicator:
        """Make a reason of a known message; `values`: of the exception that contains it."""
        row = hit.signature
        strength = max(row.strength, STRENGTH["exception"]) if values and role == CAUSE else row.strength
        is_shown = not values or any(proof.text == hit.text.strip() for proof in proofs)
        shown = proofs if is_shown else (*proofs, self.proof(self.lines[hit.line]))
        return Indicator(
            row.code,
            role,
            strength,
            self.rank.rank,
            self.rank.host,
            when,
            shown,
            {**values, **hit.values},
            sure=sure,
            key="" if row.blames in ("job", "network") else normalised(hit.text) if not values else row.code,
        )


def is_specific(hit: Hit) -> bool:
    """Return whether it is more than the name of a Python exception or a list of usual causes."""
    row = hit.signature
    return not (row.family == "python" and row.code.startswith("python-")) and not is_list_of_causes(hit.text)
