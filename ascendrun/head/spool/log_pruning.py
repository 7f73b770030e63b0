"""Lets nodes give up closed log files that are safe here, so that a chatty rank does not fill a node's disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from ascendrun.head.spool.collector import NodeSpool

KEEP_BYTES = 16 << 30
"""What a node may keep of one attempt's logs; below that nothing is removed there."""
EVERY_S = 60.0


class Releaser:
    """Of one attempt. `ask(host, have)` tells a host how much of which file is safe (see NodeSpool.safe_logs); called
    from a thread of its own, since only what is on our disk is safe, and syncing may take long."""

    def __init__(self, ask: Callable[[str, Mapping[str, Mapping[str, int]]], None]) -> None:
        self._ask = ask
        self._due_mono = time.monotonic() + EVERY_S
        self._working = threading.Lock()

    def tick(self, spools: Iterable[tuple[str, NodeSpool]]) -> None:
        """To be called now and then with the spools of the hosts that answer."""
        now = time.monotonic()
        if now < self._due_mono:
            return
        self._due_mono = now + EVERY_S
        with_more = [(host, spool) for host, spool in spools if spool.has_closed_logs()]
        if with_more:
            threading.Thread(target=self._work, args=(with_more,), daemon=True, name="release").start()

    def _work(self, spools: list[tuple[str, NodeSpool]]) -> None:
        if not self._working.acquire(blocking=False):
            return
        try:
            for host, spool in spools:
                try:
                    have = spool.safe_logs()
                except OSError:  # our disk is full or dying: then nothing is safe here
                    continue
                self._ask(host, have)
        finally:
            self._working.release()
