"""doctor: check every node, compare them, and show fixes. env: the environment of a rank on each node."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ascendrun.cli.context import CliContext, report_unreached
from ascendrun.cli.options import Target, UsageError, check_alone, cli_command, output_option, target_options
from ascendrun.cli.output import cut, print_record, sanitise_line, terminal_width, width_of, wrap
from ascendrun.core.findings import SEVERITIES, Severity
from ascendrun.core.hosts import Host
from ascendrun.health.comparison import DoctorReport, FactRow, FindingView, add_deep
from ascendrun.health.env_view import NOT_SET, EnvReport, EnvRow
from ascendrun.health.forecast import forecast_assumptions, forecast_message
from ascendrun.output_file import write_bytes
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts


@cli_command("doctor")
@target_options
@click.option("--engine", metavar="NAME", help="Examine nodes that this engine of the settings grants, and the engine.")
@click.option("--device-type", type=click.Choice(["npu", "cuda", "cpu"]), help="Device type of the nodes.")
@click.option("--check-path", "paths", multiple=True, metavar="PATH", help="Require PATH on all nodes, with one size.")
@click.option("--quick", is_flag=True, help="Run only the checks that run before every start.")
@click.option("--deep", is_flag=True, help="Also measure collectives between hosts and matrix products on devices.")
@click.option("--all-pairs", is_flag=True, help="Ping between all pairs of NPU ports instead of a ring.")
@click.option(
    "--fail-on",
    type=click.Choice(["fail", "warn", "note"]),
    default="fail",
    help="Exit with 3 for findings of this severity or above.  [default: fail]",
)
@click.option("--forecast", is_flag=True, help="Also show the expected cost of failures with this number of nodes.")
@click.option("--fix-script", is_flag=True, help="Print the fixes as a shell script; run nothing.")
@output_option
def command(
    ctx: CliContext,
    target: Target,
    engine: str | None,
    device_type: str | None,
    paths: tuple[str, ...],
    quick: bool,
    deep: bool,
    all_pairs: bool,
    fail_on: str,
    forecast: bool,
    fix_script: bool,
    output: str | None,
) -> int:
    """Check all hosts in parallel, compare them, and show findings with fixes.

    With a job FILE the checks use its hosts, setup, Python and variables. Nothing on the nodes is changed.
    Exit code 0: all hosts are ready; 3: a finding prevents a start; 5: all hosts are unreachable; 6: some hosts are
    unreachable and the others are ready.

    Examples:
    ascendrun doctor -H hostfiles/cluster.hosts             # all hosts of the file
    ascendrun doctor jobs/finetune.yaml                     # in the environment of this job
    ascendrun doctor -H cluster.hosts --hosts 'npu[01-04]' --device-type npu --lang zh
    ascendrun doctor --engine hpc                           # nodes that an engine grants for the check
    ascendrun doctor jobs/finetune.yaml --deep              # also measure devices and links
    ascendrun doctor -H cluster.hosts --fix-script > fix.sh # print the fixes as a script; run nothing
    """
    file, screen = target.file, ctx.screen
    on: Mapping[str, Any] = {}
    if target.hostfile is None and target.names is None:
        on = ctx.cluster.checks.engine(file, overrides=target.overrides, name=engine) or {}
        target = replace(target, hostfile=on.get("hostfile"))
    is_lent = bool(on) and target.hostfile is None
    check_alone("--deep", {"--engine": deep and is_lent})
    hosts = () if is_lent else target.hosts(ctx)
    screen.progress(str(Text("doctor.progress", "checking {count:plural host hosts}", count=len(hosts))))
    try:
        report = ctx.cluster.checks.doctor(
            hosts,
            job_file=file,
            overrides=target.overrides,
            engine=engine,
            device_type=device_type,
            paths=paths,
            is_full=not quick,
            every_pair=all_pairs,
        )
        if deep:
            report = measure(ctx, report, hosts, target, progress=screen.progress)
        if forecast:
            report = replace(report, forecast=ctx.cluster.checks.forecast(len(report.hosts)))
    finally:
        screen.close()
    if fix_script:
        of_job = ctx.cluster.job_files.read(file, overrides=target.overrides).hostfile if file is not None else None
        print_script(report, target.hostfile or of_job or (file is None and ctx.settings.hostfile) or None)
    elif not print_record(report, output):
        print_report(report, color=ctx.has_color(sys.stdout), wide=output == "wide")
    return exit_code(report, fail_on=fail_on)


def measure(
    ctx: CliContext, report: DoctorReport, hosts: tuple[Host, ...], target: Target, *, progress: Callable[[str], None]
) -> DoctorReport:
    """Return the report with measurements of the reachable hosts, made by small jobs in the Python of the job."""
    reached = [host for host in hosts if host.name not in report.unreached]
    if not reached:
        return report
    failing = {host for view in report.findings if view.severity is Severity.FAIL for host in view.hosts}
    check = ctx.cluster.checks.deep(
        reached,
        job_file=target.file,
        overrides=target.overrides,
        device_type=report.device_type,
        not_ready=[host.name for host in reached if host.name in failing],
        progress=progress,
        log=ctx.echo,
    )
    ctx.say("doctor.measured", "measurements saved in {file}", file=str(check.file))
    return add_deep(report, check.report, check.findings)


def exit_code(report: DoctorReport, *, fail_on: str) -> int:
    """Return 3 for a finding on a reachable host, else 5 or 6 for unreachable ones, else 0."""
    enough = SEVERITIES[: SEVERITIES.index(Severity(fail_on.upper())) + 1]
    missed = set(report.unreached)
    if any(view.severity in enough and not (view.hosts and set(view.hosts) <= missed) for view in report.findings):
        return 3
    if missed:
        return 5 if missed == set(report.hosts) else 6
    return 0


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
        print(line if width is None else cut(line, width))
    print()
    for line in (*_findings(report.findings, color, wide=wide), *_forecast(report), _summary(report)):
        indent = len(line) - len(line.lstrip(" |>")) + 2
        for piece in [line] if width is None or "\x1b" in line else wrap(line, width, indent=indent):
            print(piece)


def _table(rows: Sequence[FactRow], count: int) -> list[str]:
    """Return one line per fact; the nodes that differ follow the most common value."""
    lines: list[str] = []
    for row in rows:
        label = str(LABELS.get(row.name, row.name))
        lead = f"{label}{' ' * max(1, LABEL_WIDTH - width_of(label))}"
        lines += _group_lines(row, lead, f"{'':<8}", count, unknown=Text("doctor.unknown", "unknown"))
    return lines


def _group_lines(row: FactRow | EnvRow, lead: str, indent: str, count: int, *, unknown: Text) -> Iterator[str]:
    """Yield the value of the first group and, below it, of each other; with their hosts unless all `count` agree."""
    for index, group in enumerate(row.groups):
        value = sanitise_line(str(unknown if group.value is None else group.value))
        where = "" if len(group.hosts) == count else f"  {fold_hosts(group.hosts)}"
        yield f"{lead if index == 0 else indent + '! '}{value}{where}"


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


ENV_TITLES = {
    "python": Text("env.interpreter", "interpreter"),
    "package": Text("env.packages", "packages"),
    "limit": Text("env.limits", "limits (soft / hard)"),
    "variable": Text("env.variables", "variables"),
}


@cli_command("env")
@target_options
@click.option("--diff", is_flag=True, help="Show only differences between nodes.")
@click.option("--write", "path", metavar="FILE", help="Write the variables as a file to source; - for standard output.")
@output_option
def env_command(ctx: CliContext, target: Target, diff: bool, path: str | None, output: str | None) -> int:
    """Show the variables, limits, interpreter and packages of a rank on each node.

    With a job FILE after its setup, otherwise in a non-interactive login shell. Secrets are masked. Exit code 6: some
    hosts are unreachable.

    Examples:
    ascendrun env jobs/finetune.yaml                      # the environment of its ranks
    ascendrun env -H cluster.hosts --diff                 # only differences between nodes
    ascendrun env job.yaml --write env.sh                 # as a file to source in a shell; run nothing
    """
    if path is not None:
        return _write(ctx, target, path)
    report = ctx.cluster.checks.env(
        target.hosts(ctx), job_file=target.file, overrides=target.overrides, only_differing=diff
    )
    if not print_record(report, output):
        _print_env(report, diff=diff)
    return report_unreached(ctx, report.unreached.values(), len(report.hosts))


def _write(ctx: CliContext, target: Target, path: str) -> int:
    if target.file is None:
        raise UsageError(
            Text("env.write-requires-file", "--write requires a job FILE"), hint="ascendrun env job.yaml --write env.sh"
        )
    text, host = ctx.cluster.checks.env_file(target.hosts(ctx), job_file=target.file, overrides=target.overrides)
    if path == "-":
        sys.stdout.write(text)
        return 0

    write_bytes(Path(path), text.encode())
    ctx.say(
        "env.written",
        "{file}: environment on {host}; other hosts differ only in NODE_RANK and RANK",
        file=path,
        host=host,
    )
    return 0


def _print_env(report: EnvReport, *, diff: bool) -> None:
    kind = None
    for row in report.rows:
        if row.kind != kind:
            kind = row.kind
            print(str(ENV_TITLES[kind]))
        count = len(report.hosts) - len(report.unreached)
        for line in _group_lines(row, f"  {row.name}=", "    ", count, unknown=NOT_SET):
            print(line)
    if diff and not report.rows and len(report.hosts) > len(report.unreached):
        print(str(Text("env.no-difference", "no differences")))
