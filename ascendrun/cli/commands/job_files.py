"""Job files: validate them, print their schema, create a job file from a template."""

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
def validate(ctx: CliContext, files: tuple[Path, ...], overrides: tuple[str, ...]) -> int:
    """Report every problem of job files (and of hostfiles, named *.hosts), each with its place; ask no node."""
    from ascendrun.cli.output import labelled
    from ascendrun.core.errors import InvalidInputError

    problems: list[Problem] = []
    for file in files:
        try:
            click.echo(labelled(file, _describe_valid(ctx, file, overrides)))
        except InvalidInputError as error:
            problems.extend(error.problems)
    if problems:
        raise InvalidInputError(problems)
    return 0


def _describe_valid(ctx: CliContext, file: Path, overrides: tuple[str, ...]) -> Text:
    """Return a summary of a valid file. Raises InvalidInputError."""
    if file.suffix == ".hosts":
        hosts = len(ctx.cluster.hosts(hostfile=file))
        return Text("validate.hostfile", "valid: {hosts:plural host hosts}", hosts=hosts)
    stages = ctx.cluster.validate(file, overrides=overrides)
    hosts = len({host.name for stage in stages for host in stage.hosts})
    if stages[0].stage is None:
        what = Text("validate.job", "valid: job {name}", name=stages[0].spec.name)
    else:
        what = Text(
            "validate.pipeline",
            "valid: pipeline of {count:plural stage stages} ({names})",
            count=len(stages),
            names=[str(stage.stage) for stage in stages],
        )
    if not hosts:
        return what
    return Text("validate.on-hosts", "{what} on {hosts:plural host hosts}", what=what, hosts=hosts)


@cli_command(
    "schema",
    examples="""
    ascendrun schema > job.schema.json      # then, in a job file: # yaml-language-server: $schema=job.schema.json
    ascendrun schema devices.type           # type, default, meaning and an example of one key
    ascendrun schema qwen_lora              # the options of a bundled program
    ascendrun schema qwen_lora.lora_r
""",
)
@click.argument("key", required=False)
@click.pass_obj
def schema(ctx: CliContext, key: str | None) -> int:
    """Print the JSON Schema of job files for editors, or explain KEY: a job-file key, PROGRAM or PROGRAM.OPTION."""
    import json

    if key is None:
        click.echo(json.dumps(ctx.cluster.schema(), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(ctx.cluster.describe_key(key)))
    return 0


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
def init(ctx: CliContext, name: str | None, target: Path | None) -> int:
    """Copy the template NAME (a job file and the files it uses) to the directory TARGET.

    The default is the current directory. Without NAME, list the templates.
    """
    if name is None:
        for template in ctx.cluster.templates():
            print(f"{template.name:20s} {template.summary}")
        return 0
    paths = ctx.cluster.init(name, target or Path())
    for path in paths:
        print(path)
    ctx.hint(f"ascendrun submit {paths[0]}")
    return 0
