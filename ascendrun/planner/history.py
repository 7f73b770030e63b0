"""Speed of a training from runs that were recorded on the same hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Optional

from ascendrun.planner.cost import Devices, Range
from ascendrun.planner.workload import Workload

SPREAD = 1.4
"""Factor between a run and its repetition: other load, clocks, first steps. Eight of ten repetitions are within it if
the speeds of runs differ by a standard deviation of 18 %; a range above twice its lower end says too little."""
EXTRAPOLATED = 0.35
"""Exponent of the ratio of sizes by which a range becomes wider where the recorded run had another size."""
USED = 5


@dataclass(frozen=True)
class RecordedRun:
    """One run of the same program on the same hosts and kind of device. Rates are of all ranks together. `args`: those
    of its job."""

    job: str
    ranks: int
    trained: float
    tokens_per_s: float
    tokens_per_step: float
    flops_per_token: float
    args: Mapping[str, Any] = field(default_factory=dict)


Estimate = Callable[[RecordedRun], Optional[Workload]]
"""The workload that a plan estimates for a recorded run. None: unknown."""


def with_history(
    work: Workload, devices: Devices, runs: Sequence[RecordedRun], estimate: Estimate = lambda run: None
) -> tuple[Workload, Devices]:
    """Return the same with the speed of the most similar runs, and with their tokens per step where the model and the
    batch are the same size.

    `estimate`: sizes that the plan assumes, as of a vocabulary that is not known yet, are compared with those that it
    assumes for the recorded run: an error of both sides does not make the same training another one.
    """
    if not runs or not work.trained:
        return work, devices
    estimates = {run.job: estimate(run) for run in runs}

    def trained(run: RecordedRun) -> float:
        estimated = estimates[run.job]
        return run.trained if estimated is None else estimated.trained

    def distance(run: RecordedRun) -> float:
        return _ratio(trained(run), work.trained) * _ratio(run.ranks, devices.ranks)

    nearest = min(map(distance, runs))
    similar = [run for run in runs if distance(run) <= nearest * 1.1][-USED:]
    last = similar[-1]
    known, is_same = estimates[last.job], _ratio(trained(last), work.trained) < 1.25
    tokens = last.tokens_per_step * (work.tokens_per_step / known.tokens_per_step if known else 1.0)
    speeds = [run.tokens_per_s / run.ranks * per_token(run, estimates[run.job], work, is_same) for run in similar]
    if is_same and tokens and _ratio(tokens, work.tokens_per_step) < 2.5:
        work = replace(work, tokens_per_step=tokens)
    middle = (min(speeds) * max(speeds)) ** 0.5
    wider = SPREAD * nearest**EXTRAPOLATED
    low, high = min(min(speeds) / 1.1, middle / wider), max(max(speeds) * 1.1, middle * wider)
    return work, replace(devices, recorded=Range(low, high))


def per_token(run: RecordedRun, estimated: Workload | None, work: Workload, is_same: bool) -> float:
    """Return the FLOPs of a token of a recorded run, counted as those of `work` are."""
    if estimated is not None:
        return estimated.flops_per_token
    return work.flops_per_token if is_same else run.flops_per_token


def _ratio(one: float, other: float) -> float:
    return max(one, other) / max(1e-9, min(one, other))
