"""doctor: check every node, compare them, and show fixes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ascendrun.cli.doctor_view import print_report, print_script
from ascendrun.cli.options import Target, cli_command, output_option, target_options
from ascendrun.cli.output import print_record
from ascendrun.core.findings import SEVERITIES, Severity
from ascendrun.health.comparison import add_deep
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ascendrun.cli.context import CliContext
    from ascendrun.core.hosts import Host
    from ascendrun.health.comparison import DoctorReport


@cli_command(
    "doctor",
    examples="""
    ascendrun doctor -H hostfiles/cluster.hosts             # all hosts of the file
    ascendrun doctor jobs/finetune.yaml                     # in the environment of this job
    ascendrun doctor -H cluster.hosts --hosts 'npu[01-04]' --device-type npu --lang zh
    ascendrun doctor jobs/finetune.yaml --deep              # also measure devices and links
    ascendrun doctor -H cluster.hosts --fix-script > fix.sh # print the fixes as a script; run nothing
""",
)
@target_options
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
@click.option("--fix-script", is_flag=True, help="Print the fixes as a shell script; run nothing.")
@output_option
@click.pass_obj
def command(
    ctx: CliContext,
    target: Target,
    device_type: str | None,
    paths: tuple[str, ...],
    quick: bool,
    deep: bool,
    all_pairs: bool,
    fail_on: str,
    fix_script: bool,
    output: str | None,
) -> int:
    """Check all hosts in parallel, compare them, and show findings with fixes.

    With a job FILE the checks use its hosts, setup, Python and variables. Nothing on the nodes is changed.
    Exit code 0: all hosts are ready; 3: a finding prevents a start; 5: all hosts are unreachable; 6: some hosts are
    unreachable and the others are ready.
    """
    file, hosts = target.file, target.hosts(ctx)
    screen = ctx.screen()
    screen.progress(str(Text("doctor.progress", "checking {count:plural host hosts}", count=len(hosts))))
    try:
        report = ctx.cluster.checks.doctor(
            hosts,
            job_file=file,
            overrides=target.overrides,
            device_type=device_type,
            paths=paths,
            is_full=not quick,
            every_pair=all_pairs,
        )
        if deep:
            report = measure(ctx, report, hosts, target, progress=screen.progress)
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
    ctx.echo(str(Text("doctor.measured", "measurements saved in {file}", file=str(check.file))))
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
