"""What ranks report about other ranks, line by line; and whether an exception indicates another rank as the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ascendrun.ascend.peer_messages import CONNECT, EXEC, LOST, PeerMessage, read_messages
from ascendrun.ascend.peer_messages.message import NAME
from ascendrun.health.diagnosis.evidence import Line

__all__ = [
    "CONNECT", "EXEC", "LOST", "PeerLine", "accuses", "failed_itself", "find_peer_lines", "has_bare_service",
    "is_loopback", "suffered_wait", "services_in",
]  # fmt: skip


@dataclass(frozen=True)
class PeerLine(PeerMessage):
    """With its line."""

    line: Line = Line("", "")


def find_peer_lines(lines: Iterable[Line]) -> Iterator[PeerLine]:
    """In the order of the lines; one line may have several messages."""
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
"""HcclResult (hccl_types.h): 9 timeout, 11-14 connect and transfer, 19 network, 21 remote; others are its own."""
_OWN_FAILURE = re.compile(r"\bHCCL (?:function )?error\b|\bNCCL error\b", re.IGNORECASE)


_OTHER_RANK = re.compile(
    r"\b(?:rank|worker|peer|node|process|replica)s?\s*[#:=\[(]?\s*(\d+)\b"
    r"(?=.{0,60}\b(?:died|dead|fail\w*|lost|exit\w*|respond\w*|missing|crash\w*|unreachable|gone|heart\s?beat|left|stopped|abort\w*))|"
    r"(?:lost|no (?:heartbeat|answer|reply)|heartbeat|waiting|waited)\b.{0,40}"
    r"\b(?:rank|worker|peer|node|process|replica)s?\s*[#:=\[(]?\s*(\d+)\b",
    re.IGNORECASE,
)


def accuses(text: str, *, rank: int, world_size: int) -> tuple[int, ...]:
    """The other ranks that an exception reports as gone; () none."""
    found = {int(number) for match in _OTHER_RANK.finditer(text) for number in match.groups() if number}
    return tuple(sorted(number for number in found - {rank} if number < world_size))


def failed_itself(text: str) -> bool:
    """A call to the communication library failed in this rank, and nothing states that it waited for another one."""
    return _OWN_FAILURE.search(text) is not None and suffered_wait(text) is None


def suffered_wait(text: str) -> str | None:
    """LOST or EXEC if an exception indicates that another rank was lost or did not come; else None."""
    if _MEANS_LOST.search(text):
        return LOST
    return EXEC if _MEANS_WAITED.search(text) else None


_SERVICE = re.compile(
    r"\b(?:https?|s3a?|rediss?|postgres(?:ql)?|mysql|mongodb|amqps?|ftp|hdfs)://(?:[^@/\s]*@)?(" + NAME + r")|"
    r"\bhost=['\"]?(" + NAME + ")"
)
_BARE = re.compile(r"[\d.]+|localhost")


def services_in(text: str) -> tuple[str, ...]:
    """Hosts of services, such as a web server, that a line names; the owner of an address is unknown."""
    return tuple(name for name in _of_services(text) if not _BARE.fullmatch(name))


def has_bare_service(text: str) -> bool:
    """A service is named by an address: it may be outside of the job, or one of its own ranks."""
    return any(_BARE.fullmatch(name) for name in _of_services(text))


def _of_services(text: str) -> tuple[str, ...]:
    return tuple(one for found in _SERVICE.findall(text) for one in found if one)


def is_loopback(address: str) -> bool:
    """Every host takes it for itself."""
    return address in ("localhost", "::1") or address.startswith("127.")
