"""The directory of a supervisor's attempt: kept, searched for a request to stop, and with a roll of the processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from ascendrun.node import layout, procs, reap, stopping
from ascendrun.node.files import exists, make_private_dir, read_json, write_json
from ascendrun.node.layout import IDENTITY, PREPARED, RENEWED, ROLL, STOP, STOP_TAKEN, WHERE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

ROLL_S = 1.0
ROLL_COST = 100.0
"""The search for descendants takes at most one hundredth of the time."""


class Folder:
    """`path`: the directory of the attempt; `streams`: that of its growing files, another if `path` is on a network.

    Then a thread looks at `path`: its server may hang, the ranks' output must not.
    """

    def __init__(self, path: str, prepared: dict[str, Any], identity: dict[str, Any]) -> None:
        self.path = path
        self.streams = layout.streams_dir(path)
        self._prepared, self._identity = prepared, identity
        self._looks_in_thread = False
        self._look_now, self._is_over = threading.Event(), False
        self._order: dict[str, Any] | None = None
        self._error: OSError | None = None
        self.lease_began_ns = 0
        self._roll: list[reap.Who] = []
        self._next_roll_s = 0.0

    @property
    def is_elsewhere(self) -> bool:
        return self.streams != self.path

    def start_thread(self, *, wake: Callable[[], Any], every_s: float) -> None:
        """Look in a thread if the directory is on a network; `wake()` is called after a new request to stop."""
        if self.is_elsewhere:
            self._looks_in_thread = True
            threading.Thread(target=self._look, args=(wake, every_s), daemon=True, name="folder").start()

    def look_soon(self, *, last: bool = False) -> None:
        """Let the thread look now; `last`: no more."""
        self._is_over = last
        self._look_now.set()

    def check(self) -> None:
        """Make the directories again if they were removed, unless a thread does. Raises OSError."""
        if not self._looks_in_thread:
            self._keep()

    def stop_request(self) -> tuple[dict[str, Any] | None, OSError | None]:
        """Return (the request to stop, None: none; why the last look failed). A file that cannot be read is no
        request."""
        if self._looks_in_thread:
            error, self._error = self._error, None
            return self._order, error
        try:
            return read_json(os.path.join(self.path, STOP)), None
        except OSError as reason:
            return None, reason

    def acknowledge_stop(self) -> None:
        """Rename the request's file: a supervisor that leaves it is recognised as hung."""
        with contextlib.suppress(OSError):
            os.replace(os.path.join(self.path, STOP), os.path.join(self.path, STOP_TAKEN))

    def read_lease(self) -> None:
        """Set `lease_began_ns`, the newest time at which the head renewed the attempt's lease. Raises OSError."""
        began_ns = stopping.lease_began_ns(os.path.join(self.streams, RENEWED))
        self.lease_began_ns = max(self.lease_began_ns, began_ns)

    def write_roll(self, now: float) -> None:
        """Record the living descendants. After this process's death they have a trace, also without an environment.
        Raises OSError."""
        if now < self._next_roll_s:
            return
        table = procs.snapshot()
        self._next_roll_s = now + max(ROLL_S, ROLL_COST * (time.monotonic() - now))
        found = reap.descendants(table, {os.getpid()}) - {os.getpid()}
        roll = sorted((pid, table[pid].start) for pid in found if not table[pid].is_dead)
        if roll != self._roll:
            value = {"boot_id": self._identity["boot_id"], "seen": roll}
            write_json(os.path.join(self.streams, ROLL), value, durable=False)
            self._roll = roll

    def _look(self, wake: Callable[[], Any], every_s: float) -> None:
        while not self._is_over:
            try:
                self._keep()
                order = read_json(os.path.join(self.path, STOP))
            except OSError as error:
                self._error = error
            else:
                if order is not None and order != self._order:
                    self._order = order
                    with contextlib.suppress(BlockingIOError):  # the loop has been woken often enough
                        wake()
            self._look_now.wait(every_s)
            self._look_now.clear()

    def _keep(self) -> None:
        """Make the attempt's folders again if they were removed: the records of the ranks' ends need a place."""
        if self.is_elsewhere and not exists(self.streams):
            make_private_dir(self.streams)
        if exists(self.path):
            return
        make_private_dir(self.path)
        if self.is_elsewhere:
            write_json(os.path.join(self.path, WHERE), {"streams": self.streams})
        write_json(os.path.join(self.path, IDENTITY), self._identity)
        write_json(os.path.join(self.path, PREPARED), self._prepared)
