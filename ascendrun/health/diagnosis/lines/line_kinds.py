"""What a line or an exception says: a warning, an attempt, a report about other ranks, or another rank as the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ascendrun.ascend.peer_messages import EXEC, LOST, NAME, PeerMessage, read_messages
from ascendrun.ascend.vocabularies import class_of, values_in
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


_MEANS_PEER = re.compile(
    r"(?P<lost>remote (?:rank|peer|worker|process|end)|peer (?:rank|process|closed)|lost connection|"
    r"connection was .{0,20}(?:closed|lost)|(?:communicator|process group) .*(?:abort|destroyed))|"
    r"tim(?:ed|es|e)[ -]?out|deadline exceeded|barrier .*fail|rendezvous|ProcessGroup\w* .*error",
    re.IGNORECASE,
)
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
    """Return LOST or EXEC if an exception indicates that another rank was lost or did not join, by its class, its codes
    or its words; else None."""
    values = (class_of(text.partition(":")[0]), *values_in(text))
    domains = {one.domain for one in values if not (one.is_outer or one.is_family)}
    found = _MEANS_PEER.search(text)
    if "network" in domains or (found is not None and found["lost"]):
        return LOST
    return EXEC if found is not None or "silent" in domains else None


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


WENT_ON = re.compile(
    r"\bretry|\bretries\b|(?<!NCCL )\bWARN(?:ING)?\b|[Ww]arning\s?:|\bignor(?:ed|ing)\b|"
    r"\bskipp(?:ed|ing)\b|fall(?:ing)? back"
)
"""Warnings, after which a program continues."""
HANDLED = re.compile(
    r"\bretry|\bretries\b|(?<!Exception )\bignor(?:ed|ing)\b|\bskip(?:ped|ping|s)?\b|"
    r"\bfall(?:s|ing)? back\b|\bgoing on\b|\bcontinu(?:e|es|ing)\b",
    re.IGNORECASE,
)
"""Printed immediately after an exception that was caught."""
QUIET = re.compile(
    r"^\s|^\[[WEI]\d* |^\[(?:ERROR|WARNING|W|E)\]|[Ww]arning\b|\bERROR\b|^\s*[=*-]{5,}|"
    r"resource_tracker|^W\d{4} |^E\d{4} "
)
"""Not work: lines that are printed around an end."""
_WARNING = re.compile(
    r"^\s*(?:\[rank\d+\]:\s?)?(?:\[W(?:\d{4})? |W\d{4} |\[W(?:ARN(?:ING)?)?\]|WARN(?:ING)?\b|\w*Warning\s?:|"
    r"\S+:\d+: \w*Warning:|[\d\[][^A-Za-z]*[-|,:\s\[]\s*(?:W|WARN|WARNING)\b[\]:|\s-]|warnings\.warn\()"
)
_LOGGED_ERROR = re.compile(
    r"^(?!.*\(PID:.{0,60}\bERR\d{5}\b)(?:\([^)]{1,60}\)\s|\[rank\d+\]:\s?|\[[^\]]{1,40}\]:?\s)*"
    r"(?:[EF]\d{4,8} \d\d:|\[[EF] |E[A-Z0-9]\d{4}:? ?\[PID|(?:\S+\s){0,4}\S{0,3}(?:ERROR|FATAL|CRITICAL)\b)"
)
"""glog's E and F, reports of CANN, and the levels of logging, behind the prefix of a process; not the codes with which
torch_npu ends every failure."""
_REPORTS = re.compile(r"\berror code is \d+\s*\[Error\]")
"""torch_npu prints the runtime's complete error report as a warning if the error occurs during a device wait."""
_LESS = re.compile(
    r"^\s*(?:\[rank\d+\]:\s?)?(?:\[?(?:INFO|DEBUG)\b|[\d\[][^A-Za-z]*[-|,:\s\[]\s*(?:INFO|DEBUG)\b|"
    r"\[?I\d{4} )"
)
_USUAL = re.compile(r"^\s*(?:Possible Causes?|Solutions?|可能原因|解决方案|处理方案)\s*[:\uff1a]")
_CONNECTS = re.compile(r"c10d\].*client socket has failed to connect.*(?:errno: ?111\b|[Cc]onnection refused)")


_POINTS = re.compile(
    r"\bsee (?:the )?(?:\w+ ){0,3}\(?(?:above|below|logs?)\b|"
    r"\breported (?:as )?above\b|\broot cause of the above\b|\bdetails are lost\b|terminated with (?:signal|exit code)|"
    r"\b(?:exited|died|terminated) (?:unexpectedly|abruptly)\b|returned non-zero exit status|"
    r"\b(?:engine|process|worker|server)\w*\b.{0,20}\b(?:initialization failed|failed to start|died)\b|"
    r"\ban error occurred while (?:generating|running|executing)\b",
    re.IGNORECASE,
)


def points_elsewhere(text: str) -> bool:
    """Return whether it only reports another failure, whose message (if any) is elsewhere."""
    return _POINTS.search(text) is not None


def is_warning(text: str) -> bool:
    """Return whether its level is a warning. NCCL's WARN, and a warning that reports an error, are errors."""
    return _WARNING.match(text) is not None and _REPORTS.search(text) is None


def is_logged_error(text: str) -> bool:
    """Return whether its level is an error."""
    return _LOGGED_ERROR.match(text) is not None


def is_informational(text: str) -> bool:
    """Return whether its level is warning or lower."""
    return is_warning(text) or _LESS.match(text) is not None


def is_try(text: str) -> bool:
    """Return whether c10d could not reach the store yet: it warns for each attempt, and finally raises."""
    return is_warning(text) and _CONNECTS.search(text) is not None


def is_list_of_causes(text: str) -> bool:
    """Return whether it lists usual causes and fixes in a vendor's message; none need apply."""
    return _USUAL.match(text) is not None


def is_error_line(text: str) -> bool:
    """Return whether a plog line is not of a level below ERROR."""
    return not text.startswith(("[INFO]", "[DEBUG]", "[WARNING]", "[EVENT]"))
