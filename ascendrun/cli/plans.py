"""Plans of jobs and of their trainings, as text and as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.cli.output import sanitise
from ascendrun.core.records import as_record
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.planner.plan import TrainingPlan


def plan_text(job: str, plans: Sequence[Mapping[str, Any]], trainings: Sequence[TrainingPlan]) -> str:
    """Return what every rank would run, and as comments what its training needs."""
    from ascendrun.core.jobs.plan_text import render_text

    text = sanitise("\n".join(render_text(plan) for plan in plans))
    bundled = [plan for plan in trainings if plan.program is not None]
    return text + "".join(f"# {line}\n" for line in (("", *plan_lines(bundled, job)) if bundled else ()))


def exit_code(plans: Sequence[TrainingPlan]) -> int:
    return 3 if any(plan.fatal for plan in plans) else 0


def plan_lines(plans: Sequence[TrainingPlan], job: str) -> list[str]:
    """Return the text of all plans, each with a title."""
    from ascendrun.planner.plan import render

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
    from ascendrun.planner.plan import render

    return {**as_record(plan), "is_valid": not plan.fatal, "text": [str(line) for line in render(plan)]}
