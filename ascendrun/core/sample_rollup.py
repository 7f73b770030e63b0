"""Many samples of one thing as one: the mean of a stretch of time, and its peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ascendrun.core.samples import DeviceSample, HostSample, RankSample

S = TypeVar("S", DeviceSample, HostSample, RankSample)

IDENTITY: Mapping[type[Any], tuple[str, ...]] = {
    DeviceSample: ("host", "device_type", "device"),
    HostSample: ("host",),
    RankSample: ("host", "job", "attempt", "rank"),
}
"""What names the thing that was measured."""

_ONLY_GROW = frozenset({"link_downs", "ecc_errors"})
_NEWEST = frozenset({"name", "health", "link_up", "pids", "source", "pid", "device", "state"})
"""What has no mean: the newest word that was said stands for the whole stretch."""
_PEAKS: Mapping[type[Any], frozenset[str]] = {
    DeviceSample: frozenset(
        {
            "utilisation",
            "memory_used_bytes",
            "power_w",
            "temperature_c",
            "frequency_mhz",
            "link_tx_bytes_s",
            "link_rx_bytes_s",
        }
    ),
    HostSample: frozenset(
        {
            "cpu",
            "load1",
            "memory_used_bytes",
            "disk_read_bytes_s",
            "disk_write_bytes_s",
            "net_rx_bytes_s",
            "net_tx_bytes_s",
        }
    ),
    RankSample: frozenset({"cpu", "rss_bytes", "read_bytes_s", "write_bytes_s", "threads"}),
}


_FIGURES: Mapping[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind) if field.name != "at_s" and field.name not in names)
    for kind, names in IDENTITY.items()
}


def figures_of(kind: type[Any]) -> tuple[str, ...]:
    """The names of a sample's figures: its fields without `at_s` and what names the thing."""
    return _FIGURES[kind]


def mean_of(samples: Sequence[S], *, at_s: float) -> S:
    """One sample for all of these, which are of one thing and in order of time: means of what was measured.

    A figure that none of them has stays None. What cannot be averaged (words, flags, counters) is the newest.
    """
    figures: dict[str, Any] = {
        name: _mean(name, [value for value in (getattr(one, name) for one in samples) if value is not None])
        for name in figures_of(type(samples[0]))
    }
    return dataclasses.replace(samples[-1], at_s=at_s, **figures)


def peak_of(samples: Sequence[S], *, at_s: float) -> S:
    """The same with the highest of each figure that has a peak worth knowing; every other is None."""
    figures: dict[str, Any] = {}
    for name in figures_of(type(samples[0])):
        values = [value for value in (getattr(one, name) for one in samples) if value is not None]
        figures[name] = max(values) if values and name in _PEAKS[type(samples[0])] else None
    return dataclasses.replace(samples[-1], at_s=at_s, **figures)


def _mean(name: str, values: Sequence[Any]) -> Any | None:
    if not values:
        return None
    if name in _NEWEST:
        return values[-1]
    if name in _ONLY_GROW:
        return max(values)
    mean = sum(values) / len(values)
    return round(mean) if all(isinstance(value, int) for value in values) else round(mean, 3)
