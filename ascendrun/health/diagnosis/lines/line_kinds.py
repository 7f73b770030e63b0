"""What a line or an exception says: a warning, an attempt, a report about other ranks, or another rank as the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ascendrun.ascend.peer_messages import EXEC, LOST, PeerMessage, read_messages
from ascendrun.ascend.vocabularies import class_of, says, values_in, wording
from ascendrun.core.dataclass import dataclass
from ascendrun.health.diagnosis.evidence import Line


@dataclass(frozen=True)
class PeerLine(PeerMessage):
    """A message about other ranks, with its line."""

    line: Line = Line("", "")


def find_peer_lines(lines: Iterable[Line]) -> Iterator[PeerLine]:
    """Yield messages in the order of the lines; one line may have several."""
    for line in lines:
        for found in read_messages(line.text):
            yield PeerLine(found.kind, found.wait, found.ranks, found.addresses, found.values, line)


def accuses(text: str, *, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the other ranks that an exception reports as gone; () for none."""
    found = {int(number) for match in wording("other-rank").finditer(text) for number in match.groups() if number}
    return tuple(sorted(number for number in found - {rank} if number < world_size))


def suffered_wait(text: str) -> str | None:
    """Return LOST or EXEC if an exception indicates that another rank was lost or did not join, by its class, its codes
    or its words; else None."""
    values = (class_of(text.partition(":")[0]), *values_in(text))
    domains = {one.domain for one in values if not (one.is_outer or one.is_family)}
    found = wording("means-peer").search(text)
    if "network" in domains or (found is not None and found["lost"]):
        return LOST
    return EXEC if found is not None or "silent" in domains else None


_BARE = re.compile(r"[\d.]+|localhost")


def services_in(text: str, *, by_address: bool = False) -> tuple[str, ...]:
    """Return the hosts of services (such as a web server) on a line that are named; or those by address: they may be
    outside of the job, or one of its ranks."""
    hosts = (one for found in wording("service").findall(text) for one in found if one)
    return tuple(host for host in hosts if (_BARE.fullmatch(host) is not None) == by_address)


def is_warning(text: str) -> bool:
    """Return whether its level is a warning. NCCL's WARN, and a warning that reports an error, are errors."""
    return says(text, "warning") and not says(text, "report")


def is_try(text: str) -> bool:
    """Return whether c10d could not reach the store yet: it warns for each attempt, and finally raises."""
    return says(text, "store-not-there") and is_warning(text)


def is_error_line(text: str) -> bool:
    """Return whether a plog line is not of a level below ERROR."""
    return not text.startswith(("[INFO]", "[DEBUG]", "[WARNING]", "[EVENT]"))
