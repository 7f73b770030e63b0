"""doctor: is every node fit, which ones differ, and how are they mended?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command, hostfile_option, hosts_of, output_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from ascendrun.cli.context import CliContext
    from ascendrun.core.hosts import Host
    from ascendrun.health.survey.comparison import DoctorReport


@cli_command(
    "doctor",
    examples="""
    ascendrun doctor -H hostfiles/cluster.hosts             # every host of the file
    ascendrun doctor jobs/finetune.yaml                     # as this job would find its hosts
    ascendrun doctor -H cluster.hosts --on 'npu[01-04]' --family npu --lang zh
    ascendrun doctor jobs/finetune.yaml --deep              # and how fast devices and links are, against each other
    ascendrun doctor -H cluster.hosts --fix > mend.sh       # the ways out as a script; nothing is run
""",
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@hostfile_option
@click.option("--on", "names", metavar="HOSTS", help="Only these: npu[01-04] or @group.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override the job file: args.lr=1e-4.")
@click.option("--family", type=click.Choice(["npu", "cuda", "cpu"]), help="What the nodes compute on.")
@click.option("--path", "paths", multiple=True, metavar="PATH", help="Must be there, alike on all nodes.")
@click.option("--quick", is_flag=True, help="Only the checks that gate every start.")
@click.option("--deep", is_flag=True, help="Then measure: collectives in pairs of hosts, products on every device.")
@click.option("--full", is_flag=True, help="Every pair of NPU ports pings, not a sample.")
@click.option("--fail-on", type=click.Choice(["fail", "warn", "note"]), default="fail", help="Exit 3 from here on.")
@click.option("--fix", is_flag=True, help="Print a script of all ways out; run nothing.")
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Language of the findings.  [default: the locale's]")
@output_option
@click.pass_obj
def command(
    ctx: CliContext,
    file: Path | None,
    hostfile: str | None,
    names: str | None,
    overrides: tuple[str, ...],
    family: str | None,
    paths: tuple[str, ...],
    quick: bool,
    full: bool,
    deep: bool,
    fail_on: str,
    fix: bool,
    lang: str | None,
    output: str | None,
) -> int:
    """Examine every host at once, in the shell that a job would get there; say what differs, what is wrong, what helps.

    With a job FILE: its hosts, its set-up, its Python, its variables. Nothing on the nodes is changed.
    Exits 0 when all are fit, 3 when a finding would stop a start, 6 when some were not reached and the rest is fit.
    """
    from ascendrun.cli.doctor_view import print_report, print_script
    from ascendrun.health.texts import language_of

    hosts = choose_hosts(ctx, file, hostfile, names, overrides)
    lang = lang or language_of(ctx.environ)
    screen = ctx.screen()
    screen.progress(f"examining {len(hosts)} host{'s' if len(hosts) != 1 else ''}")
    try:
        report = ctx.cluster.doctor(
            hosts,
            job_file=file,
            overrides=overrides,
            family=family,
            paths=paths,
            is_full=not quick,
            lang=lang,
            every_pair=full,
        )
        if deep:
            report = measure(ctx, report, hosts, file, overrides=overrides, lang=lang, say=screen.progress)
    finally:
        screen.close()
    if fix:
        print_script(report, hostfile or _hostfile_of(ctx, file, overrides))
    elif output in (None, "table", "wide"):
        print_report(report, lang=lang, color=ctx.has_color(sys.stdout), wide=output == "wide")
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
    lang: str,
    say: Callable[[str], None],
) -> DoctorReport:
    """The report with what small jobs measured on the hosts that were reached, in the job's own Python."""
    from ascendrun.core.findings import Severity
    from ascendrun.health.survey.comparison import add_deep
    from ascendrun.query.deep_check import make_base
    from ascendrun.query.submit import read_job

    reached = [host for host in hosts if host.name not in report.unreached]
    if not reached:
        return report
    job = read_job(file, overrides=overrides) if file is not None else None
    failing = {host for view in report.findings if view.severity is Severity.FAIL for host in view.hosts}
    unfit = [host.name for host in reached if host.name in failing]
    base = make_base(job, family=report.family or "cpu")
    if base.python is None and any(host.is_local for host in reached):
        from ascendrun.cli.train_env import ensure_training_stack

        ensure_training_stack(None, ctx.echo)
    if job is None and base.devices.family != "cpu" and any(not (host.slots or host.devices) for host in reached):
        ctx.echo("hosts without slots= or devices= in the hostfile: one device of each is measured")
    look = ctx.cluster.deep(reached, base, unfit=unfit, say=say)
    ctx.echo(f"measured; kept in {look.file}")
    return add_deep(report, look.report, look.findings, lang=lang)


def _hostfile_of(ctx: CliContext, file: Path | None, overrides: tuple[str, ...]) -> str | None:
    """Where the script's commands find the hosts' addresses."""
    from ascendrun.query.submit import read_job

    if file is not None:
        return read_job(file, overrides=overrides).hostfile
    return str(ctx.settings.hostfile) if ctx.settings.hostfile else None


def choose_hosts(
    ctx: CliContext, file: Path | None, hostfile: str | None, names: str | None, overrides: tuple[str, ...]
) -> tuple[Host, ...]:
    """The job's own hosts, unless others are named."""
    if file is None or hostfile is not None or names is not None:
        return hosts_of(ctx, hostfile=hostfile, names=names)
    from ascendrun.query.submit import read_hosts, read_job

    return read_hosts(read_job(file, overrides=overrides), file)


def exit_code(report: DoctorReport, *, fail_on: str) -> int:
    """What was reached and is not fit counts more than what was not reached."""
    from ascendrun.core.findings import SEVERITIES, Severity

    enough = SEVERITIES[: SEVERITIES.index(Severity(fail_on.upper())) + 1]
    missed = set(report.unreached)
    if any(view.severity in enough and not (view.hosts and set(view.hosts) <= missed) for view in report.findings):
        return 3
    if missed:
        return 5 if missed == set(report.hosts) else 6
    return 0
