"""validate: every problem of job files and hostfiles, without asking any node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.core.errors import Problem


@cli_command(
    "validate",
    examples="""
    ascendrun validate jobs/*.yaml
    ascendrun validate job.yaml --set nodes=4 hostfiles/cluster.hosts
""",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override the job files: args.lr=1e-4.")
@click.pass_obj
def command(ctx: CliContext, files: tuple[Path, ...], overrides: tuple[str, ...]) -> int:
    """Report every problem of job files (and of hostfiles, named *.hosts), each with its place; ask no node."""
    from ascendrun.core.errors import InvalidInputError

    problems: list[Problem] = []
    for file in files:
        try:
            click.echo(f"{file}: {_check(file, overrides)}")
        except InvalidInputError as error:
            problems.extend(error.problems)
    if problems:
        raise InvalidInputError(problems)
    return 0


def _check(file: Path, overrides: tuple[str, ...]) -> str:
    """What the file is, in a few words. Raises InvalidInputError."""
    if file.suffix == ".hosts":
        from ascendrun.cli.options import read_hostfile

        return f"fine: {_count(read_hostfile(file))}"
    from ascendrun.query.submit import read_stages, stage_hosts

    stages = read_stages(file, overrides=overrides)
    placed = [stage for stage in stages if stage.spec.hostfile]
    taken = {host.name: host for hosts in stage_hosts(placed, file) for host in hosts}
    on_hosts = f" on {_count(tuple(taken.values()))}" if taken else ""
    if stages[0].stage is None:
        return f"fine: job {stages[0].spec.name}{on_hosts}"
    names = ", ".join(str(one.stage) for one in stages)
    return f"fine: pipeline of {len(stages)} stages ({names}){on_hosts}"


def _count(hosts: tuple[object, ...]) -> str:
    return f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}"
