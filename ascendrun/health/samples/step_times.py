"""The time of each step from a rank's metrics lines, comparable between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.metrics import MetricsLine


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank. `at_s`: its end, by the head node's clock, with uncertainty `error_s` (None: never
    measured, so not comparable between hosts). `step_s`: the complete step, which in synchronous training is equal
    on all ranks; `own_s`: without waiting for other ranks; `data_s`: waiting for input. None: not reported."""

    step: int
    at_s: float | None = None
    step_s: float | None = None
    own_s: float | None = None
    data_s: float | None = None
    error_s: float | None = None


def make_step_times(
    lines: Iterable[MetricsLine],
    *,
    to_head_s: Callable[[float], float] = lambda at_s: at_s,
    error_s: float | None = None,
) -> tuple[StepTimes, ...]:
    """Return the steps of one rank in order. `to_head_s`, `error_s`: its host's clock, as in HostClock.

    If a line has no step time, it is the time since the previous line, divided by the steps.
    """
    found: list[StepTimes] = []
    for line in lines:
        if line.event is not None or line.step is None or (line.evals and line.loss is None):
            continue
        at_s = None if line.at_s is None else to_head_s(line.at_s)
        step_s = line.step_s if line.step_s else _since(found[-1] if found else None, line.step, at_s)
        own_s = None if step_s is None or line.comm_s is None else max(0.0, step_s - line.comm_s)
        found.append(StepTimes(line.step, at_s, step_s, own_s, line.data_s, error_s))
    return tuple(found)


def _since(before: StepTimes | None, step: int, at_s: float | None) -> float | None:
    if before is None or before.at_s is None or at_s is None or step <= before.step or at_s <= before.at_s:
        return None
    return (at_s - before.at_s) / (step - before.step)
