"""Waiting for what other threads put into a queue."""

from __future__ import annotations

import queue
from typing import TypeVar

T = TypeVar("T")


def get_within(items: queue.SimpleQueue[T], timeout_s: float) -> T:
    """Return the next item; call it from one thread only. Raises queue.Empty: none came within `timeout_s`.

    `SimpleQueue.get(timeout=…)` alone may wait without end, in CPython 3.7 to 3.12: its first try may take the lock
    that the last `put` left free and find no item; if the time is over by then, it waits with a negative timeout, which
    means none. `get_nowait` takes that lock before.
    """
    try:
        return items.get_nowait()
    except queue.Empty:
        return items.get(timeout=max(0.0, timeout_s))
