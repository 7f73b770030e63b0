"""init: list templates, or copy one."""

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
    ascendrun init                       # list templates
    ascendrun init quickstart            # copy the template into this directory
    ascendrun init quickstart ~/train
""",
)
@click.argument("name", required=False)
@click.argument("target", required=False, type=click.Path(path_type=Path))
@click.pass_obj
def command(ctx: CliContext, name: str | None, target: Path | None) -> int:
    """Copy the template NAME (a job file and the files it uses) to the directory TARGET.

    The default is the current directory. Without NAME, list the templates.
    """
    from ascendrun.cli import templates

    if name is None:
        for template in templates.list_templates():
            print(f"{template.name:20s} {template.summary}")
        return 0
    paths = templates.copy_template(name, target or Path())
    for path in paths:
        print(path)
    ctx.hint(f"ascendrun submit {paths[0]}")
    return 0
