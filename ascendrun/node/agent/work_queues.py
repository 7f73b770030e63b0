"""Runs what may take long beside the loop: the jobs of one lane in order, lanes side by side."""

from __future__ import annotations

import collections
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

MAX_LANES = 64


class WorkQueues:
    """A lane's thread lives as long as the lane has jobs."""

    def __init__(self) -> None:
        self._lanes: dict[str, collections.deque[Callable[[], None]]] = {}
        self._idle = threading.Condition()

    def add(self, lane: str, job: Callable[[], None]) -> bool:
        """False when too many lanes are busy: the job was not taken."""
        with self._idle:
            waiting = self._lanes.get(lane)
            if waiting is not None:
                waiting.append(job)
                return True
            if len(self._lanes) >= MAX_LANES:
                return False
            self._lanes[lane] = collections.deque([job])
        threading.Thread(target=self._run, args=(lane,), daemon=True, name="lane-" + lane).start()
        return True

    def wait_idle(self, timeout_s: float) -> bool:
        """Until every job is done; False at the timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._lanes, timeout_s)

    def _run(self, lane: str) -> None:
        while True:
            with self._idle:
                waiting = self._lanes[lane]
                if not waiting:
                    del self._lanes[lane]
                    self._idle.notify_all()
                    return
                job = waiting.popleft()
            job()
