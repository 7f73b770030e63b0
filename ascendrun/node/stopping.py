"""How ranks are ended: which signal goes to whom, and when. Pure: takes the time, sends nothing.

The checkpoint signal goes to each rank's own process only (its data loaders would die of it); TERM and KILL go to
everything the attempt has.
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
"""The other ranks hang in a collective with the one that failed: there is nothing to wait long for."""
TERM_GRACE_S = 2.0
REMAINING_GRACE_S = 1.0
UNKILLABLE_S = 30.0
"""So long after SIGKILL a process that still lives (blocked in the kernel) is reported as remaining."""


def steps_for(by: str, *, now_s: float, signal: str, grace_s: float) -> list[Step]:
    """The way to the end. `by`: head, limit and node ask the program to save first; failure and finished do not."""
    if by == "failure":
        return [Step(now_s, "TERM", True), Step(now_s + min(grace_s, FAILURE_GRACE_S), "KILL", True)]
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
    """The steps still to be taken. A new way replaces the old one only when it kills sooner."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self.reached_kill = False

    @property
    def is_set(self) -> bool:
        return bool(self._steps) or self.reached_kill

    def set(self, steps: Sequence[Step]) -> bool:
        """False when the way already taken is at least as quick."""
        if self.reached_kill or (self._steps and self._steps[-1].at_s <= steps[-1].at_s):
            return False
        self._steps = list(steps)
        return True

    def due(self, now_s: float) -> list[Step]:
        """The steps whose time has come, each once."""
        due = [step for step in self._steps if step.at_s <= now_s]
        self._steps = self._steps[len(due) :]
        self.reached_kill = self.reached_kill or any(step.signal == "KILL" for step in due)
        return due

    def next_s(self) -> float | None:
        """When the next step is due; None: there is none."""
        return self._steps[0].at_s if self._steps else None
