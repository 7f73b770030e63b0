"""The kind of a line: a warning, one of several tries, an informational line."""

from __future__ import annotations

import re

WENT_ON = re.compile(
    r"\bretry|\bretries\b|(?<!NCCL )\bWARN(?:ING)?\b|[Ww]arning\s?:|\bignor(?:ed|ing)\b|"
    r"\bskipp(?:ed|ing)\b|fall(?:ing)? back"
)
"""After a warning a program continues."""
HANDLED = re.compile(
    r"\bretry|\bretries\b|(?<!Exception )\bignor(?:ed|ing)\b|\bskip(?:ped|ping|s)?\b|"
    r"\bfall(?:s|ing)? back\b|\bgoing on\b|\bcontinu(?:e|es|ing)\b",
    re.IGNORECASE,
)
"""Said right after an exception: it was caught."""
QUIET = re.compile(
    r"^\s|^\[[WEI]\d* |^\[(?:ERROR|WARNING|W|E)\]|[Ww]arning\b|\bERROR\b|^\s*[=*-]{5,}|"
    r"resource_tracker|^W\d{4} |^E\d{4} "
)
"""Not work: lines that are printed around an end."""
_WARNING = re.compile(
    r"^\s*(?:\[rank\d+\]:\s?)?(?:\[W(?:\d{4})? |W\d{4} |\[W(?:ARN(?:ING)?)?\]|WARN(?:ING)?\b|\w*Warning\s?:|"
    r"\S+:\d+: \w*Warning:|[\d\[][^A-Za-z]*[-|,:\s\[]\s*(?:W|WARN|WARNING)\b[\]:|\s-]|warnings\.warn\()"
)
_REPORTS = re.compile(r"\berror code is \d+\s*\[Error\]")
"""torch_npu warns with the runtime's whole report of an error, where it found it while it waited for the device."""
_LESS = re.compile(
    r"^\s*(?:\[rank\d+\]:\s?)?(?:\[?(?:INFO|DEBUG)\b|[\d\[][^A-Za-z]*[-|,:\s\[]\s*(?:INFO|DEBUG)\b|"
    r"\[?I\d{4} )"
)
_USUAL = re.compile(r"^\s*(?:Possible Causes?|Solutions?|可能原因|解决方案|处理方案)\s*[:\uff1a]")
_CONNECTS = re.compile(r"c10d\].*client socket has failed to connect.*(?:errno: ?111\b|[Cc]onnection refused)")


_POINTS = re.compile(
    r"\bsee (?:the )?(?:\w+ ){0,3}(?:above|below|logs?)\b|\bdetails are lost\b|terminated with (?:signal|exit code)|"
    r"\b(?:exited|died|terminated) (?:unexpectedly|abruptly)\b|returned non-zero exit status|"
    r"\b(?:engine|process|worker|server)\w*\b.{0,20}\b(?:initialization failed|failed to start|died)\b|"
    r"\ban error occurred while (?:generating|running|executing)\b",
    re.IGNORECASE,
)


def points_elsewhere(text: str) -> bool:
    """An exception that only reports that something else failed; the message of that is elsewhere, if anywhere."""
    return _POINTS.search(text) is not None


def is_warning(text: str) -> bool:
    """By its own level; NCCL's WARN is what others call an error, and a warning that reports an error is none."""
    return _WARNING.match(text) is not None and _REPORTS.search(text) is None


def is_informational(text: str) -> bool:
    """By its own level no error: a warning, or less."""
    return is_warning(text) or _LESS.match(text) is not None


def is_try(text: str) -> bool:
    """The store's door was not open yet: c10d warns of each try, and raises when it gives up."""
    return is_warning(text) and _CONNECTS.search(text) is not None


def is_list_of_causes(text: str) -> bool:
    """What the vendor's messages add of usual reasons and remedies: none of them need have happened."""
    return _USUAL.match(text) is not None


def is_error_line(text: str) -> bool:
    """Of a plog: a line with the level of an error."""
    return not text.startswith(("[INFO]", "[DEBUG]", "[WARNING]", "[EVENT]"))
