"""Schedule for ending ranks: signals, targets and times. Pure: receives the time, sends nothing.

The checkpoint signal goes to each rank's own process only (its data loaders would die of it); TERM and KILL go to all
processes of the attempt. ABRT, at which Python prints all stacks, goes to the processes of ranks that handle it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple, Sequence

    class Step(NamedTuple):
        """At `at_s` (monotonic) send `signal` to everything, or to the ranks' own processes only."""

        at_s: float
        signal: str
        everything: bool
else:
    from collections import namedtuple

    Step = namedtuple("Step", "at_s signal everything")

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
    if by == "hung":
        return [
            Step(now_s, "ABRT", False),
            Step(now_s + grace_s, "TERM", True),
            Step(now_s + grace_s + TERM_GRACE_S, "KILL", True),
        ]
    if by == "finished":
        return [Step(now_s, "TERM", True), Step(now_s + REMAINING_GRACE_S, "KILL", True)]
    return [
        Step(now_s, signal, False),
        Step(now_s + grace_s, "TERM", True),
        Step(now_s + grace_s + TERM_GRACE_S, "KILL", True),
    ]


def kill_now(now_s: float) -> list[Step]:
    return [Step(now_s, "KILL", True)]


class Ladder:
    """The remaining steps. New steps replace the old only when they kill sooner."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self.reached_kill = False

    @property
    def is_set(self) -> bool:
        return bool(self._steps) or self.reached_kill

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
