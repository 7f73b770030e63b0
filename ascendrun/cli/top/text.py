"""`top` as plain lines: totals, jobs, every device and the rank on it, and the hosts without figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ascendrun.cli.output import cut, describe_memory
from ascendrun.cli.top.columns import HOST_COLUMNS, JOB_COLUMNS, ROW_COLUMNS, Line, TopColumn, clean, lay_out
from ascendrun.cli.top.words import word
from ascendrun.core.errors import AscendrunError
from ascendrun.health.top.rows import HostLine, IdleHosts, fold_idle, rows_by_host
from ascendrun.health.top.view import HostRow, TopView, Totals

RED, YELLOW, DIM, BOLD, END = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


def top_lines(
    view: TopView,
    *,
    lang: str,
    width: int | None,
    color: bool = False,
    is_wide: bool = False,
    most_rows: int | None = None,
    by_host: bool = False,
) -> list[str]:
    """`width`: cells of the terminal, None: nothing is cut. `most_rows`: so many rows, None: all.
    `by_host`: a line a host, not a device."""
    lines = [f"{clock(view.at_s)}  {totals_line(view.totals, lang)}"]
    if view.jobs:
        lines += ["", *_table(view.jobs, JOB_COLUMNS, lang, width, color=color, is_wide=is_wide)]
    rows: Sequence[Any] = rows_by_host(view.rows, view.hosts) if by_host else fold_idle(view.rows)
    shown = rows if most_rows is None else rows[:most_rows]
    if rows:
        columns, style = (HOST_COLUMNS, host_style) if by_host else (ROW_COLUMNS, row_style)
        lines += ["", *_table(shown, columns, lang, width, color=color, is_wide=is_wide, style=style)]
    if len(shown) < len(rows):
        lines.append(word(lang, "more-rows", n=len(rows) - len(shown)))
    if not rows and not view.hosts:
        lines += ["", word(lang, "nothing")]
    lines += _without(view.hosts, lang)
    return lines if width is None else [line if "\x1b" in line else cut(line, width) for line in lines]


def totals_line(totals: Totals, lang: str) -> str:
    """12 hosts · 96 devices: 80 busy, 16 idle · 1 not well · 4.1/6.0 TiB · 28.4 kW."""
    parts = [word(lang, "host1") if totals.hosts == 1 else word(lang, "hosts", n=totals.hosts)]
    if totals.hosts_without:
        parts.append(word(lang, "no-figures-of", n=totals.hosts_without))
    if totals.bad:
        parts.append(word(lang, "bad", n=totals.bad))
    if totals.devices:
        parts.append(word(lang, "devices", n=totals.devices, busy=totals.busy, idle=totals.devices - totals.busy))
    if totals.unknown:
        parts.append(word(lang, "unknown", n=totals.unknown))
    if totals.memory_total_bytes is not None:
        parts.append(f"{describe_memory(totals.memory_used_bytes)} / {describe_memory(totals.memory_total_bytes)}")
    if totals.power_w is not None:
        parts.append(f"{totals.power_w / 1000:.1f} kW" if totals.power_w >= 1000 else f"{totals.power_w:.0f} W")
    return " · ".join(parts)


def what_failed(error: Exception) -> str:
    """In a line; of a fault of ours also its kind."""
    return clean(str(error) if isinstance(error, AscendrunError) else f"{type(error).__name__}: {error}")


def clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def row_style(line: Line) -> str | None:
    """red: not well; yellow: slow or a stranger's process; dim: idle, or figures too old to trust."""
    if isinstance(line, IdleHosts):
        return "dim"
    if {"health", "link", "silent"} & set(line.problems):
        return "red"
    if {"slow", "foreign"} & set(line.problems):
        return "yellow"
    return "dim" if "stale" in line.problems or line.job is None else None


def host_style(line: HostLine) -> str | None:
    """That of its worst row."""
    styles = {row_style(row) for row in line.rows}
    return next((one for one in ("red", "yellow", None, "dim") if one in styles), None)


COLORS = {"red": RED, "yellow": YELLOW, "dim": DIM, "bold": BOLD}


def _table(
    rows: Sequence[Any],
    columns: Sequence[TopColumn],
    lang: str,
    width: int | None,
    *,
    color: bool,
    is_wide: bool,
    style: Callable[[Any], str | None] | None = None,
) -> list[str]:
    laid = lay_out(columns, rows, lang, width, is_wide=is_wide)

    def line(text: str, paint: str | None) -> str:
        text = text if width is None else cut(text, width)
        return f"{COLORS[paint]}{text}{END}" if color and paint else text

    return [
        line(laid.header, "bold"),
        *(line(laid.text(index), style(row) if style else None) for index, row in enumerate(rows)),
    ]


def _without(hosts: Sequence[HostRow], lang: str) -> list[str]:
    """Hosts of which there are no figures, those with one reason in one line."""
    from ascendrun.core.names import fold_names

    reasons: dict[str, list[str]] = {}
    for host in hosts:
        if host.why is not None:
            reasons.setdefault(reason(host, lang), []).append(host.host)
    if not reasons:
        return []
    return ["", word(lang, "without"), *(f"  {fold_names(names)}  {why}" for why, names in reasons.items())]


def reason(host: HostRow, lang: str) -> str:
    """Why there are no figures of a host, with what it said itself."""
    said = word(lang, f"why-{host.why}")
    return f"{said}: {clean(host.detail)}" if host.detail else said
