"""A rank's lines, annotated: what each says, known messages, exceptions, messages about other ranks, later activity.

Of exceptions raised while another was handled: whether the first one is the reason of the failure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ascendrun.ascend.line_shapes import is_work
from ascendrun.ascend.peer_messages import EXEC, LOST, PeerMessage, read_messages
from ascendrun.ascend.signatures import Hit, scan
from ascendrun.ascend.vocabularies import alike, class_of, is_kind, is_try, is_warning, says, values_in, wording
from ascendrun.core.dataclass import dataclass
from ascendrun.health.diagnosis import result
from ascendrun.health.diagnosis.evidence import Evidence, Line, RankEvidence, moment
from ascendrun.health.diagnosis.lines.tracebacks import Chain, Raised, bare_chain, read_chains, same_exception

AFTERWARDS_LINES, AFTERWARDS_LIMIT = 12, 200
"""Maximum number of ordinary lines after the fatal error: final output, warnings, rest of progress bars."""
AT_ONCE_S = 0.5
"""Lines of two streams within this time have no known order."""
WORK_LINES, SURVIVED_S = 3, 60.0
"""A rank that then wrote this number of lines, or ran for this time, survived the reported error."""
NEAR_THE_END_S = 30.0
LAST_OUTPUT_LINES, LAST_OUTPUT_S = 5, 2.0
"""An error is certainly fatal within these lines, or this time, of the rank's end."""


# ---------------------------------------------------------------- what one line says


@dataclass(frozen=True)
class PeerLine(PeerMessage):
    """A message about other ranks, with its line."""

    line: Line = Line("", "")


def peer_lines_of(line: Line) -> Iterator[PeerLine]:
    for found in read_messages(line.text):
        yield PeerLine(found.kind, found.wait, found.ranks, found.addresses, found.values, line)


def suffered_wait(text: str) -> str | None:
    """Return LOST or EXEC if an exception indicates that another rank was lost or did not join, by its class, its codes
    or its words; else None."""
    values = (class_of(text.partition(":")[0]), *values_in(text))
    domains = {one.domain for one in values if one.proof in ("usual", "hard")}
    found = wording("means-peer").search(text)
    if "network" in domains or (found is not None and found["lost"]):
        return LOST
    return EXEC if found is not None or "silent" in domains else None


def services_in(text: str, *, by_address: bool = False) -> tuple[str, ...]:
    """Return the hosts of services (such as a web server) on a line that are named; or those by address: they may be
    outside of the job, or one of its ranks."""
    hosts = (one for found in wording("service").findall(text) for one in found if one)
    return tuple(host for host in hosts if _is_address(host) == by_address)


def _is_address(host: str) -> bool:
    return host == "localhost" or not host.strip("0123456789.")


# ---------------------------------------------------------------- the lines of a rank


class RankLines:
    """A rank. `torn`: where a traceback has lost its head or its exception; `hits`: known messages; `stated`: lines of
    exceptions about the program's data; `near`: lines at the end; `messages`: about other ranks, of these lines and
    before the rank was stopped; `bare`: exceptions without a traceback, of these lines and those that tell a class."""

    def __init__(self, evidence: Evidence, rank: RankEvidence, lines: Sequence[Line], plog: Sequence[Line]) -> None:
        self.evidence, self.rank, self.host = evidence, rank, evidence.host(rank.host)
        self.lines, self.plog = lines, plog
        self.chains, self.torn = read_chains(lines)
        self.stated = {one.last for chain in self.chains for one in chain.raised if is_kind(one.type, "states")}
        hits = [
            hit
            for hit in scan((index, line.text) for index, line in enumerate(lines))
            if is_specific(hit)
            and (hit.line not in self.stated or hit.signature.family not in alike("of-the-system"))
            and not (says(hit.text, "less") or is_warning(hit.text))
        ]
        raised = [one for chain in self.chains for one in chain.raised]
        reports = {*(hit.line for hit in hits), *(index for one in raised for index in range(one.first, one.last + 1))}
        ordinary = (index for index in range(len(lines)) if index not in reports and lines[index].text.strip())
        work = [index for index in ordinary if is_work(lines[index].text)]
        self.after = self._count_after(work)
        self.worked_until_s = max((at_s for index in work if (at_s := lines[index].at_s) is not None), default=None)
        self.chains = tuple(without_handled(chain, hits, lines) for chain in self.chains)
        self.hits = [hit for hit in hits if not is_try(hit.text)]
        self.near = [index for index in range(len(lines)) if self.is_terminal(index)]
        # messages during work are retries, as of a rendezvous, and no evidence
        near = [message for index in self.near if index not in self.stated for message in peer_lines_of(lines[index])]
        told = [message for message in near if message.kind == "tried" or not is_try(message.line.text)]
        every = (*told, *(message for line in plog for message in peer_lines_of(line)))
        self.messages = tuple(self._of_job(message) for message in every if not self.is_late(message.line))
        places = sorted({*self.near, *(index for index, line in enumerate(lines) if "Error: " in line.text)})
        named = (bare_chain(lines, index) for index in places)
        self.bare = {chain.last: chain for chain in named if chain is not None}

    @property
    def has_waited(self) -> bool:
        return any(message.wait is not None for message in self.messages)

    def _of_job(self, message: PeerLine) -> PeerLine:
        """Return it without ranks if these are numbers in a smaller group, which has another one for this rank."""
        size, member = (message.values.get(name) for name in ("size", "member"))
        is_of_group = size and member and int(size) < self.evidence.world_size and int(member) != self.rank.rank
        return replace(message, ranks=()) if is_of_group else message

    def _count_after(self, work: Sequence[int]) -> list[int]:
        """Return for every line the number of ordinary lines after it: by order in its stream, by time in others."""
        streams = {line.stream for line in self.lines}
        places = {stream: [index for index in work if self.lines[index].stream == stream] for stream in streams}
        times = {one: [self.lines[index].at_s for index in places[one]] for one in streams}
        known_s = {one: sorted(at_s for at_s in times[one] if at_s is not None) for one in streams}
        counts = []
        for index, line in enumerate(self.lines):
            count = len(places[line.stream]) - bisect_right(places[line.stream], index)
            for stream in streams - {line.stream} if line.at_s is not None else ():
                count += len(known_s[stream]) - bisect_right(known_s[stream], (line.at_s or 0.0) + AT_ONCE_S)
            counts.append(count)
        return counts

    def survived(self) -> frozenset[str]:
        """Return known lines (by `same_line`) and exceptions after which the rank kept running; of a rank that failed,
        those long before its last work."""
        named = [(result.same_line(hit.signature.code, hit.text), hit.line) for hit in self.hits]
        named += [(f"exception|{same_exception(chain)}", chain.last) for chain in (*self.chains, *self.bare.values())]
        return frozenset(name for name, index in named if self._has_survived(index))

    def _has_survived(self, index: int) -> bool:
        if self.rank.has_failed:
            return self.outlived(index)
        at_s, end_s = self.lines[index].at_s, self.host.stopped_at_s or self.rank.exited_at_s
        lived_s = 0.0 if at_s is None or end_s is None else end_s - at_s
        return at_s is None or self.after[index] >= WORK_LINES or lived_s >= SURVIVED_S

    def outlived(self, index: int) -> bool:
        """Return whether the rank kept working long after that line, so that it was not fatal."""
        at_s, until_s = self.lines[index].at_s, self.worked_until_s
        return at_s is not None and until_s is not None and until_s - at_s >= SURVIVED_S

    def is_late(self, line: Line) -> bool:
        """Return whether it is after the rank's stop (same clock, so exact). A wait that began before is not late."""
        lag_s = 0.0 if line.at_s is None or self.host.stopped_at_s is None else line.at_s - self.host.stopped_at_s
        if lag_s <= 0.02 or (self.rank.has_ended and not self.rank.stopped):
            return False
        ran = wording("ran-for").search(line.text)
        return ran is None or float(ran[1]) / 1000 < lag_s

    def is_terminal(self, index: int) -> bool:
        """Return whether little output came after it: the rank did not keep working."""
        line, after = self.lines[index], self.after[index]
        if line.stream == "error" or after <= AFTERWARDS_LINES:
            return True
        lived_s = self.lived_s(line)
        if lived_s is None:
            return after <= 5 * AFTERWARDS_LINES
        return lived_s <= NEAR_THE_END_S and after <= AFTERWARDS_LIMIT

    def lived_s(self, line: Line) -> float | None:
        """Return how long the rank ran after it; None: a time is unknown."""
        return None if self.rank.exited_at_s is None or line.at_s is None else self.rank.exited_at_s - line.at_s

    # --- conversion of lines

    def proof(self, line: Line) -> result.Proof:
        return result.proof_of(self.evidence, line, self.rank)

    def suspect(self, code: str, strength: int, line: Line) -> result.Suspect:
        """Make a reason of a line of this rank, at its time, else at that of the rank's end."""
        at = moment(self.evidence, self.rank.host, self.rank.exited_at_s if line.at_s is None else line.at_s)
        return result.Suspect(code, strength, (self.rank.rank,), (self.rank.host,), at, (self.proof(line),))


def is_specific(hit: Hit) -> bool:
    """Return whether it is more than the name of a Python exception or a list of usual causes."""
    row = hit.signature
    return not (row.family == "python" and row.code.startswith("python-") or says(hit.text, "usual-causes"))


# ---------------------------------------------------------------- exceptions raised while another was handled


def without_handled(chain: Chain, hits: Sequence[Hit], lines: Sequence[Line]) -> Chain:
    """Remove leading exceptions that were handled: they are not the reason of a later, unrelated failure."""
    begins, is_argued = 0, False
    ends = None
    for place, later in enumerate(chain.raised):
        before = chain.raised[begins:place]
        if not later.during or not before or any(retells(later, one) for one in before):
            continue
        if wording("clears").fullmatch(later.raised_in[1]):  # it failed while closing a resource: a consequence
            ends = place
            break
        if is_kind(later.type, "ends") or later.collective or suffered_wait(later.text) is not None:
            continue  # of a kind that any failure causes
        known = [hit for hit in hits if before[0].last <= hit.line < later.first and hit.signature.strength >= 20]
        if any(
            hit.signature.role != result.CAUSE or hit.signature.family in {*alike("runtimes"), "hccl"} for hit in known
        ):
            continue
        if any(hit.signature.family == "memory" for hit in known):  # of a batch that may be retried, or of all
            ends, is_argued = place, True
            break
        if later.statement.split(None, 1)[:1] == ["raise"] and later.raised_in == before[0].caught_in:
            is_argued = is_argued or bool(known)  # a handler in the function of the earlier exception replaced it
            continue
        begins, is_argued = place, not all(is_kind(one.type, "asks") for one in before)
    return replace(chain, begins=begins, ends=ends, is_argued=is_argued)


def retells(later: Raised, earlier: Raised) -> bool:
    """Return whether the later message contains the earlier type, message, or a name in that message."""
    has_number = earlier.message.startswith("[Errno ")
    message = earlier.message.partition("]")[2].lstrip() if has_number else earlier.message
    names = (name.strip("'\"") for name in result.QUOTED.findall(message))
    words = [earlier.short_type, message.partition(": '")[0], message, *names]
    return says(later.text, "points-elsewhere") or any(
        len(word) > 4 and word in later.message
        for word in words  # shorter ones are in many messages
    )
