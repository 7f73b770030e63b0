"""Speed of a training from runs that were recorded on the same hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ascendrun.planner.cost import Devices, Range
from ascendrun.planner.workload import Workload

SPREAD = 1.35
"""Factor between a run and its repetition: other load, clocks, first steps."""
EXTRAPOLATED = 0.35
"""Exponent of the ratio of sizes by which a range becomes wider where the recorded run had another size."""
USED = 5


@dataclass(frozen=True)
class RecordedRun:
    """One run of the same program on the same hosts and kind of device. Rates are of all ranks together."""

    job: str
    ranks: int
    trained: float
    tokens_per_s: float
    tokens_per_step: float
    flops_per_token: float


def with_history(work: Workload, devices: Devices, runs: Sequence[RecordedRun]) -> tuple[Workload, Devices]:
    """Return the same with the speed of the most similar runs, and with their tokens per step where the model and the
    batch are the same size."""
    if not runs or not work.trained:
        return work, devices

    def distance(run: RecordedRun) -> float:
        return _ratio(run.trained, work.trained) * _ratio(run.ranks, devices.ranks)

    nearest = min(map(distance, runs))
    similar = [run for run in runs if distance(run) <= nearest * 1.1][-USED:]
    last = similar[-1]
    is_same = _ratio(last.trained, work.trained) < 1.25
    per_token = work.flops_per_token if is_same else last.flops_per_token
    if is_same and last.tokens_per_step and _ratio(last.tokens_per_step, work.tokens_per_step) < 2.5:
        work = replace(work, tokens_per_step=last.tokens_per_step)
    speeds = [run.tokens_per_s / run.ranks * per_token for run in similar]
    middle = (min(speeds) * max(speeds)) ** 0.5
    wider = SPREAD * nearest**EXTRAPOLATED
    low, high = min(min(speeds) / 1.1, middle / wider), max(max(speeds) * 1.1, middle * wider)
    return work, replace(devices, recorded=Range(low, high))


def _ratio(one: float, other: float) -> float:
    return max(one, other) / max(1e-9, min(one, other))
