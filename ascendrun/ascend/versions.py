"""Comparison of versions as Huawei and PyTorch write them.

parse_version("8.0.RC3") < parse_version("8.0.0");  "2.1.0.post8+git1f2e" -> release 2.1.0, post 8
"""

from __future__ import annotations

import re
from functools import lru_cache

from ascendrun.core.dataclass import dataclass

_PART = re.compile(r"([0-9]{1,9})|rc([0-9]{1,9})|alpha([0-9]{1,9})|beta([0-9]{1,9})|post([0-9]{1,9})", re.IGNORECASE)
_GLUED = re.compile(r"([0-9]{1,9})(rc[0-9]{1,9}|a[0-9]{1,9}|b[0-9]{1,9})")


@dataclass(frozen=True, order=True)
class Version:
    """A version; `key` orders: alpha < beta < rc < plain < post at each place; a missing place is a final 0."""

    key: tuple[tuple[int, int], ...]


_FINAL = (3, 0)  # the value of a missing place: 8.0.0 is 8.0
_PLACES = 8


@lru_cache(maxsize=1024)
def parse_version(text: str) -> Version | None:
    """Parse a version without its local part (`+cpu`, `+git...`); None if its order is unknown (7.0.T10)."""
    plain = text.strip().partition("+")[0].rstrip(".")
    plain = _GLUED.sub(r"\1.\2", plain)
    key = []
    for part in plain.split("."):
        found = _PART.fullmatch(part)
        if not found:
            return None
        rank, number = next((n, int(value)) for n, value in enumerate(found.groups()) if value is not None)
        key.append((_ORDER[rank], number))
    return Version((*key, *[_FINAL] * (_PLACES - len(key)))) if len(key) <= _PLACES else None


_ORDER = (3, 2, 0, 1, 4)  # of plain number, rc, alpha, beta, post


def release_of(text: str) -> str | None:
    """Return the three numbers that torch and torch_npu share: 2.1.0 of 2.1.0.post8.dev20241009; None if missing."""
    found = re.match(r"\s*([0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4})(?![0-9])", text)
    return found[1] if found else None


def is_within(version: str, low: str, high: str) -> bool | None:
    """Return whether low <= version <= high; None if one of them cannot be ordered.

    A high end with a trailing dot (23.0.0. in firmware/version.info) is not documented, and a driver of the same
    package is above it as a number: such an interval can confirm, but never exclude.
    """
    one, start, end = parse_version(version), parse_version(low), parse_version(high)
    if one is None or start is None or end is None:
        return None
    if start <= one <= end:
        return True
    return None if high.endswith(".") else False
