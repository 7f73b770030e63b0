"""Report of doctor on a terminal: common values, nodes that differ, findings with their hints."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.cli.output import cut, terminal_width, width_of, wrap
from ascendrun.cli.sanitise import sanitise_line
from ascendrun.health.forecast import forecast_assumptions, forecast_message
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.health.comparison import DoctorReport, FactRow, FindingView

TITLES: Mapping[str, Text] = {
    "FAIL": Text("doctor.fail", "FAIL  prevents a start"),
    "WARN": Text("doctor.warn", "WARN  risk for a job"),
    "NOTE": Text("doctor.note", "NOTE  information"),
}
LABELS: Mapping[str, Text] = {
    "os": Text("doctor.row-os", "system"),
    "kernel": Text("doctor.row-kernel", "kernel"),
    "memory": Text("doctor.row-memory", "memory"),
    "user": Text("doctor.row-user", "user"),
    "driver": Text("doctor.row-driver", "driver"),
    "firmware": Text("doctor.row-firmware", "firmware"),
    "products": Text("doctor.row-products", "compute"),
    "in nodes": Text("doctor.row-in-nodes", "in node"),
    "in pairs": Text("doctor.row-in-pairs", "in pairs"),
    "latency": Text("doctor.row-latency", "latency"),
}
"""Labels by row name; other rows are names of software and hardware."""
COLORS = {"FAIL": "\x1b[31m", "WARN": "\x1b[33m", "NOTE": "\x1b[36m"}
MOST_EVIDENCE = 3
NAMES_WIDTH = 32
LABEL_WIDTH = 10


def print_report(report: DoctorReport, *, color: bool, wide: bool) -> None:
    width = terminal_width("wide" if wide else None)
    for line in _table(report.facts, len(report.hosts) - len(report.unreached)):
        _print(line if width is None else cut(line, width))
    _print("")
    for line in (*_findings(report.findings, color, wide=wide), *_forecast(report), _summary(report)):
        indent = len(line) - len(line.lstrip(" |>")) + 2
        for piece in [line] if width is None or "\x1b" in line else wrap(line, width, indent=indent):
            _print(piece)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


def _table(rows: Sequence[FactRow], count: int) -> list[str]:
    """Return one line per fact; the nodes that differ follow the most common value."""
    lines = []
    for row in rows:
        parts = []
        for group in row.groups:
            value = str(Text("doctor.unknown", "unknown")) if group.value is None else sanitise_line(str(group.value))
            parts.append(value if len(group.hosts) == count else f"{value}  {fold_hosts(group.hosts)}")
        label = str(LABELS.get(row.name, row.name))
        lines.append(f"{label}{' ' * max(1, LABEL_WIDTH - width_of(label))}{parts[0]}")
        lines.extend(f"{'':<8}! {part}" for part in parts[1:])
    return lines


def _findings(views: Sequence[FindingView], color: bool, *, wide: bool) -> list[str]:
    lines: list[str] = []
    previous = None
    for view in views:
        severity = view.severity.value
        if severity != previous:
            title = str(TITLES[severity])
            lines.append(f"{COLORS[severity]}{title}\x1b[0m" if color else title)
            previous = severity
        lines.extend(_finding(view, wide=wide))
    return [*lines, ""] if lines else []


def _finding(view: FindingView, *, wide: bool) -> list[str]:
    where = sanitise_line(view.nodes) + "  " if view.nodes else ""
    if width_of(where) > NAMES_WIDTH and not wide:
        hosts = Text(
            "doctor.hosts", "{count} hosts ({hosts})", count=len(view.hosts), hosts=cut(view.nodes, NAMES_WIDTH)
        )
        where = f"{hosts}  "
    lines = [f"  {where}{sanitise_line(_without_host(view))}  [{view.code}]"]
    shown = view.evidence if wide else view.evidence[:MOST_EVIDENCE]
    lines.extend(f"      | {sanitise_line(str(text))}" for text in shown)
    if len(shown) < len(view.evidence):
        more = Text("doctor.more-evidence", "… {count} more (-o wide)", count=len(view.evidence) - len(shown))
        lines.append(f"      | {more}")
    if view.hint is not None:
        lines.append(f"      > {sanitise_line(str(view.hint))}")
    return lines


def _without_host(view: FindingView) -> str:
    """Return the message; the host in front of a nested error is not repeated."""
    message = str(view.message)
    for colon in (": ", "：") if len(view.hosts) == 1 else ():
        message = message.replace(f"{colon}{view.hosts[0]}{colon}", colon, 1)
    return message


def _forecast(report: DoctorReport) -> list[str]:
    if report.forecast is None:
        return []
    return [str(forecast_message(report.forecast)), f"      {forecast_assumptions(report.forecast)}"]


def _summary(report: DoctorReport) -> str:
    """Return the last line: hosts, findings by severity, checks and time."""
    counts = {name: sum(1 for view in report.findings if view.severity.value == name) for name in COLORS}
    found = tuple(f"{count} {name}" for name, count in counts.items() if count)
    checked = Text(
        "doctor.checked", "{checks:plural check checks} in {seconds:.1f} s", checks=report.checks, seconds=report.wall_s
    )
    hosts = Text("doctor.host-count", "{count:plural host hosts}", count=len(report.hosts))
    if report.unreached:
        hosts = Text(
            "doctor.host-count-unreached", "{hosts}, {count} unreachable", hosts=hosts, count=len(report.unreached)
        )
    findings = found or Text("doctor.no-findings", "no findings")
    return str(
        Text("doctor.summary", "{hosts}: {findings} ({checked})", hosts=hosts, findings=findings, checked=checked)
    )


def print_script(report: DoctorReport, hostfile: str | Path | None) -> None:
    """Print all fixes as a shell script to read and select from: commands if available, otherwise comments."""
    write = sys.stdout.write
    header = Text("doctor.script-header", "Read before you run: each block fixes one finding of `ascendrun doctor`.")
    write(f"#!/bin/sh\n# {header}\n")
    hosts_from = f"-H {shlex.quote(str(hostfile))} " if hostfile else ""
    for view in report.findings:
        where = sanitise_line(view.nodes) or str(Text("doctor.whole-cluster", "the cluster"))
        write(f"\n# {view.severity.value} {view.code}, {where}: {sanitise_line(str(view.message))}\n")
        if view.hint is not None:
            write(f"#   {sanitise_line(str(view.hint))}\n")
        if view.fix is not None:
            hosts = f"--hosts {shlex.quote(fold_hosts(view.hosts))} " if view.hosts else ""
            write(f"ascendrun exec {hosts_from}{hosts}-- sh -c {shlex.quote(sanitise_line(view.fix))}\n")
