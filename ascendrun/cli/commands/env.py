"""env: show the environment of a rank on each node, and the differences."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.options import Target, cli_command, output_option, target_options
from ascendrun.cli.output import print_record, sanitise_line
from ascendrun.health.env_view import NOT_SET
from ascendrun.output_file import write_bytes
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.cli.context import CliContext
    from ascendrun.health.env_view import EnvReport, EnvRow

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
@target_options
@click.option("--diff", is_flag=True, help="Show only differences between nodes.")
@click.option("--write", "path", metavar="FILE", help="Write the variables as a file to source; - for standard output.")
@output_option
@click.pass_obj
def command(ctx: CliContext, target: Target, diff: bool, path: str | None, output: str | None) -> int:
    """Show the variables, limits, interpreter and packages of a rank on each node.

    With a job FILE after its setup, otherwise in a non-interactive login shell. Secrets are masked. Exit code 6: some
    hosts are unreachable.
    """
    if path is not None:
        return _write(ctx, target, path)
    report = ctx.cluster.checks.env(
        target.hosts(ctx), job_file=target.file, overrides=target.overrides, only_differing=diff
    )
    if not print_record(report, output):
        _print(report, diff=diff)
    for why in report.unreached.values():
        ctx.error(why.message, why.hint)
    if not report.unreached:
        return 0
    return 5 if len(report.unreached) == len(report.hosts) else 6


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
    lines = []
    for index, group in enumerate(row.groups):
        value = sanitise_line(str(NOT_SET if group.value is None else group.value))
        where = "" if len(group.hosts) == count else f"  {fold_hosts(group.hosts)}"
        lines.append(f"  {row.name}={value}{where}" if index == 0 else f"    ! {value}{where}")
    return lines
