"""Values of `top` as short texts, "-" for unknown, and series as sparklines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ascendrun.cli.output import short_number
from ascendrun.text import Text

GIB = 1024.0**3
BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None, unit: str = "", *, scale: float = 1.0, digits: int = 0) -> str:
    return "-" if value is None else f"{value / scale:.{digits}f}{unit}"


def gib(used: float | None, total: float | None) -> str:
    if used is None and total is None:
        return "-"
    return f"{'-' if used is None else f'{used / GIB:.1f}'}/{'-' if total is None else f'{total / GIB:.0f}'}"


def seconds(value: float) -> str:
    """Return a step time with two or three significant digits."""
    return f"{value:.3f}" if value < 0.9995 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def relative(ratio: float | None) -> str:
    """Return 1.18 as +18%."""
    return "-" if ratio is None else f"{(ratio - 1) * 100:+.0f}%"


def memory(value: float) -> str:
    """Return an amount of memory: 9.1G, 812M."""
    if value < GIB:
        return f"{value / 1024**2:.0f}M"
    return f"{value / GIB:.1f}G" if value < 100 * GIB else f"{value / GIB:.0f}G"


def describe(value: Any, unit: str) -> str:
    """Return the value of a metric in its unit; "-" for unknown."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(LINK_UP if value else LINK_DOWN)
    if isinstance(value, str):
        return value
    return FORMATS[unit](value) if unit in FORMATS else number(value) if isinstance(value, int) else short_number(value)


def describe_pair(value: float | None, beside: float | None, unit: str) -> str:
    """Return used/total, sent/received, done/all."""
    if unit == "bytes":
        return gib(value, beside)
    if unit == "bytes/s":
        return "-" if value is None and beside is None else f"{describe(value, unit)}/{describe(beside, unit)}"
    return describe(value, unit) if beside is None else f"{describe(value, unit)}/{describe(beside, unit)}"


LINK_UP, LINK_DOWN = Text("top.link-up", "up"), Text("top.link-down", "DOWN")
FORMATS: Mapping[str, Callable[..., str]] = {
    "%": lambda value: number(value, "%"),
    "ratio": lambda value: number(value * 100, "%"),
    "W": lambda value: number(value, "W"),
    "°C": lambda value: number(value, "C"),
    "MHz": number,
    "s": seconds,
    "processes": lambda value: number(value, digits=1),
    "bytes": memory,
    "bytes/s": lambda value: number(value, scale=1e6),
}
"""By unit; other units as short numbers."""


def bar(percent: float, width: int = 5) -> str:
    """Return a bar of `width` characters."""
    eighths = round(max(0.0, min(100.0, percent)) / 100 * width * 8)
    return ("█" * (eighths // 8) + "▏▎▍▌▋▊▉"[eighths % 8 - 1 : eighths % 8]).ljust(width)


def sparkline(values: Sequence[float | None], *, low: float | None = None, high: float | None = None) -> str:
    """Return one bar per value, a gap for None. The scale is `low` to `high`, None: of the values themselves."""
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    bottom, top = min(known) if low is None else low, max(known) if high is None else high
    span = top - bottom

    def bar(value: float) -> str:
        part = (value - bottom) / span if span > 0 else 0.5 if bottom > 0 else 0.0
        return BARS[min(len(BARS) - 1, max(0, int(part * len(BARS))))]

    return "".join(" " if value is None else bar(value) for value in values)


def in_buckets(
    points: Sequence[tuple[float, float | None]], *, since_s: float, until_s: float, count: int
) -> list[float | None]:
    """Return the mean of the points (at_s, value) in each of `count` equal time spans; None for an empty span."""
    sums, counts = [0.0] * count, [0] * count
    width = (until_s - since_s) / count
    for at_s, value in points:
        if value is None or not since_s <= at_s < until_s:
            continue
        index = min(count - 1, int((at_s - since_s) / width))
        sums[index] += value
        counts[index] += 1
    return [total / items if items else None for total, items in zip(sums, counts)]
