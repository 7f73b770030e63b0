"""The table of metrics: how each measured value is stored, summed up, exported and shown.

A row is a field of a dataclass with `metric(...)` as its default. The columns of the sample store, the mean of a
period, the Prometheus series, the columns and the detail page of `top`, the charts of a report and
docs/measurements.md follow from it. A new metric is one row, and the Chinese of its titles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from enum import Enum
from typing import Any, Callable, NamedTuple, TypeVar

from ascendrun.text import Text


class Rollup(Enum):
    """What a sum of several samples has of a metric. Only of MEAN the maximum is kept too."""

    MEAN = "mean and maximum"
    LEVEL = "mean"
    NEWEST = "newest"
    GROWS = "maximum"


class HostColumn(NamedTuple):
    """The column in the table of hosts. `fold`: how the values of its devices become one: each, sum, max, worst, down.
    None: the value is of the host itself."""

    key: str
    title: Text | str
    weight: int
    fold: str | None = None
    is_right: bool = True


class Column(NamedTuple):
    """The column of `top`. `weight`: a narrow terminal omits the lowest first; 0 is for -o wide only. `job_weight`: in
    the table of jobs. `sorts`: rows can be sorted by it."""

    key: str
    title: Text | str
    weight: int
    is_right: bool = True
    job_weight: int = 0
    sorts: bool = False


class Sign(NamedTuple):
    """What a metric shows of a slow rank. `cause`: a StragglerCause. `is_odd`: whether its median here is odd, compared
    with that elsewhere (None: unknown). `text`: with {here} and {others}, in units of `size`; `alone`: without others.
    """

    cause: str
    is_odd: Callable[[float, float | None], bool]
    text: Text
    alone: Text | None = None
    size: float = 1.0


class Metric(NamedTuple):
    """A metric. `meaning`: for the docs and Prometheus. `unit`: of the stored value, "" for a number without.

    `prometheus`: names of its series; those that begin with npu_ are npu-exporter's, for NPUs only, in its units.
    `beside`: the metric that is shown after it, used/total. `detail`: its name on the detail page of `top`, None: it is
    not there. `scale`: lowest and highest value of its history there, None: of the values, or of `beside`. `chart`: its
    title in a report. `sign`: of a slow rank, None: it is not compared.
    """

    meaning: str
    unit: str = ""
    rollup: Rollup = Rollup.MEAN
    prometheus: tuple[str, ...] = ()
    column: Column | None = None
    host_column: HostColumn | None = None
    beside: str | None = None
    detail: Text | str | None = None
    scale: tuple[float | None, float | None] = (0.0, None)
    chart: Text | None = None
    sign: Sign | None = None


def metric(meaning: str, unit: str = "", **options: Any) -> Any:
    """Return the default of a field that is a metric: None, not measured."""
    return field(default=None, metadata={"metric": Metric(meaning, unit, **options)})


def metrics_of(kind: type[Any]) -> Mapping[str, Metric]:
    """Return the metrics of a dataclass by the names of their fields, in order."""
    if kind not in _metrics:
        _metrics[kind] = {one.name: one.metadata["metric"] for one in fields(kind) if "metric" in one.metadata}
    return _metrics[kind]


_metrics: dict[type[Any], Mapping[str, Metric]] = {}

S = TypeVar("S")


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
    newest: Any = samples[-1]
    return replace(newest, at_s=at_s, **metrics)  # type: ignore[no-any-return]


def _mean(row: Metric, values: Sequence[Any]) -> Any | None:
    if not values:
        return None
    if row.rollup is Rollup.NEWEST:
        return values[-1]
    if row.rollup is Rollup.GROWS:
        return max(values)
    mean = sum(values) / len(values)
    return round(mean) if all(isinstance(value, int) for value in values) else round(mean, 3)
