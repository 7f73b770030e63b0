"""When ranks end: the schedule of signals, targets and times, which sends nothing; the lease that ends them.

The checkpoint signal goes to each rank's own process only (its data loaders would die of it); TERM and KILL go to all
processes of the attempt. ABRT, at which Python prints all stacks, goes to the processes of ranks that handle it.
"""

from __future__ import annotations

import collections
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

Step = collections.namedtuple("Step", "at_s signal everything")
"""At `at_s` (monotonic) send `signal` to everything, or to the ranks' own processes only."""

FAILURE_GRACE_S = 5.0
"""Seconds. The other ranks hang in a collective with the failed rank: a longer wait is useless."""
TERM_GRACE_S = 2.0
REMAINING_GRACE_S = 1.0
UNKILLABLE_S = 30.0
"""Seconds after SIGKILL until a living process (blocked in the kernel) is reported as remaining."""


def steps_for(by: str, *, now_s: float, signal: str, grace_s: float) -> list[Step]:
    """Return the steps. `by`: head, limit and node let the program save first; failure, finished and hung do not."""
    if by == "failure":
        return [Step(now_s, "TERM", True), Step(now_s + min(grace_s, FAILURE_GRACE_S), "KILL", True)]
    if by == "finished":
        return [Step(now_s, "TERM", True), Step(now_s + REMAINING_GRACE_S, "KILL", True)]
    return [
        Step(now_s, "ABRT" if by == "hung" else signal, False),
        Step(now_s + grace_s, "TERM", True),
        Step(now_s + grace_s + TERM_GRACE_S, "KILL", True),
    ]


class Ladder:
    """The remaining steps. New steps replace the old only when they kill sooner."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self.reached_kill = False

    def set(self, steps: Sequence[Step]) -> bool:
        """Set the steps. False when the current steps are at least as fast."""
        if self.reached_kill or (self._steps and self._steps[-1].at_s <= steps[-1].at_s):
            return False
        self._steps = list(steps)
        return True

    def due(self, now_s: float) -> list[Step]:
        """Return the due steps, each once."""
        due = [step for step in self._steps if step.at_s <= now_s]
        self._steps = self._steps[len(due) :]
        self.reached_kill = self.reached_kill or any(step.signal == "KILL" for step in due)
        return due

    def next_s(self) -> float | None:
        """Return the time of the next step; None: no step is left."""
        return self._steps[0].at_s if self._steps else None


# --- the lease of an attempt whose ranks must not run without the head (`restart.on_unreachable_node: fence`) ---
#
# The head sends a time that the node reported before: the lease counts from that time, so that delayed or repeated
# messages cannot make it longer. It is the modification time of an empty file, which can be set on a full disk.

MARGIN_S = 35.0
"""Seconds before the end of the lease by which the ranks have ended, apart from their grace period."""


def since_boot_ns() -> int:
    """Return the clock since boot: it runs on while the machine is suspended, and nobody sets it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def begin_lease(path: str, at_ns: int) -> None:
    """Let the lease count from `at_ns`; an earlier time than the present one changes nothing. Raises OSError."""
    open(path, "ab").close()
    if at_ns > lease_began_ns(path):
        os.utime(path, ns=(at_ns, at_ns))


def lease_began_ns(path: str) -> int:
    """Return when the lease began, 0: never. Raises OSError when the file cannot be read."""
    at_ns = os.stat(path).st_mtime_ns
    return at_ns if at_ns <= since_boot_ns() else 0  # a new file has the time of day until `begin_lease` has set it


def is_lease_over(began: int, *, fence_s: float, grace_s: float) -> bool:
    """Return whether the ranks must be ended now, so that SIGKILL was sent `fence_s` after the lease began."""
    return since_boot_ns() - began >= (fence_s - grace_s - MARGIN_S) * 1e9
