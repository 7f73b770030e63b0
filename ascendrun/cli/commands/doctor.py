"""doctor: check every node, compare them, and show fixes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command, hostfile_option, hosts_of, output_option
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
@click.argument("file", required=False, type=click.Path(path_type=Path))
@hostfile_option
@click.option("--hosts", "names", metavar="HOSTS", help="Only these hosts: npu[01-04] or @group.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override the job file: args.lr=1e-4.")
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
    file: Path | None,
    hostfile: str | None,
    names: str | None,
    overrides: tuple[str, ...],
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
    from ascendrun.cli.doctor_view import print_report, print_script

    hosts = choose_hosts(ctx, file, hostfile, names, overrides)
    screen = ctx.screen()
    screen.progress(str(Text("doctor.progress", "checking {count:plural host hosts}", count=len(hosts))))
    try:
        report = ctx.cluster.doctor(
            hosts,
            job_file=file,
            overrides=overrides,
            family=device_type,
            paths=paths,
            is_full=not quick,
            every_pair=all_pairs,
        )
        if deep:
            report = measure(ctx, report, hosts, file, overrides=overrides, progress=screen.progress)
    finally:
        screen.close()
    if fix_script:
        print_script(report, hostfile or _hostfile_of(ctx, file, overrides))
    elif output in (None, "table", "wide"):
        print_report(report, color=ctx.has_color(sys.stdout), wide=output == "wide")
    else:
        from ascendrun.cli.output import format_one

        assert output is not None
        sys.stdout.write(format_one(report, output))
    return exit_code(report, fail_on=fail_on)


def measure(
    ctx: CliContext,
    report: DoctorReport,
    hosts: tuple[Host, ...],
    file: Path | None,
    *,
    overrides: tuple[str, ...],
    progress: Callable[[str], None],
) -> DoctorReport:
    """Return the report with measurements of the reachable hosts, made by small jobs in the Python of the job."""
    from ascendrun.core.findings import Severity
    from ascendrun.health.comparison import add_deep
    from ascendrun.query.deep_check import make_base
    from ascendrun.query.submit import read_job

    reached = [host for host in hosts if host.name not in report.unreached]
    if not reached:
        return report
    job = read_job(file, overrides=overrides) if file is not None else None
    failing = {host for view in report.findings if view.severity is Severity.FAIL for host in view.hosts}
    not_ready = [host.name for host in reached if host.name in failing]
    base = make_base(job, device_type=report.device_type or "cpu")
    if base.python is None and any(host.is_local for host in reached):
        from ascendrun.cli.train_env import ensure_training_stack

        ensure_training_stack(None, ctx.echo)
    if job is None and base.devices.type != "cpu" and any(not (host.slots or host.devices) for host in reached):
        ctx.echo(
            str(
                Text(
                    "doctor.one-device",
                    "one device is measured on each host without slots= or devices= in the hostfile",
                )
            )
        )
    check = ctx.cluster.deep(reached, base, unfit=not_ready, say=progress)
    ctx.echo(str(Text("doctor.measured", "measurements saved in {file}", file=str(check.file))))
    return add_deep(report, check.report, check.findings)


def _hostfile_of(ctx: CliContext, file: Path | None, overrides: tuple[str, ...]) -> str | None:
    """The hostfile for the commands of the script."""
    from ascendrun.query.submit import read_job

    if file is not None:
        return read_job(file, overrides=overrides).hostfile
    return str(ctx.settings.hostfile) if ctx.settings.hostfile else None


def choose_hosts(
    ctx: CliContext, file: Path | None, hostfile: str | None, names: str | None, overrides: tuple[str, ...]
) -> tuple[Host, ...]:
    """Return the hosts of the job, unless others are named."""
    if file is None or hostfile is not None or names is not None:
        return hosts_of(ctx, hostfile=hostfile, names=names)
    from ascendrun.query.submit import read_hosts, read_job

    return read_hosts(read_job(file, overrides=overrides), file)


def exit_code(report: DoctorReport, *, fail_on: str) -> int:
    """Return 3 for a finding on a reachable host, else 5 or 6 for unreachable ones, else 0."""
    from ascendrun.core.findings import SEVERITIES, Severity

    enough = SEVERITIES[: SEVERITIES.index(Severity(fail_on.upper())) + 1]
    missed = set(report.unreached)
    if any(view.severity in enough and not (view.hosts and set(view.hosts) <= missed) for view in report.findings):
        return 3
    if missed:
        return 5 if missed == set(report.hosts) else 6
    return 0
