"""The stages of a curriculum, and the problems of the options and of the data with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ascendrun.planner.training import PlanProblem
from ascendrun.text import Text

Stage = tuple[Fraction, tuple[Fraction, ...]]
"""(end, as a fraction of all steps; fractions of the levels, with sum 1)."""


class InvalidStagesError(ValueError):
    """The text of a schedule is invalid; `problem` has the reason."""

    def __init__(self, problem: PlanProblem) -> None:
        super().__init__(problem.code)
        self.problem = problem


def read_stages(texts: Sequence[Any], levels: int) -> list[Stage]:
    """Parse `0.3=80/20/0` for each stage: its end as a fraction of the steps, and the relative weights of the levels.
    Raises InvalidStagesError."""
    option = "curriculum_schedule"
    stages: list[Stage] = []
    for text in map(str, texts):
        end_text, _, parts_text = text.partition("=")
        try:
            end, parts = Fraction(end_text.strip()), [Fraction(part.strip()) for part in parts_text.split("/")]
        except (ValueError, ZeroDivisionError):
            message = Text(
                "plan.stage-form", "args.curriculum_schedule: {text:quote}: expected END=PART/PART/…", text=text
            )
            hint = Text("plan.stage-example", "such as 0.3=80/20/0")
            raise InvalidStagesError(PlanProblem("stage-form", message, hint, option)) from None
        if len(parts) != levels or min(parts) < 0 or not sum(parts):
            message = Text(
                "plan.stage-parts",
                "args.curriculum_schedule: the stage to {end} has {parts} parts; expected {levels}, one for "
                "each level, 0 or more, and not all 0",
                end=float(end),
                parts=len(parts),
                levels=levels,
            )
            raise InvalidStagesError(PlanProblem("stage-parts", message, None, option))
        stages.append((end, tuple(part / sum(parts) for part in parts)))
    ends = [end for end, _ in stages]
    if ends != sorted(set(ends)) or not ends or ends[-1] != 1 or ends[0] <= 0:
        message = Text("plan.stage-order", "args.curriculum_schedule: the ends of stages must rise and the last be 1")
        raise InvalidStagesError(PlanProblem("stage-order", message, None, option))
    return stages


def difficulty_problems(counts: Mapping[str, int], levels: Sequence[str], wanted: str) -> Iterator[PlanProblem]:
    """Report difficulties that the schedule cannot place. `counts`: samples by difficulty, "": without one. `wanted`:
    auto or on."""
    named = sorted(level for level in counts if level)
    if not named and wanted == "on":
        message = Text("plan.no-difficulty", "args.curriculum: on requires samples with a difficulty")
        hint = Text("plan.add-difficulty", "add difficulty to the samples, or set curriculum: auto")
        yield PlanProblem("no-difficulty", message, hint, "curriculum")
    if named and counts.get(""):
        message = Text(
            "plan.some-difficulty",
            "args.data_path: {missing} of {all} samples have no difficulty",
            missing=counts[""],
            all=sum(counts.values()),
        )
        hint = Text("plan.difficulty-off", "add it, or set curriculum: off")
        yield PlanProblem("some-difficulty", message, hint, "data_path")
    strange = [level for level in named if level not in levels]
    if strange:
        message = Text(
            "plan.unknown-level",
            "args.difficulty_levels: the data has {strange}, expected {levels}",
            strange=strange,
            levels=list(levels),
        )
        hint = Text("plan.list-levels", "list all levels of the data from easy to hard")
        yield PlanProblem("unknown-level", message, hint, "difficulty_levels")


def empty_stages(stages: Sequence[Stage], steps: int) -> Iterator[PlanProblem]:
    """Warn of stages between two steps."""
    start = Fraction(0)
    for number, (end, _) in enumerate(stages, start=1):
        near = range(max(0, int(start * steps) - 1), min(steps, int(end * steps) + 2))
        if not any(start <= Fraction(step, steps) < end for step in near):
            message = Text(
                "plan.stage-empty",
                "args.curriculum_schedule: stage {stage} has no step of {steps}",
                stage=number,
                steps=steps,
            )
            hint = Text("plan.longer", "train for more steps, or use fewer stages")
            yield PlanProblem("stage-empty", message, hint, "curriculum_schedule", is_fatal=False)
        start = end


def stage_of(step: int, steps: int, stages: Sequence[Stage]) -> int:
    """Return the stage by steps done, not epochs: three epochs would never reach a stage that starts at 70 %."""
    return next(i for i, (end, _) in enumerate(stages) if Fraction(step, steps) < end)
