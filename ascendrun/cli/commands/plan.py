"""plan: problems, strategy, memory, time and disk of a job's trainings, from the files on the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascendrun.cli.options import cli_command, hostfile_option, output_option
from ascendrun.cli.output import PEOPLE, print_record
from ascendrun.cli.sanitise import sanitise
from ascendrun.core.records import as_record
from ascendrun.planner.plan import render
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.cli.context import CliContext
    from ascendrun.planner.plan import TrainingPlan


@cli_command(
    "plan",
    examples="""
    ascendrun plan jobs/qwen32b.yaml           # from the files on its nodes
    ascendrun plan job.yaml --set args.strategy=fsdp2 --set args.chip=910B3
    ascendrun plan job.yaml -o json | jq '.problems[].message'
""",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: args.learning_rate=1e-4.")
@hostfile_option
@output_option
@click.pass_obj
def command(ctx: CliContext, file: Path, overrides: tuple[str, ...], hostfile: str | None, output: str | None) -> int:
    """Report what would fail, which strategy fits, memory, time and disk; use no device.

    The nodes read the headers of models and the rows of data. Every start of a job makes the same checks.
    Exits 3 if a training would fail.
    """
    plans = ctx.cluster.job_files.training_plans(file, overrides=overrides, hostfile=hostfile or None)

    if output in PEOPLE:
        for line in plan_lines(plans, file.stem):
            print(line)
    else:
        records = [plan_record(plan) for plan in plans]
        print_record(records[0] if len(records) == 1 else {"stages": records}, output)
    return exit_code(plans)


def exit_code(plans: Sequence[TrainingPlan]) -> int:
    return 3 if any(plan.fatal for plan in plans) else 0


def plan_lines(plans: Sequence[TrainingPlan], job: str) -> list[str]:
    """Return the text of all plans, each with a title."""
    lines: list[str] = []
    for plan in plans:
        title = Text(
            "plan.title",
            "{job}: {ranks:plural rank ranks} on {hosts:hosts}",
            job=job,
            ranks=plan.ranks,
            hosts=plan.hosts,
        )
        if plan.stage is not None:
            title = Text(
                "plan.title-stage",
                "stage {stage}: {ranks:plural rank ranks} on {hosts:hosts}",
                stage=plan.stage,
                ranks=plan.ranks,
                hosts=plan.hosts,
            )
        lines += [*([""] if lines else []), str(title), *map(str, render(plan))]
    return sanitise("\n".join(lines)).split("\n")


def plan_record(plan: TrainingPlan) -> dict[str, Any]:
    """Return a plan as plain data; `text` has the lines for people."""
    return {**as_record(plan), "is_valid": not plan.fatal, "text": [str(line) for line in render(plan)]}
