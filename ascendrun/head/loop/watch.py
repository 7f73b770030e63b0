"""Watch over the controller's loop: by how much its beats are late, and where it was meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

import ascendrun
from ascendrun.core.pulse import Stall

STALL_S = 0.5
"""A beat that is later is reported."""
LOOK_S = 0.2
RECENT_S = 60.0
_PACKAGE = f"{Path(ascendrun.__file__).parent}/"
_PASSED_ON = frozenset(("<lambda>", "__call__", "_tick", "run_within"))
"""Names of functions that only pass the call on."""


class LoopWatch:
    """Calls from the loop's thread, except `close`. A thread looks where the loop is, while a beat is late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.stall: Stall | None = None
        """The last stall of at least STALL_S."""
        self._due_mono = self._began_mono = float("inf")
        self._late: list[tuple[float, float]] = []
        self._seen: Counter[tuple[str, str]] = Counter()
        self._loop: tuple[int, CodeType] | None = None
        self._has_ended = threading.Event()

    def start(self) -> None:
        """Call from the function that is the loop."""
        self._loop = threading.get_ident(), sys._getframe(1).f_code
        threading.Thread(target=self._run, name="loop-watch", daemon=True).start()

    def close(self) -> None:
        """Any thread."""
        self._has_ended.set()

    def beat(self, most_s: float) -> None:
        """Note the begin of a beat, which may itself last `most_s`, and log the stall before it."""
        now = self._clock()
        late_s, self._due_mono, self._began_mono = now - self._due_mono, now + most_s, now
        self._late = [one for one in self._late if one[0] > now - RECENT_S and one[1] > late_s] + [(now, late_s)]
        seen, self._seen = self._seen, Counter()
        if late_s >= STALL_S:
            [((handler, line), _)] = seen.most_common(1) or [(("", ""), 0)]
            self.stall = Stall(late_s, time.time(), handler, line)
            with suppress(OSError):  # the disk of the log is full
                at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.stall.at_s))
                print(f"{at} {self.stall.describe()}", flush=True)

    def expect(self, wait_s: float) -> None:
        """Expect the next beat `wait_s` after the begin of the last one."""
        self._due_mono = self._began_mono + wait_s

    def recent_s(self) -> float:
        """Return the most seconds by which a beat of the last RECENT_S was late."""
        since = self._clock() - RECENT_S
        return max([0.0, *(late_s for at, late_s in self._late if at > since)])

    def look(self) -> None:
        """Note where the loop is if its beat is late. Any thread."""
        if self._clock() > self._due_mono + LOOK_S and self._loop is not None:
            frame = sys._current_frames().get(self._loop[0])
            if frame is not None:
                self._seen[describe(frame, self._loop[1])] += 1

    def _run(self) -> None:
        while not self._has_ended.wait(LOOK_S):
            self.look()


def describe(frame: FrameType, loop: CodeType) -> tuple[str, str]:
    """Return where the thread of a loop is: the function that the loop called, and the innermost line of ours."""
    ours: list[FrameType] = []
    one: FrameType | None = frame
    while one is not None and one.f_code is not loop:
        if one.f_code.co_filename.startswith(_PACKAGE):
            ours.append(one)
        one = one.f_back
    called = [one for one in ours if one.f_code.co_name not in _PASSED_ON]
    return (_place(called[-1]), f"{_place(ours[0])}:{ours[0].f_lineno}") if called else ("", "")


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename[len(_PACKAGE) :]})"
