"""init: a job to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext


@cli_command(
    "init",
    examples="""
    ascendrun init                       # what there is
    ascendrun init quickstart            # copies it here
    ascendrun init quickstart ~/train
""",
)
@click.argument("name", required=False)
@click.argument("target", required=False, type=click.Path(path_type=Path))
@click.pass_obj
def command(ctx: CliContext, name: str | None, target: Path | None) -> int:
    """Copy the skeleton NAME (a job file and what it needs) to TARGET, by default here; without NAME list them."""
    from ascendrun.cli import templates

    if name is None:
        for skeleton in templates.list_skeletons():
            print(f"{skeleton.name:20s} {skeleton.says}")
        return 0
    paths = templates.copy_skeleton(name, target or Path())
    for path in paths:
        print(path)
    ctx.echo(f"hint: ascendrun submit {paths[0]}")
    return 0
