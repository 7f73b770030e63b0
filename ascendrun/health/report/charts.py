"""Charts of a report. Of a long series each span keeps its minimum and its maximum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ascendrun.core.dataclass import dataclass
from ascendrun.core.measurement import Metric, metrics_of
from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample
from ascendrun.text import Text

POINTS = 1200
"""Maximum number of points; more than a screen can show."""
NAMED = 12
"""Maximum number of charts of evaluations and of metrics with a name that only the program knows."""

Point = tuple[float, Optional[float]]


class LineChart(NamedTuple):
    """A chart of the metrics of rank 0. `field`: of a line. `x`: of times, if the lines have any."""

    name: str
    field: str
    x: str
    unit: str
    title: Text


LINES = (
    LineChart("loss", "loss", "step", "", Text("report.chart-loss", "Loss")),
    LineChart("grad_norm", "grad_norm", "step", "", Text("report.chart-grad-norm", "Gradient norm")),
    LineChart("learning_rate", "lr", "step", "", Text("report.chart-learning-rate", "Learning rate")),
    LineChart("step_s", "step_s", "time", "s", Text("report.chart-step-s", "Step time, s")),
    LineChart("tokens_per_s", "tokens_per_s", "time", "1/s", Text("report.chart-tokens-per-s", "Tokens/s")),
    LineChart("samples_per_s", "samples_per_s", "time", "1/s", Text("report.chart-samples-per-s", "Samples/s")),
    LineChart("mfu", "mfu", "time", "%", Text("report.chart-mfu", "MFU, %")),
)
FIELDS = frozenset(row.field for row in LINES)
DURATIONS = ("_s", "_seconds")
"""Suffixes of the names of evaluation metrics that are durations."""


@dataclass(frozen=True)
class Line:
    """One line. `name`: "" if it is the only line. `ys`: a value for each x of the chart, None: a gap."""

    name: str
    ys: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """One chart. `name`: loss, step_s, utilisation …; `x`: "time" (UTC seconds) or "step".

    `is_band`: the lines are the mean, minimum and maximum of several devices or hosts.
    """

    name: str
    x: str
    unit: str
    xs: tuple[float, ...]
    lines: tuple[Line, ...]
    is_band: bool = False

    @property
    def is_load(self) -> bool:
        """Return whether it is a percentage of a capacity: drawn from 0 to 100, so that 99.9% is not a dip."""
        return self.name in ("utilisation", "host_cpu")


def thin(points: Sequence[Point], *, most: int = POINTS) -> list[Point]:
    """Return about `most` points or fewer, in order of x: first, minimum and maximum of each span.

    Points without a value are kept where they make a gap.
    """
    if len(points) <= most:
        return list(points)
    size = -(-len(points) * 3 // most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        numbers = {index: y for index, (_, y) in enumerate(stretch) if y is not None}
        gaps = [index for index, (_, y) in enumerate(stretch) if y is None][:1]
        chosen = {0, *gaps}
        if numbers:
            chosen |= {min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)}
        kept += [stretch[index] for index in sorted(chosen)]
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def make_chart(name: str, x: str, unit: str, points: Iterable[Point]) -> Chart | None:
    """Return a chart of one line, with gaps for values that are not finite. None: no values."""
    clean = [(at, y if y is not None and math.isfinite(y) else None) for at, y in points]
    if not any(y is not None for _, y in clean):
        return None
    kept = thin(clean)
    return Chart(name, x, unit, tuple(round(at, 3) for at, _ in kept), (Line("", tuple(y for _, y in kept)),))


def make_band(
    name: str, unit: str, series: Iterable[Sequence[Point]], *, until_s: float, since_s: float
) -> Chart | None:
    """Return mean, minimum and maximum over several sources in equal time spans; a line for one source.

    A span without measurements is a gap. None: no measurements.
    """
    known = [[(at, y) for at, y in one if y is not None] for one in series]
    known = [one for one in known if one]
    if not known:
        return None
    gaps = sorted(later[0] - earlier[0] for one in known for earlier, later in zip(one, one[1:]))
    usual_s = gaps[int(0.9 * (len(gaps) - 1))] * 1.05 if gaps else 0.0  # so each span has a sample of each source
    step_s = max((until_s - since_s) / (POINTS / 3), usual_s, 1.0)
    sums: dict[int, list[float]] = {}
    for one in known:
        for at, y in one:
            sums.setdefault(int((at - since_s) // step_s), []).append(y)
    numbers = _with_gaps(sorted(sums))
    xs = tuple(round(since_s + number * step_s, 3) for number in numbers)
    columns = [sums.get(number) for number in numbers]
    mean = Line("mean", tuple(None if ys is None else round(sum(ys) / len(ys), 4) for ys in columns))
    if len(known) == 1:
        return Chart(name, "time", unit, xs, (Line("", mean.ys),))
    low = Line("minimum", tuple(None if ys is None else min(ys) for ys in columns))
    high = Line("maximum", tuple(None if ys is None else max(ys) for ys in columns))
    return Chart(name, "time", unit, xs, (mean, low, high), is_band=True)


def _with_gaps(numbers: Sequence[int]) -> list[int]:
    """Insert an empty span where spans are missing, so that the line has a gap."""
    found: list[int] = []
    for number in numbers:
        if found and number > found[-1] + 1:
            found.append(found[-1] + 1)
        found.append(number)
    return found


def make_charts(
    lines: Mapping[int, Sequence[MetricsLine]],
    devices: Sequence[DeviceSample],
    hosts: Sequence[HostSample],
    span: tuple[float, float] | None,
) -> tuple[Chart, ...]:
    """Return the charts that have values. `lines`: by attempt; `span`: time of the job, None: no charts of samples."""
    has_times = any(line.at_s is not None for several in lines.values() for line in several if is_step(line))
    found = [_line_chart(row, lines, has_times) for row in LINES if row.x == "step"]
    names = sorted(
        {
            name
            for several in lines.values()
            for line in several
            for name in (*line.evals, *line.own)
            if not name.startswith("final_") and not name.endswith(DURATIONS)
        },
        key=lambda name: (not name.startswith("eval_"), name),
    )
    found += [make_chart(name, "step", "", _over_steps(lines, name)) for name in names[:NAMED]]
    found += [_line_chart(row, lines, has_times) for row in LINES if row.x == "time"]
    if span is not None:
        since_s, until_s = span
        found += [
            make_band(chart, row.unit, _by_source(samples, name), since_s=since_s, until_s=until_s)
            for chart, name, row, samples in _bands(devices, hosts)
        ]
    return tuple(chart for chart in found if chart is not None)


def _line_chart(row: LineChart, lines: Mapping[int, Sequence[MetricsLine]], has_times: bool) -> Chart | None:
    if row.x == "time" and has_times:
        return make_chart(row.name, "time", row.unit, _over_time(lines, row.field))
    return make_chart(row.name, "step", row.unit, _over_steps(lines, row.field))


def _bands(
    devices: Sequence[DeviceSample], hosts: Sequence[HostSample]
) -> Iterator[tuple[str, str, Metric, Sequence[Any]]]:
    """Yield the name of each chart of samples, its metric, and the samples."""
    for prefix, kind, samples in (("", DeviceSample, devices), ("host_", HostSample, hosts)):
        for name, row in metrics_of(kind).items():
            if row.chart is not None:
                yield prefix + name, name, row, samples


def is_step(line: MetricsLine) -> bool:
    return line.event is None and line.step is not None and not (line.evals and line.loss is None)


def _over_steps(lines: Mapping[int, Sequence[MetricsLine]], name: str) -> list[Point]:
    """Return values by step; for a repeated step that of the later attempt."""
    found: dict[int, float | None] = {}
    for several in lines.values():
        steps: set[int] = set()
        for line in several:
            value = line.evals.get(name, line.own.get(name)) if name not in FIELDS else _value(line, name)
            if line.step is not None and value is not None:
                if not steps:  # the later steps of earlier attempts were discarded
                    found = {step: kept for step, kept in found.items() if step < line.step}
                steps.add(line.step)
                found[line.step] = value
    return [(float(step), found[step]) for step in sorted(found)]


def _over_time(lines: Mapping[int, Sequence[MetricsLine]], name: str) -> list[Point]:
    points: list[Point] = []
    for several in lines.values():
        mine = [
            (line.at_s, value)
            for line in several
            for value in (_value(line, name),)
            if line.at_s is not None and value is not None
        ]
        if points and mine:
            points.append((points[-1][0], None))
        points += mine
    ordered: list[Point] = []
    for point in points:
        if not ordered or point[0] >= ordered[-1][0]:
            ordered.append(point)
    return ordered


def _value(line: MetricsLine, name: str) -> float | None:
    value: float | None = getattr(line, name) if is_step(line) else None
    return 100 * value if name == "mfu" and value is not None else value


def _by_source(samples: Sequence[Any], name: str) -> list[list[Point]]:
    by_source: dict[tuple[str, Any], list[Point]] = {}
    for one in samples:
        by_source.setdefault((one.host, getattr(one, "device", None)), []).append((one.at_s, getattr(one, name)))
    return list(by_source.values())


TITLES: Mapping[str, Text] = {
    **{row.name: row.title for row in LINES},
    **{name: row.chart for name, _, row, _ in _bands((), ()) if row.chart is not None},
}
"""By the name of the chart; those of evaluation metrics have none."""
