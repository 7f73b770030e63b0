"""env: what a rank would see on each node, and where nodes differ."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.commands.doctor import choose_hosts
from ascendrun.cli.options import cli_command, hostfile_option, output_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.cli.context import CliContext
    from ascendrun.health.env_view import EnvReport, EnvRow
    from ascendrun.health.survey.check_context import World

PROBES = ("environ", "limits", "python")
TITLES = {"python": "interpreter", "package": "packages", "limit": "limits (soft / hard)", "variable": "variables"}


@cli_command(
    "env",
    examples="""
    ascendrun env jobs/finetune.yaml                      # what its ranks would see
    ascendrun env -H cluster.hosts --diff                 # only what differs between nodes
    ascendrun env job.yaml --write env.sh                 # the same for a shell by hand; nothing is run
""",
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@hostfile_option
@click.option("--on", "names", metavar="HOSTS", help="Only these: npu[01-04] or @group.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override the job file: args.lr=1e-4.")
@click.option("--diff", is_flag=True, help="Only what is not the same on all nodes.")
@click.option("--write", "target", metavar="FILE", help="Write a file to source by hand; - for standard output.")
@output_option
@click.pass_obj
def command(
    ctx: CliContext,
    file: Path | None,
    hostfile: str | None,
    names: str | None,
    overrides: tuple[str, ...],
    diff: bool,
    target: str | None,
    output: str | None,
) -> int:
    """Show variables, limits, interpreter and packages as a rank would see them, folded over the nodes.

    With a job FILE in its set-up, else in a plain non-interactive login. Secrets are masked. Exits 6 when some hosts
    were not reached.
    """
    from ascendrun.health.env_view import make_env_report

    if target is not None and file is None:
        raise click.UsageError("--write needs a job FILE: the variables are those of its ranks")
    hosts = choose_hosts(ctx, file, hostfile, names, overrides)
    world = ctx.cluster.survey(hosts, job_file=file, overrides=overrides, names=PROBES, is_full=False)
    if target is not None:
        return _write(ctx, world, target)
    report = make_env_report(world, salt=secrets.token_hex(8), only_differing=diff)
    if output in (None, "table", "wide"):
        _print(report, diff=diff)
    else:
        from ascendrun.cli.output import format_one

        assert output is not None
        sys.stdout.write(format_one(report, output))
    return _tell_unreached(ctx, report)


def _write(ctx: CliContext, world: World, target: str) -> int:
    from ascendrun.core.errors import PreflightError, UnreachableError
    from ascendrun.core.names import fold_names
    from ascendrun.health.env_view import write_env_file

    if world.unreached:
        raise UnreachableError(f"{fold_names(world.unreached)} did not answer: there is no plan without all hosts")
    host = next(iter(world.facts))
    try:
        text = write_env_file(world, host)
    except LookupError:
        raise PreflightError(
            "these hosts cannot carry the job, so its ranks have no environment",
            hint="`ascendrun submit --dry-run FILE` says why",
        ) from None
    if target == "-":
        sys.stdout.write(text)
    else:
        from ascendrun.core.output_file import write_bytes

        write_bytes(Path(target), text.encode())
        ctx.echo(f"{target}: for {host}; the others differ in NODE_RANK and RANK only")
    return 0


def _print(report: EnvReport, *, diff: bool) -> None:
    kind = None
    for row in report.rows:
        if row.kind != kind:
            kind = row.kind
            print(TITLES[kind])
        for line in _lines(row, len(report.hosts) - len(report.unreached)):
            print(line)
    if diff and not report.rows and len(report.hosts) > len(report.unreached):
        print("no difference")


def _lines(row: EnvRow, count: int) -> Sequence[str]:
    from ascendrun.cli.sanitise import sanitise_line
    from ascendrun.core.names import fold_names

    lines = []
    for index, group in enumerate(row.groups):
        value = "(not set)" if group.value is None else sanitise_line(group.value)
        where = "" if len(group.hosts) == count else f"  {fold_names(group.hosts)}"
        lines.append(f"  {row.name}={value}{where}" if index == 0 else f"    ! {value}{where}")
    return lines


def _tell_unreached(ctx: CliContext, report: EnvReport) -> int:
    for host, why in report.unreached.items():
        ctx.echo(f"error: {host}: {why.message}" + (f" ({why.hint})" if why.hint else ""))
    if not report.unreached:
        return 0
    return 5 if len(report.unreached) == len(report.hosts) else 6
