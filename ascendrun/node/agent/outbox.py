"""Single writer for the agent's outgoing frames: bounded queue, heartbeat when idle."""

from __future__ import annotations

import collections
import os
import threading
import time

from ascendrun.node import wire
from ascendrun.node.files import write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

LIMIT_BYTES = 4 << 20
JOIN_BYTES = 1 << 18
"""Bytes: waiting frames are joined into writes of about this size: the head's cost is per packet, not per byte."""


class Outbox:
    """`on_broken` is called once, in the writer's thread, when the reader is gone; `beat_s` returns the maximum length
    of the next pause."""

    def __init__(self, fd: int, on_broken: Callable[[], None], beat_s: Callable[[], float]) -> None:
        self._fd = fd
        self._beat_s = beat_s
        self._on_broken = on_broken
        self._frames: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._busy = False
        self._broken = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="writer").start()

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Queue a frame; wait while the reader is slow. Without a reader frames are dropped."""
        frame = wire.pack(header, body)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes < LIMIT_BYTES or self._broken)
            if not self._broken:
                self._frames.append(frame)
                self._waiting_bytes += len(frame)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written; False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._broken or not (self._frames or self._busy), timeout_s)

    def _run(self) -> None:
        while True:
            data = self._take()
            try:
                write_all(self._fd, data)
            except OSError:
                with self._changed:
                    self._broken = True
                    self._changed.notify_all()
                self._on_broken()
                return

    def _take(self) -> bytes:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: bool(self._frames), self._beat_s()):
                return wire.pack({"event": "beat", "at_ns": time.time_ns()})
            joined = []
            size = 0
            while self._frames and size < JOIN_BYTES:
                joined.append(self._frames.popleft())
                size += len(joined[-1])
            self._waiting_bytes -= size
            self._busy = True
            self._changed.notify_all()
            return b"".join(joined)


def private_copy(fd: int, replacement: int) -> int:
    """Return a private copy of a standard stream; `replacement` replaces it, so no stray print or child uses it."""
    mine = os.dup(fd)
    os.set_inheritable(mine, False)
    os.dup2(replacement, fd)
    return mine
