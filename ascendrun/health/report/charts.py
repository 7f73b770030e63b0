"""Downsampling of long series for charts: each span keeps its minimum and its maximum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Optional

from ascendrun.core.dataclass import dataclass

POINTS = 1200
"""Maximum number of points; more than a screen can show."""

Point = tuple[float, Optional[float]]


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
        numbers = [index for index, (_, y) in enumerate(stretch) if y is not None]
        gaps = [index for index, (_, y) in enumerate(stretch) if y is None][:1]
        chosen = {0, *gaps}
        if numbers:
            chosen |= {
                min(numbers, key=lambda index: _y(stretch, index)),
                max(numbers, key=lambda index: _y(stretch, index)),
            }
        kept += [stretch[index] for index in sorted(chosen)]
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _y(stretch: Sequence[Point], index: int) -> float:
    value = stretch[index][1]
    assert value is not None
    return value


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
    step_s = max((until_s - since_s) / (POINTS / 3), _usual_step(known), 1.0)
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


def _usual_step(series: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return slightly more than the sampling interval of a source, so that each span has a sample of each."""
    gaps = sorted(later[0] - earlier[0] for one in series for earlier, later in zip(one, one[1:]))
    return gaps[int(0.9 * (len(gaps) - 1))] * 1.05 if gaps else 0.0


def _with_gaps(numbers: Sequence[int]) -> list[int]:
    """Insert an empty span where spans are missing, so that the line has a gap."""
    found: list[int] = []
    for number in numbers:
        if found and number > found[-1] + 1:
            found.append(found[-1] + 1)
        found.append(number)
    return found
