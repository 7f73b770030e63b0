"""validate: every problem of job files and hostfiles, without asking any node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command
from ascendrun.text import Text

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
    from ascendrun.cli.output import labelled
    from ascendrun.core.errors import InvalidInputError

    problems: list[Problem] = []
    for file in files:
        try:
            click.echo(labelled(file, _check(file, overrides)))
        except InvalidInputError as error:
            problems.extend(error.problems)
    if problems:
        raise InvalidInputError(problems)
    return 0


def _check(file: Path, overrides: tuple[str, ...]) -> Text:
    """What the file is. Raises InvalidInputError."""
    if file.suffix == ".hosts":
        from ascendrun.cli.options import read_hostfile

        hosts = len(read_hostfile(file))
        return Text("validate.hostfile", "valid: {hosts:plural host hosts}", hosts=hosts)
    from ascendrun.query.submit import read_stages, stage_hosts

    stages = read_stages(file, overrides=overrides, is_placed=True)
    placed = [stage for stage in stages if stage.spec.hostfile]
    hosts = len({host.name for hosts in stage_hosts(placed, file) for host in hosts})
    if stages[0].stage is None:
        what = Text("validate.job", "valid: job {name}", name=stages[0].spec.name)
    else:
        names = [str(stage.stage) for stage in stages]
        what = Text(
            "validate.pipeline",
            "valid: pipeline of {count:plural stage stages} ({names})",
            count=len(stages),
            names=names,
        )
    if not hosts:
        return what
    return Text("validate.on-hosts", "{what} on {hosts:plural host hosts}", what=what, hosts=hosts)
