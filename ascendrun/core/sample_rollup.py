"""Aggregation of samples of one device, host or rank: mean and peak of a period."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Callable, TypeVar

from ascendrun.core.measurement import Metric, Rollup, metrics_of
from ascendrun.core.samples import DeviceSample, HostSample, RankSample

S = TypeVar("S", DeviceSample, HostSample, RankSample)


def mean_of(samples: Sequence[S], *, at_s: float) -> S:
    """Return the mean of these samples of one device, host or rank, in order of time.

    A metric that is missing in all is None.
    """
    return _combine(samples, _mean, at_s)


def peak_of(samples: Sequence[S], *, at_s: float) -> S:
    """Return the sample with the maximum of each metric whose maximum is kept; the others are None."""
    return _combine(samples, lambda row, values: max(values) if values and row.rollup is Rollup.MEAN else None, at_s)


def _combine(samples: Sequence[S], combine: Callable[[Metric, Sequence[Any]], Any], at_s: float) -> S:
    metrics: dict[str, Any] = {
        name: combine(row, [value for sample in samples if (value := getattr(sample, name)) is not None])
        for name, row in metrics_of(type(samples[0])).items()
    }
    return dataclasses.replace(samples[-1], at_s=at_s, **metrics)


def _mean(row: Metric, values: Sequence[Any]) -> Any | None:
    if not values:
        return None
    if row.rollup is Rollup.NEWEST:
        return values[-1]
    if row.rollup is Rollup.GROWS:
        return max(values)
    mean = sum(values) / len(values)
    return round(mean) if all(isinstance(value, int) for value in values) else round(mean, 3)
