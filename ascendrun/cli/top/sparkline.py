"""A row of small bars for a terminal: how a figure went."""

from __future__ import annotations

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], *, low: float | None = None, high: float | None = None) -> str:
    """One character a value; a gap for None. The scale goes from `low` to `high`, None: of the values themselves."""
    told = [value for value in values if value is not None]
    if not told:
        return " " * len(values)
    bottom, top = min(told) if low is None else low, max(told) if high is None else high
    span = top - bottom

    def bar(value: float) -> str:
        part = (value - bottom) / span if span > 0 else 0.5 if bottom > 0 else 0.0
        return BARS[min(len(BARS) - 1, max(0, int(part * len(BARS))))]

    return "".join(" " if value is None else bar(value) for value in values)


def in_buckets(
    points: Sequence[tuple[float, float | None]], *, since_s: float, until_s: float, count: int
) -> list[float | None]:
    """The mean of the points (at_s, value) in each of `count` equal stretches of time; None where there is none."""
    sums, counts = [0.0] * count, [0] * count
    width = (until_s - since_s) / count
    for at_s, value in points:
        if value is None or not since_s <= at_s < until_s:
            continue
        index = min(count - 1, int((at_s - since_s) / width))
        sums[index] += value
        counts[index] += 1
    return [total / number if number else None for total, number in zip(sums, counts)]
