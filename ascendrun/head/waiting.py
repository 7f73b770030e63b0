"""Waiting for what other threads put into a queue, and threads that start in the background."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

T = TypeVar("T")

RETRY_S = 1.0
_numbers = count()


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


def run_within(
    items: queue.SimpleQueue[T],
    run: Callable[[T], None],
    *,
    until_mono: float,
    most: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait for an item until `until_mono` and run it, then those that are there, `most` in all and none after that
    time; call it from one thread only."""
    try:
        run(get_within(items, until_mono - clock()))
        for _ in range(most - 1):
            if clock() >= until_mono:
                return
            run(items.get_nowait())
    except queue.Empty:
        return


def in_background(call: Callable[[], object], name: str, *, after_s: float = 0.0) -> None:
    """Run `call` in a thread of this name, and return at once: the thread starts after so many seconds or more, in the
    order of these times. Until then there is none for it.

    `Thread.start` waits until the thread runs: with hundreds of busy connections that took half a second. Where no
    thread can be started, it is tried again.
    """
    _background().put((time.monotonic() + after_s, next(_numbers), call, name))


@cache
def _background() -> queue.SimpleQueue[tuple[float, int, Callable[[], object], str]]:
    calls: queue.SimpleQueue[tuple[float, int, Callable[[], object], str]] = queue.SimpleQueue()

    def start_all() -> None:
        waiting: list[tuple[float, int, Callable[[], object], str]] = []
        while True:
            with suppress(queue.Empty):
                heappush(waiting, get_within(calls, waiting[0][0] - time.monotonic()) if waiting else calls.get())
            while waiting and waiting[0][0] <= time.monotonic():
                _start(*heappop(waiting)[2:])

    threading.Thread(target=start_all, name="background", daemon=True).start()
    return calls


os.register_at_fork(after_in_child=_background.cache_clear)  # a child does not have that thread


def _start(call: Callable[[], object], name: str) -> None:
    while True:
        try:
            return threading.Thread(target=call, name=name, daemon=True).start()
        except RuntimeError:  # this user may have no more threads at present
            time.sleep(RETRY_S)
