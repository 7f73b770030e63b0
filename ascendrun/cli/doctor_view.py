"""What doctor found, on one screen: what most nodes have, who differs, what is wrong, and the ways out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ascendrun.cli.output import cut, terminal_width, width_of
from ascendrun.cli.sanitise import sanitise_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.health.survey.comparison import DoctorReport, FactRow, FindingView

TITLES = {
    "en": {"FAIL": "FAIL  a job will not be started", "WARN": "WARN  will hurt", "NOTE": "NOTE"},
    "zh": {"FAIL": "FAIL  作业不会启动", "WARN": "WARN  会有影响", "NOTE": "NOTE  提示"},
}
COLORS = {"FAIL": "\x1b[31m", "WARN": "\x1b[33m", "NOTE": "\x1b[36m"}
MOST_EVIDENCE = 3
NAMES_WIDTH = 32


def print_report(report: DoctorReport, *, lang: str, color: bool, wide: bool) -> None:
    width = terminal_width("wide" if wide else None)
    table = _table(report.facts, len(report.hosts) - len(report.unreached))
    lines = [
        *table,
        "",
        *_findings(report.findings, lang, color, wide=wide),
        *_forecast(report, lang),
        _verdict(report, lang),
    ]
    for line in lines:
        sys.stdout.write((line if width is None or "\x1b" in line else cut(line, width)) + "\n")


def _table(rows: Sequence[FactRow], count: int) -> list[str]:
    """One line a fact; those who differ stand behind what most have."""
    from ascendrun.core.names import fold_names

    lines = []
    for row in rows:
        parts = []
        for group in row.groups:
            value = "not known" if group.value is None else sanitise_line(group.value)
            alone = len(group.hosts) == count
            parts.append(value if alone else f"{value}  {fold_names(group.hosts)}")
        lines.append(f"{row.name:<10}{parts[0]}")
        lines.extend(f"{'':<8}! {part}" for part in parts[1:])
    return lines


def _findings(views: Sequence[FindingView], lang: str, color: bool, *, wide: bool) -> list[str]:
    lines: list[str] = []
    previous = None
    for view in views:
        severity = view.severity.value
        if severity != previous:
            title = TITLES[lang][severity]
            lines.append(f"{COLORS[severity]}{title}\x1b[0m" if color else title)
            previous = severity
        lines.extend(_finding(view, wide=wide))
    return [*lines, ""] if lines else []


def _finding(view: FindingView, *, wide: bool) -> list[str]:
    where = sanitise_line(view.nodes) + "  " if view.nodes else ""
    if width_of(where) > NAMES_WIDTH and not wide:
        where = f"{len(view.hosts)} hosts ({cut(view.nodes, NAMES_WIDTH)})  "
    lines = [f"  {where}{sanitise_line(view.says)}  [{view.code}]"]
    shown = view.evidence if wide else view.evidence[:MOST_EVIDENCE]
    lines.extend(f"      | {sanitise_line(text)}" for text in shown)
    if len(shown) < len(view.evidence):
        lines.append(f"      | … {len(view.evidence) - len(shown)} more (-o wide)")
    if view.advice:
        lines.append(f"      > {sanitise_line(view.advice)}")
    return lines


def _forecast(report: DoctorReport, lang: str) -> list[str]:
    """One line, and what it rests on."""
    from ascendrun.health.forecast_text import tell_forecast

    if report.forecast is None:
        return []
    words = tell_forecast(report.forecast, lang)
    return [words.says, f"      {words.advice}"]


def _verdict(report: DoctorReport, lang: str) -> str:
    total, missed = len(report.hosts), len(report.unreached)
    counts = {name: sum(1 for view in report.findings if view.severity.value == name) for name in COLORS}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if lang == "zh":
        reached = f"{total} 个节点" + (f",其中 {missed} 个无法连接" if missed else "")
        return f"{reached}:{said or '一切正常'}({report.checks} 项检查,{report.wall_s:.1f} 秒)"
    reached = f"{total} host{'s' if total != 1 else ''}" + (f", {missed} not reached" if missed else "")
    return f"{reached}: {said or 'all is well'} ({report.checks} checks, {report.wall_s:.1f} s)"


def print_script(report: DoctorReport, hostfile: str | None) -> None:
    """All ways out as a script for a person to read and choose from: commands where there are some, else remarks."""
    import shlex

    from ascendrun.core.names import fold_names

    write = sys.stdout.write
    write("#!/bin/sh\n# Read before you run: each block is the way out of one finding of `ascendrun doctor`.\n")
    hosts_from = f"-H {shlex.quote(hostfile)} " if hostfile else ""
    for view in report.findings:
        where = sanitise_line(view.nodes) or "the cluster"
        write(f"\n# {view.severity.value} {view.code}, {where}: {sanitise_line(view.says)}\n")
        if view.advice:
            write(f"#   {sanitise_line(view.advice)}\n")
        if view.fix is not None:
            on = f"--on {shlex.quote(fold_names(view.hosts))} " if view.hosts else ""
            write(f"ascendrun exec {hosts_from}{on}-- sh -c {shlex.quote(sanitise_line(view.fix))}\n")
