"""env: show the environment of a rank on each node, and the differences."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.commands.doctor import choose_hosts
from ascendrun.cli.options import cli_command, hostfile_option, output_option
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.cli.context import CliContext
    from ascendrun.health.env_view import EnvReport, EnvRow
    from ascendrun.health.survey.check_context import CheckContext

PROBES = ("environ", "limits", "python")
TITLES = {
    "python": Text("env.interpreter", "interpreter"),
    "package": Text("env.packages", "packages"),
    "limit": Text("env.limits", "limits (soft / hard)"),
    "variable": Text("env.variables", "variables"),
}


@cli_command(
    "env",
    examples="""
    ascendrun env jobs/finetune.yaml                      # the environment of its ranks
    ascendrun env -H cluster.hosts --diff                 # only differences between nodes
    ascendrun env job.yaml --write env.sh                 # as a file to source in a shell; run nothing
""",
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@hostfile_option
@click.option("--hosts", "names", metavar="HOSTS", help="Only these hosts: npu[01-04] or @group.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override the job file: args.lr=1e-4.")
@click.option("--diff", is_flag=True, help="Show only differences between nodes.")
@click.option(
    "--write", "target", metavar="FILE", help="Write the variables as a file to source; - for standard output."
)
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
    """Show the variables, limits, interpreter and packages of a rank on each node.

    With a job FILE after its setup, otherwise in a non-interactive login shell. Secrets are masked. Exit code 6: some
    hosts are unreachable.
    """
    from ascendrun.health.env_view import make_env_report

    if target is not None and file is None:
        raise UsageError(
            Text("env.write-requires-file", "--write requires a job FILE"), hint="ascendrun env job.yaml --write env.sh"
        )
    hosts = choose_hosts(ctx, file, hostfile, names, overrides)
    context = ctx.cluster.survey(hosts, job_file=file, overrides=overrides, names=PROBES, is_full=False)
    if target is not None:
        return _write(ctx, context, target)
    report = make_env_report(context, salt=secrets.token_hex(8), only_differing=diff)
    if output in (None, "table", "wide"):
        _print(report, diff=diff)
    else:
        from ascendrun.cli.output import format_one

        assert output is not None
        sys.stdout.write(format_one(report, output))
    return _print_unreached(report)


def _write(ctx: CliContext, context: CheckContext, target: str) -> int:
    from ascendrun.core.errors import PreflightError, UnreachableError
    from ascendrun.health.env_view import write_env_file
    from ascendrun.text.format import fold_hosts

    if context.unreached:
        raise UnreachableError(
            Text(
                "env.unreachable",
                "{hosts:hosts} unreachable; --write requires all hosts",
                hosts=tuple(context.unreached),
            ),
            hint=f"ascendrun nodes --hosts {fold_hosts(context.unreached)}",
        )
    host = next(iter(context.facts))
    try:
        text = write_env_file(context, host)
    except LookupError:
        raise PreflightError(
            Text("env.no-plan", "the job cannot start on these hosts, so its ranks have no environment"),
            hint="ascendrun submit --dry-run FILE",
        ) from None
    if target == "-":
        sys.stdout.write(text)
    else:
        from ascendrun.core.output_file import write_bytes

        write_bytes(Path(target), text.encode())
        ctx.echo(
            str(
                Text(
                    "env.written",
                    "{file}: environment on {host}; other hosts differ only in NODE_RANK and RANK",
                    file=target,
                    host=host,
                )
            )
        )
    return 0


def _print(report: EnvReport, *, diff: bool) -> None:
    kind = None
    for row in report.rows:
        if row.kind != kind:
            kind = row.kind
            print(str(TITLES[kind]))
        for line in _lines(row, len(report.hosts) - len(report.unreached)):
            print(line)
    if diff and not report.rows and len(report.hosts) > len(report.unreached):
        print(str(Text("env.no-difference", "no differences")))


def _lines(row: EnvRow, count: int) -> Sequence[str]:
    from ascendrun.cli.sanitise import sanitise_line
    from ascendrun.health.env_view import NOT_SET
    from ascendrun.text.format import fold_hosts

    lines = []
    for index, group in enumerate(row.groups):
        value = sanitise_line(str(NOT_SET if group.value is None else group.value))
        where = "" if len(group.hosts) == count else f"  {fold_hosts(group.hosts)}"
        lines.append(f"  {row.name}={value}{where}" if index == 0 else f"    ! {value}{where}")
    return lines


def _print_unreached(report: EnvReport) -> int:
    from ascendrun.cli.errors import error_lines, hint_lines

    for why in report.unreached.values():
        for line in (*error_lines(why.message), *hint_lines(why.hint)):
            print(line, file=sys.stderr)
    if not report.unreached:
        return 0
    return 5 if len(report.unreached) == len(report.hosts) else 6
