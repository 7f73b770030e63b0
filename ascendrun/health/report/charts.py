"""Long series made short enough to draw, without losing a spike: each stretch keeps its least and its greatest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

POINTS = 1200
"""More than this a chart on a screen cannot show."""

Point = tuple[float, Optional[float]]


@dataclass(frozen=True)
class Line:
    """`name`: what it is of, "" where the chart has one line only. `ys`: one for each x of the chart, None: none."""

    name: str
    ys: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """`name`: loss, step_s, utilisation …; `x`: "time" (UTC seconds) or "step". `is_band`: the lines are the mean, the
    least and the greatest of several devices or hosts."""

    name: str
    x: str
    unit: str
    xs: tuple[float, ...]
    lines: tuple[Line, ...]
    is_band: bool = False

    @property
    def is_load(self) -> bool:
        """A share of something that can be full: drawn from 0 to 100, so that 99.9 % is no valley beside 100 %."""
        return self.name in ("utilisation", "host_cpu")


def thin(points: Sequence[Point], *, most: int = POINTS) -> list[Point]:
    """At most about `most` of the points, which are in order of x: of each stretch the first, the least, the greatest.

    Points without a number stay where they make a gap.
    """
    if len(points) <= most:
        return list(points)
    size = -(-len(points) * 3 // most)
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
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
    """A chart of one line; what is no finite number is a gap. None: nothing to draw."""
    clean = [(at, y if y is not None and math.isfinite(y) else None) for at, y in points]
    if not any(y is not None for _, y in clean):
        return None
    kept = thin(clean)
    return Chart(name, x, unit, tuple(round(at, 3) for at, _ in kept), (Line("", tuple(y for _, y in kept)),))


def make_band(
    name: str, unit: str, series: Iterable[Sequence[Point]], *, until_s: float, since_s: float
) -> Chart | None:
    """Mean, least and greatest over several things, in stretches of equal time; one thing alone is one line.

    A stretch that nothing was measured in is a gap. None: nothing was measured.
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
    low = Line("least", tuple(None if ys is None else min(ys) for ys in columns))
    high = Line("greatest", tuple(None if ys is None else max(ys) for ys in columns))
    return Chart(name, "time", unit, xs, (mean, low, high), is_band=True)


def _usual_step(series: Sequence[Sequence[tuple[float, float]]]) -> float:
    """A little more than what lies between two samples of one thing, so that each stretch has one of each."""
    gaps = sorted(later[0] - earlier[0] for one in series for earlier, later in zip(one, one[1:]))
    return gaps[int(0.9 * (len(gaps) - 1))] * 1.05 if gaps else 0.0


def _with_gaps(numbers: Sequence[int]) -> list[int]:
    """One empty stretch where some are missing: the line breaks there."""
    found: list[int] = []
    for number in numbers:
        if found and number > found[-1] + 1:
            found.append(found[-1] + 1)
        found.append(number)
    return found
