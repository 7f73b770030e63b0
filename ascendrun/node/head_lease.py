"""The lease of an attempt whose ranks must not run without the head (`restart.on_unreachable_node: fence`).

The head sends a time that the node reported before: the lease counts from that time, so that delayed or repeated
messages cannot make it longer. It is the modification time of an empty file, which can be set on a full disk.
"""

from __future__ import annotations

import os
import time

MARGIN_S = 35.0
"""Seconds before the end of the lease by which the ranks have ended, apart from their grace period."""


def now_ns() -> int:
    """Return the clock since boot: it runs on while the machine is suspended, and nobody sets it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def begin(path: str, at_ns: int) -> None:
    """Let the lease count from `at_ns`; an earlier time than the present one changes nothing. Raises OSError."""
    open(path, "ab").close()
    if at_ns > began_ns(path):
        os.utime(path, ns=(at_ns, at_ns))


def began_ns(path: str) -> int:
    """Return when the lease began, 0: never. Raises OSError when the file cannot be read."""
    at_ns = os.stat(path).st_mtime_ns
    return at_ns if at_ns <= now_ns() else 0  # a new file has the time of day until `begin` has set it


def is_over(began: int, *, fence_s: float, grace_s: float) -> bool:
    """Return whether the ranks must be ended now, so that SIGKILL was sent `fence_s` after the lease began."""
    return now_ns() - began >= (fence_s - grace_s - MARGIN_S) * 1e9
