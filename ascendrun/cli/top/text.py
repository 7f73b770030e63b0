"""`top` as plain lines, printed once or redrawn in place: totals, jobs, devices, hosts without data."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ascendrun.cli.context import CliContext
from ascendrun.cli.output import cut, describe_memory
from ascendrun.cli.top.columns import HOST_COLUMNS, JOB_COLUMNS, ROW_COLUMNS, Line, TopColumn, clean, lay_out
from ascendrun.core.errors import AscendrunError
from ascendrun.health.top import view as model
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts, grouped

if TYPE_CHECKING:
    from ascendrun.cluster import TopSource

T = TypeVar("T")
COLORS = {"red": "\x1b[31m", "yellow": "\x1b[33m", "dim": "\x1b[2m", "bold": "\x1b[1m"}
END = "\x1b[0m"
HOME_AND_CLEAR = "\x1b[H\x1b[J"
ALTERNATE_SCREEN, MAIN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
NO_ROWS = Text("top.no-rows", "nothing to show: no live job, no samples, no hosts named")
WHY: Mapping[str, Text] = {
    "unreachable": Text("top.why-unreachable", "unreachable"),
    "no-reply": Text("top.why-no-reply", "no reply"),
    "starting": Text("top.why-starting", "the job is not running there yet"),
    "no-samples": Text("top.why-no-samples", "no samples yet"),
    "not-queried": Text("top.why-not-queried", "no job, not queried (name the host, or set --hostfile)"),
}


def top_lines(
    view: model.TopView,
    *,
    width: int | None,
    color: bool = False,
    is_wide: bool = False,
    most_rows: int | None = None,
    by_host: bool = False,
) -> list[str]:
    """Return the view. `width`: of the terminal, None: nothing is truncated. `most_rows`: maximum rows, None: all."""
    lines = [f"{clock(view.at_s)}  {totals_line(view.totals)}"]
    if view.jobs:
        lines += ["", *_table(view.jobs, JOB_COLUMNS, width, color=color, is_wide=is_wide)]
    rows: Sequence[Any] = model.rows_by_host(view.rows, view.hosts) if by_host else model.fold_idle(view.rows)
    shown = rows if most_rows is None else rows[:most_rows]
    if rows:
        columns, style = (HOST_COLUMNS, host_style) if by_host else (ROW_COLUMNS, row_style)
        lines += ["", *_table(shown, columns, width, color=color, is_wide=is_wide, style=style)]
    if len(shown) < len(rows):
        hint = "… {n:plural row rows} more (use --job, HOSTS or --problems, or enlarge the terminal)"
        lines.append(str(Text("top.more-rows", hint, n=len(rows) - len(shown))))
    if not rows and not view.hosts:
        lines += ["", str(NO_ROWS)]
    lines += _without_data(view.hosts)
    return lines if width is None else [line if "\x1b" in line else cut(line, width) for line in lines]


def run_plain(
    ctx: CliContext, source: TopSource, choice: model.Choice, order: model.Order, *, interval_s: float
) -> int:
    """Print the view in place every `interval_s` until ^C; used without textual."""
    color = ctx.has_color(sys.stdout)
    pause = threading.Event()
    no_keys = Text("top.no-keys", "plain view; for the interactive one: pip install 'ascendrun[tui]'. ^C quits")
    sys.stdout.write(ALTERNATE_SCREEN)
    try:
        while True:
            view = model.arrange(source.refresh(now_s=time.time()), choice, order)
            width, height = shutil.get_terminal_size()
            room = max(1, height - 8 - len(view.jobs) - min(4, sum(1 for host in view.hosts if host.why)))
            lines = top_lines(view, width=width, color=color, most_rows=room, by_host=order.by_host)[: height - 2]
            lines.append(cut(str(no_keys), width))
            sys.stdout.write(HOME_AND_CLEAR + "\r\n".join(lines))
            sys.stdout.flush()
            pause.wait(interval_s)
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(MAIN_SCREEN)
        sys.stdout.flush()


def totals_line(totals: model.Totals) -> str:
    """Return 12 hosts · 96 devices: 80 busy, 16 idle · 1 unhealthy · 4.1/6.0 TiB · 28.4 kW."""
    parts: list[Text | str] = [Text("top.total-hosts", "{n:plural host hosts}", n=totals.hosts)]
    if totals.hosts_without_data:
        parts.append(Text("top.total-no-data", "{n} without data", n=totals.hosts_without_data))
    if totals.unhealthy:
        parts.append(Text("top.total-unhealthy", "{n} unhealthy", n=totals.unhealthy))
    if totals.devices:
        parts.append(
            Text(
                "top.total-devices",
                "{n:plural device devices}: {busy} busy, {idle} idle",
                n=totals.devices,
                busy=totals.busy,
                idle=totals.devices - totals.busy,
            )
        )
    if totals.unknown:
        parts.append(Text("top.total-unknown", "health of {n} unknown", n=totals.unknown))
    if totals.memory_total_bytes is not None:
        parts.append(f"{describe_memory(totals.memory_used_bytes)} / {describe_memory(totals.memory_total_bytes)}")
    if totals.power_w is not None:
        parts.append(f"{totals.power_w / 1000:.1f} kW" if totals.power_w >= 1000 else f"{totals.power_w:.0f} W")
    return " · ".join(map(str, parts))


def attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return (result, None), or (None, message): what is read at an interval may succeed the next time.

    The message is one line, with the class of the error unless it is an AscendrunError.
    """
    try:
        return call(), None
    except Exception as error:
        return None, clean(str(error) if isinstance(error, AscendrunError) else f"{type(error).__name__}: {error}")


def clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def row_style(line: Line) -> str | None:
    """Return red: unhealthy; yellow: slow or with an external process; dim: idle or stale."""
    if isinstance(line, model.IdleHosts):
        return "dim"
    if {"health", "link", "unreachable"} & set(line.problems):
        return "red"
    if {"slow", "external"} & set(line.problems):
        return "yellow"
    return "dim" if "stale" in line.problems or line.job is None else None


def host_style(line: model.HostLine) -> str | None:
    """Return the style of its worst row."""
    styles = {row_style(row) for row in line.rows}
    return next((style for style in ("red", "yellow", None, "dim") if style in styles), None)


def _table(
    rows: Sequence[Any],
    columns: Sequence[TopColumn],
    width: int | None,
    *,
    color: bool,
    is_wide: bool,
    style: Callable[[Any], str | None] | None = None,
) -> list[str]:
    laid = lay_out(columns, rows, width, is_wide=is_wide)

    def line(text: str, paint: str | None) -> str:
        text = text if width is None else cut(text, width)
        return f"{COLORS[paint]}{text}{END}" if color and paint else text

    return [
        line(laid.header, "bold"),
        *(line(laid.text(index), style(row) if style else None) for index, row in enumerate(rows)),
    ]


def _without_data(hosts: Sequence[model.HostRow]) -> list[str]:
    """Return hosts without data; hosts with the same reason share a line."""
    reasons = grouped((why_no_data(host), host.host) for host in hosts if host.why is not None)
    if not reasons:
        return []
    header = str(Text("top.without-data", "without data:"))
    return ["", header, *(f"  {fold_hosts(names)}  {why}" for why, names in reasons.items())]


def why_no_data(host: model.HostRow) -> str:
    """Return why a host has no data, with the observed error."""
    why = WHY[host.why or "no-samples"]
    if not host.detail:
        return str(why)
    return str(Text("top.why-detail", "{why}: {detail}", why=why, detail=clean(str(host.detail))))
