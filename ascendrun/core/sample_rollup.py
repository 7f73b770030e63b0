"""Aggregation of samples of one device, host or rank: mean and peak of a period."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Callable, TypeVar

from ascendrun.core.samples import DeviceSample, HostSample, RankSample

S = TypeVar("S", DeviceSample, HostSample, RankSample)

IDENTITY: Mapping[type[Any], tuple[str, ...]] = {
    DeviceSample: ("host", "device_type", "device"),
    HostSample: ("host",),
    RankSample: ("host", "job", "attempt", "rank"),
}
"""Fields that identify the measured item."""

_ONLY_GROW = frozenset({"link_downs", "ecc_errors"})
_NEWEST = frozenset({"name", "health", "link_up", "pids", "source", "pid", "device", "state"})
"""Fields without a mean: the newest value applies to the entire period."""
_PEAKS = frozenset(
    "utilisation memory_used_bytes power_w temperature_c frequency_mhz link_tx_bytes_s link_rx_bytes_s "
    "cpu load1 disk_read_bytes_s disk_write_bytes_s net_rx_bytes_s net_tx_bytes_s "
    "rss_bytes read_bytes_s write_bytes_s threads".split()
)
_METRICS: Mapping[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind) if field.name != "at_s" and field.name not in names)
    for kind, names in IDENTITY.items()
}


def metrics_of(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a sample's metrics: its fields without `at_s` and IDENTITY."""
    return _METRICS[kind]


def mean_of(samples: Sequence[S], *, at_s: float) -> S:
    """Return the mean of these samples of one device, host or rank, in order of time.

    A metric that is missing in all is None. Values without a mean (strings, flags, counters) are the newest.
    """
    return _combine(samples, _mean, at_s)


def peak_of(samples: Sequence[S], *, at_s: float) -> S:
    """Return the sample with the maximum of each metric of _PEAKS; the others are None."""
    return _combine(samples, lambda name, values: max(values) if values and name in _PEAKS else None, at_s)


def _combine(samples: Sequence[S], combine: Callable[[str, Sequence[Any]], Any], at_s: float) -> S:
    metrics: dict[str, Any] = {
        name: combine(name, [value for sample in samples if (value := getattr(sample, name)) is not None])
        for name in metrics_of(type(samples[0]))
    }
    return dataclasses.replace(samples[-1], at_s=at_s, **metrics)


def _mean(name: str, values: Sequence[Any]) -> Any | None:
    if not values:
        return None
    if name in _NEWEST:
        return values[-1]
    if name in _ONLY_GROW:
        return max(values)
    mean = sum(values) / len(values)
    return round(mean) if all(isinstance(value, int) for value in values) else round(mean, 3)
