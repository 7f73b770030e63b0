"""Plans of the trainings of a job file, as the controller makes them at a start."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.cluster.head import Head
    from ascendrun.head.survey.submission import Submission
    from ascendrun.planner.plan import TrainingPlan


def plan_submissions(head: Head, submissions: Sequence[Submission]) -> tuple[TrainingPlan, ...]:
    """Return the plan of each stage; queries the nodes."""
    from ascendrun.core.jobs.placement import choose_hosts
    from ascendrun.head.survey.training_plan import PROBES, RUNS_READ, plan_stage, recorded_runs, training_stages
    from ascendrun.health.survey.check_context import CheckContext

    placed = [replace(one, hosts=choose_hosts(one.spec, one.hosts)) for one in submissions]
    stages, runs_of = training_stages(placed), partial(recorded_runs, (), head.state_dir)
    if any(stage.training is not None for stage in stages):
        with head.store() as store:
            runs_of = partial(recorded_runs, store.jobs.all()[-RUNS_READ:], head.state_dir)
    plans = []
    for stage, one in zip(stages, placed):
        is_planned = stage.training is not None
        world = head.survey(one.hosts, one, training=stage.paths, names=PROBES) if is_planned else CheckContext({})
        plans.append(plan_stage(stage, world, runs_of))
    return tuple(plans)
