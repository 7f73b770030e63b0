"""Figures of `top` in few cells; "-" for None, which is not known."""

from __future__ import annotations

GIB = 1024.0**3


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def figure(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def gib(used: float | None, total: float | None) -> str:
    if used is None and total is None:
        return "-"
    return f"{'-' if used is None else f'{used / GIB:.1f}'}/{'-' if total is None else f'{total / GIB:.0f}'}"


def short(value: float | None) -> str:
    """2.314, 15.3k, 1.2M in few cells; nan as the program said it."""
    if value is None:
        return "-"
    if abs(value) >= 10_000:
        return f"{value / 1e3:.1f}k" if abs(value) < 1e7 else f"{value / 1e6:.1f}M"
    return f"{value:.4g}"


def seconds(value: float | None) -> str:
    """Of a step: two or three digits that tell ranks apart."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 0.9995 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def beside(ratio: float | None) -> str:
    """1.18 as +18%."""
    return "-" if ratio is None else f"{(ratio - 1) * 100:+.0f}%"


def memory(value: float | None) -> str:
    """Of a process: 9.1G, 812M."""
    if value is None:
        return "-"
    return f"{value / GIB:.1f}G" if value >= GIB else f"{value / 1024**2:.0f}M"


def load(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def size(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.0f}G"


def megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.0f}"
