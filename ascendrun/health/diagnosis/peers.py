"""Reports of ranks about other ranks, by line; and exceptions that indicate another rank as the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ascendrun.ascend.peer_messages import CONNECT, EXEC, LOST, NAME, PeerMessage, read_messages
from ascendrun.core.dataclass import dataclass
from ascendrun.health.diagnosis.evidence import Line

__all__ = [
    "CONNECT", "EXEC", "LOST", "PeerLine", "accuses", "failed_itself", "find_peer_lines", "has_bare_service",
    "is_loopback", "suffered_wait", "services_in",
]  # fmt: skip


@dataclass(frozen=True)
class PeerLine(PeerMessage):
    """A message about other ranks, with its line."""

    line: Line = Line("", "")


def find_peer_lines(lines: Iterable[Line]) -> Iterator[PeerLine]:
    """Yield messages in the order of the lines; one line may have several."""
    for line in lines:
        for found in read_messages(line.text):
            yield PeerLine(found.kind, found.wait, found.ranks, found.addresses, found.values, line)


_MEANS_LOST = re.compile(
    r"connections?\b.{0,40}\b(?:reset|closed|refused|aborted|lost|broken|failed)|broken pipe|"
    r"remote (?:rank|peer|worker|process|end)|peer (?:rank|process|closed)|lost connection|"
    r"connection error|process group .*(?:abort|destroyed)|"
    r"communicator .*abort|^(?:\w+\.)*(?:EOFError|BrokenPipeError|Connection\w*Error|"
    r"IncompleteReadError)\b",
    re.IGNORECASE,
)
_MEANS_WAITED = re.compile(
    r"tim(?:ed|es|e)[ -]?out|deadline exceeded|barrier .*fail|rendezvous|"
    r"\bHCCL (?:function )?error\b.*error code is (?:9|1[1-4]|19|21)\b|ProcessGroup\w* .*error",
    re.IGNORECASE,
)
"""HcclResult (hccl_types.h): 9 timeout, 11-14 connect and transfer, 19 network, 21 remote; others are local."""
_OWN_FAILURE = re.compile(r"\bHCCL (?:function )?error\b|\bNCCL error\b", re.IGNORECASE)


_OTHER_RANK = re.compile(
    r"\b(?:rank|worker|peer|node|process|replica)s?\s*[#:=\[(]?\s*(\d+)\b"
    r"(?=.{0,60}\b(?:died|dead|fail\w*|lost|exit\w*|respond\w*|missing|crash\w*|unreachable|gone|heart\s?beat|left|stopped|abort\w*))|"
    r"(?:lost|no (?:heartbeat|answer|reply)|heartbeat|waiting|waited)\b.{0,40}"
    r"\b(?:rank|worker|peer|node|process|replica)s?\s*[#:=\[(]?\s*(\d+)\b",
    re.IGNORECASE,
)


def accuses(text: str, *, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the other ranks that an exception reports as gone; () for none."""
    found = {int(number) for match in _OTHER_RANK.finditer(text) for number in match.groups() if number}
    return tuple(sorted(number for number in found - {rank} if number < world_size))


def failed_itself(text: str) -> bool:
    """Return whether a communication library call failed in this rank, without evidence of a wait for others."""
    return _OWN_FAILURE.search(text) is not None and suffered_wait(text) is None


def suffered_wait(text: str) -> str | None:
    """Return LOST or EXEC if an exception indicates that another rank was lost or did not join; else None."""
    if _MEANS_LOST.search(text):
        return LOST
    return EXEC if _MEANS_WAITED.search(text) else None


_SERVICE = re.compile(
    r"\b(?:https?|s3a?|rediss?|postgres(?:ql)?|mysql|mongodb|amqps?|ftp|hdfs)://(?:[^@/\s]*@)?(" + NAME + r")|"
    r"\bhost=['\"]?(" + NAME + ")"
)
_BARE = re.compile(r"[\d.]+|localhost")


def services_in(text: str) -> tuple[str, ...]:
    """Return hosts of services (such as a web server) on a line, without addresses: their owner is unknown."""
    return tuple(name for name in _of_services(text) if not _BARE.fullmatch(name))


def has_bare_service(text: str) -> bool:
    """Return whether a service is named by address: it may be outside of the job, or one of its ranks."""
    return any(_BARE.fullmatch(name) for name in _of_services(text))


def _of_services(text: str) -> tuple[str, ...]:
    return tuple(one for found in _SERVICE.findall(text) for one in found if one)


def is_loopback(address: str) -> bool:
    """Return whether it is a loopback address."""
    return address in ("localhost", "::1") or address.startswith("127.")
