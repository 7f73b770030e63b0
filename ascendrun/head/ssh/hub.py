"""Few threads for many connections: in each hub, one waits for all of them and serves those with bytes. Another one
takes over as soon as it has to wait for something else."""

from __future__ import annotations

import functools
import itertools
import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Protocol

IDLE_POLL_S = 20.0
"""Interval at which connections without bytes are served, for their deadlines."""
STUCK_S = 1.0
"""Interval at which the thread in reserve checks that the serving one is not stuck: in a receiver that waits for a
disk, or for a lock. It takes over after at most twice this time."""


HUBS = 4
"""A thread waits for the interpreter after each system call, and meanwhile the others serve. With one hub, and the loop
of the controller busy, data waited ten times as long; with more than 4 no shorter."""


class Served(Protocol):
    """A connection. One thread at a time calls its methods."""

    def fileno(self) -> int:
        """Return what becomes readable when bytes arrive; it stays open until `end`."""

    def serve(self) -> bool:
        """Handle what has arrived, or nothing after IDLE_POLL_S. False: the connection is over."""

    def end(self) -> None:
        """Report the end and close; called once, after `serve` has returned False."""


class Hub:
    """Serves connections. `add` and `step_aside`: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._poller = select.epoll()
        self._waiting: dict[int, Served] = {}
        """Those in the poller, by number. One that a thread which stepped aside still serves is not there."""
        self._leader, self._has_reserve = 0, False
        """The identity of the thread that serves; 0: none. Both threads end when no connection waits."""
        self._current: Served | None = None
        self._count = 0
        self._rest = threading.Lock()
        """Released for the thread in reserve. A semaphore in Python would cost its waits 0.1 % of a core."""
        self._rest.acquire()

    def add(self, served: Served) -> None:
        """Serve what the connection has read already, then let it wait with the others."""
        self._serve(served)

    def step_aside(self) -> None:
        """Let another thread serve the other connections: this one has to wait now. Without effect in other threads."""
        if self._leader == threading.get_ident():
            with self._lock:
                if self._leader == threading.get_ident() and self._has_reserve:
                    self._depose()
                    self._call_reserve()

    def _depose(self) -> None:
        """Take the lead from the serving thread, which keeps its current connection; with the lock."""
        if self._current is not None:
            self._remove(self._current)
        self._leader, self._current = 0, None

    def _call_reserve(self) -> None:
        """Have the thread in reserve check now who serves; with the lock."""
        if self._rest.locked():
            self._rest.release()

    def _remove(self, served: Served) -> None:
        number = served.fileno()
        if self._waiting.get(number) is served:
            del self._waiting[number]
            self._poller.unregister(number)

    def _insert(self, served: Served) -> None:
        number = served.fileno()
        self._waiting[number] = served
        self._poller.register(number, select.EPOLLIN)
        if self._leader == 0 and not self._has_reserve:
            self._has_reserve = True
            self._start_reserve()
            self._call_reserve()

    def _start_reserve(self) -> None:
        try:
            threading.Thread(target=self._wait_in_reserve, name="ssh", daemon=True).start()
        except RuntimeError:  # no more threads for this user: the others wait for the one that serves
            self._has_reserve = False

    def _wait_in_reserve(self) -> None:
        seen = -1
        while True:
            self._rest.acquire(timeout=STUCK_S)
            with self._lock:
                if self._current is not None and self._count == seen:
                    self._depose()
                seen = self._count
                if self._leader == 0:
                    self._has_reserve = bool(self._waiting)
                    if not self._has_reserve:
                        return
                    self._leader = threading.get_ident()
                    break
        self._start_reserve()
        self._lead()

    def _lead(self) -> None:
        poll_mono = time.monotonic() + IDLE_POLL_S
        while True:
            with self._lock:
                if not self._waiting:
                    self._leader = 0
                    self._call_reserve()
                    return
            numbers = [number for number, _ in self._poller.poll(max(0.0, poll_mono - time.monotonic()))]
            if time.monotonic() >= poll_mono:
                poll_mono = time.monotonic() + IDLE_POLL_S
                numbers = list(self._waiting)
            for number in numbers:
                with self._lock:
                    served = self._waiting.get(number)
                    if served is None:
                        continue
                    self._current, self._count = served, self._count + 1
                if not self._serve(served):
                    return  # the poller shows the others to the thread that leads now

    def _serve(self, served: Served) -> bool:
        """Serve a connection; return whether this thread still has the lead."""
        me = threading.get_ident()
        lasts = served.serve()
        with self._lock:
            if not lasts:
                self._remove(served)
            elif self._leader != me:
                self._insert(served)
        if not lasts:
            served.end()
        with self._lock:
            if self._leader == me:
                self._current = None
            return self._leader == me


@functools.lru_cache(maxsize=1)
def _hubs() -> Iterator[Hub]:
    return itertools.cycle([Hub() for _ in range(HUBS)])


def next_hub() -> Hub:
    """Return the hub of this process for another connection; any thread."""
    return next(_hubs())


os.register_at_fork(after_in_child=_hubs.cache_clear)  # a child has none of their threads, and makes others
