"""The kind of a line: a warning, one of several attempts, an informational line."""

from __future__ import annotations

import re

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
_REPORTS = re.compile(r"\berror code is \d+\s*\[Error\]")
"""torch_npu prints the runtime's complete error report as a warning if the error occurs during a device wait."""
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
    """Return whether it only reports another failure, whose message (if any) is elsewhere."""
    return _POINTS.search(text) is not None


def is_warning(text: str) -> bool:
    """Return whether its level is a warning. NCCL's WARN, and a warning that reports an error, are errors."""
    return _WARNING.match(text) is not None and _REPORTS.search(text) is None


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
