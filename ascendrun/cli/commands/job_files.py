"""Job files: validate them, print their schema, create a job file from a template."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from ascendrun.cli.context import CliContext
from ascendrun.cli.options import UsageError, cli_command, exclusive, output_option
from ascendrun.cli.output import PEOPLE, Column, format_table, labelled, print_for_programs
from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.text import Text


@cli_command("validate")
@click.argument("files", nargs=-1, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override the job files: args.lr=1e-4.")
@click.option(
    "--sample",
    metavar="LOG",
    type=click.Path(path_type=Path),
    help="Print the steps that are read from this output, with progress.pattern of FILE, if FILE has one.",
)
@output_option
def validate_command(
    ctx: CliContext, files: tuple[Path, ...], overrides: tuple[str, ...], sample: Path | None, output: str | None
) -> None:
    """Report every problem of job files (and of hostfiles, named *.hosts), each with its place; ask no node.

    Examples:
    ascendrun validate jobs/*.yaml
    ascendrun validate job.yaml --set nodes=4 hostfiles/cluster.hosts
    ascendrun validate job.yaml --sample train.log
    """
    if not files and sample is None:
        raise click.UsageError(str(Text("cli.missing-files", "missing argument FILE...")))
    if sample is not None and output not in PEOPLE:
        raise UsageError(exclusive("--sample", f"-o {output}"))
    problems: list[Problem] = []
    for file in files:
        try:
            valid = labelled(file, _describe_valid(ctx, file, overrides))
            if output in PEOPLE:
                click.echo(valid)
        except InvalidInputError as error:
            problems.extend(error.problems)
    print_for_programs(problems, output, name="problems", kind=Problem)
    if problems:
        raise InvalidInputError(problems)
    if sample is not None:
        _print_sample(ctx, sample, [file for file in files if file.suffix != ".hosts"], overrides)


SAMPLE_ROWS = 10
"""Rows of a sample that are printed of its start and of its end."""
SAMPLE_COLUMNS = {
    "STEP": "step",
    "TOTAL": "total_steps",
    "LOSS": "loss",
    "LEARNING RATE": "learning_rate",
    "GRAD NORM": "grad_norm",
    "EPOCH": "epoch",
    "SAMPLES/S": "samples_per_s",
    "TOKENS/S": "tokens_per_s",
}


def _print_sample(ctx: CliContext, sample: Path, files: list[Path], overrides: tuple[str, ...]) -> None:
    """Print the rows that are read from an output. Raises InvalidInputError if it has none."""
    specs = [stage.spec for file in files for stage in ctx.cluster.job_files.validate(file, overrides=overrides)]
    pattern = next((spec.progress.pattern for spec in specs if spec.progress.pattern is not None), None)
    try:
        rows = ctx.cluster.job_files.sample_progress(sample, pattern=pattern)
    except OSError as error:
        message = Text("validate.sample-unreadable", "cannot read: {why}", why=error.strerror or str(error))
        raise InvalidInputError([Problem(str(sample), None, None, message)]) from None
    steps = sum(row.get("step") is not None for row in rows)
    if not steps:
        message = Text("validate.no-steps", "no step of a training found")
        hint = Text(
            "validate.no-steps-hint", "set progress.pattern in the job file, or write metrics (docs/metrics.md)"
        )
        raise InvalidInputError([Problem(str(sample), None, None, message, hint)])
    click.echo(labelled(sample, Text("validate.steps", "{steps:plural step steps} found", steps=steps)))
    shown = rows if len(rows) <= 2 * SAMPLE_ROWS else [*rows[:SAMPLE_ROWS], {}, *rows[-SAMPLE_ROWS:]]
    columns = [Column(title, partial(_cell, name=name)) for title, name in SAMPLE_COLUMNS.items()]
    click.echo(format_table(shown, columns), nl=False)


def _cell(row: dict[str, Any], *, name: str) -> str:
    """Return a value of a row; the empty row stands for those that are omitted."""
    if not row:
        return "…"
    return "" if row.get(name) is None else f"{row[name]:.6g}" if isinstance(row[name], float) else str(row[name])


def _describe_valid(ctx: CliContext, file: Path, overrides: tuple[str, ...]) -> Text:
    """Return a summary of a valid file. Raises InvalidInputError."""
    if file.suffix == ".hosts":
        hosts = len(ctx.cluster.hosts.select(hostfile=file))
        return Text("validate.hostfile", "valid: {hosts:plural host hosts}", hosts=hosts)
    stages = ctx.cluster.job_files.validate(file, overrides=overrides)
    hosts = len({host.name for stage in stages for host in stage.hosts})
    if stages[0].spec.sweep is not None:
        names = [stage.spec.name for stage in stages]
        what = Text(
            "validate.sweep", "valid: sweep of {count:plural job jobs} ({names})", count=len(stages), names=names
        )
    elif stages[0].stage is None:
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


@cli_command("schema")
@click.argument("key", required=False)
def schema_command(ctx: CliContext, key: str | None) -> None:
    """Print the JSON Schema of job files for editors, or explain KEY: a job-file key, PROGRAM or PROGRAM.OPTION.

    Examples:
    ascendrun schema > job.schema.json      # then, in a job file: # yaml-language-server: $schema=job.schema.json
    ascendrun schema devices.type           # type, default, meaning and an example of one key
    ascendrun schema qwen_lora              # the options of a bundled program
    ascendrun schema qwen_lora.lora_r
    """
    if key is None:
        click.echo(json.dumps(ctx.cluster.job_files.schema(), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(ctx.cluster.job_files.describe_key(key)))


QUESTIONS: tuple[tuple[str, Text, str], ...] = (
    ("hosts", Text("init.ask.hosts", "Hosts: names, npu[01-04] or NAME=ADDRESS (NAME=local: this machine)"), ""),
    ("user", Text("init.ask.user", "User for SSH (empty: as ~/.ssh/config has it)"), ""),
    ("devices", Text("init.ask.devices", "Devices: npu, cuda or cpu"), "npu"),
    ("per_node", Text("init.ask.per-node", "Devices on each host"), "8"),
    (
        "python",
        Text("init.ask.python", "Python on the hosts: an interpreter, or the directory of an environment"),
        "python3",
    ),
    (
        "set_env",
        Text("init.ask.set-env", "File of CANN to source first (-: none)"),
        "/usr/local/Ascend/ascend-toolkit/set_env.sh",
    ),
    ("interface", Text("init.ask.interface", "Network interface between the ranks (empty: by the routes)"), ""),
    ("script", Text("init.ask.script", "Script and its arguments (a missing train.py is written)"), "train.py"),
)
"""Fields of NewJob in the order of the questions, with the default of each."""


@cli_command("init")
@click.argument("name", required=False)
@click.argument("target", required=False, type=click.Path(path_type=Path))
@click.option("--list", "is_list", is_flag=True, help="List the templates.")
def init_command(ctx: CliContext, name: str | None, target: Path | None, is_list: bool) -> None:
    """Copy the template NAME (a job file and the files it uses) to the directory TARGET.

    The default is the current directory. Without NAME, ask for hosts, devices and script, and write a job file and a
    hostfile here; this requires a terminal.

    Examples:
    ascendrun init                       # ask, then write a job file and a hostfile
    ascendrun init --list                # list templates
    ascendrun init quickstart            # copy the template into this directory
    ascendrun init quickstart ~/train
    """
    if is_list:
        for template in ctx.cluster.job_files.templates():
            print(f"{template.name:20s} {template.summary}")
        return
    paths = _ask_for_job(ctx) if name is None else ctx.cluster.job_files.init(name, target or Path())
    for path in paths:
        print(path)
    ctx.hint(f"ascendrun {'submit' if name else 'doctor'} {paths[0]}")


def _ask_for_job(ctx: CliContext) -> tuple[Path, ...]:
    """Ask until each answer is valid, and write the files. Raises UsageError without a terminal."""
    from ascendrun.cluster import NewJob

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        names = [template.name for template in ctx.cluster.job_files.templates()]
        message = Text("init.no-terminal", "missing argument NAME: questions require a terminal")
        raise UsageError(message, hint=Text("init.known", "known templates: {names}", names=names))
    ctx.cluster.job_files.check_new(NewJob("host"))
    answers = {"hosts": "host"}
    for key, question, default in QUESTIONS:
        if key == "set_env" and answers["devices"] != "npu":
            continue
        while True:
            given = click.prompt(str(question), default=default, show_default=bool(default), err=True).strip()
            answers[key] = "" if given == "-" else given
            try:
                ctx.cluster.job_files.check_new(NewJob(**answers))
            except InvalidInputError as error:
                for problem in error.problems:
                    ctx.error(problem.message, problem.hint)
            else:
                break
    return ctx.cluster.job_files.write_new(NewJob(**answers))
