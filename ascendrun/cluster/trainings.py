"""Plans of the trainings of bundled programs, before a submission."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ascendrun.cluster.head import Head
    from ascendrun.head.survey.submission import Submission
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.planner.history import RecordedRun
    from ascendrun.planner.plan import TrainingPlan


def plan_submissions(head: Head, submissions: Sequence[Submission]) -> tuple[TrainingPlan, ...]:
    """Return the plan of each training among the submissions; queries the nodes."""
    from ascendrun.core.jobs.placement import choose_hosts
    from ascendrun.query.planner import PROBES, plan_trainings, recorded_runs

    def survey(submission: Submission, paths: Sequence[str]) -> CheckContext:
        return head.survey(submission.hosts, submission, paths=paths, names=PROBES)

    def runs_of(program: str, submission: Submission) -> Sequence[RecordedRun]:
        with head.store() as store:
            stored = store.jobs.all()
        return recorded_runs(stored, head.state_dir, program, submission)

    placed = [replace(one, hosts=choose_hosts(one.spec, one.hosts)) for one in submissions]
    return plan_trainings(placed, survey, runs_of)


def keep_plans(state_dir: Path, plans: Mapping[str, TrainingPlan]) -> None:
    """Keep what was planned, for the reports. A report without it has the measured values alone."""
    import contextlib

    if not plans:
        return
    from ascendrun.head.state.job_files import write_plan
    from ascendrun.query.planner import expected

    for job_id, plan in plans.items():
        if values := expected(plan):
            with contextlib.suppress(OSError):
                write_plan(state_dir, job_id, values)


def refuse_unfit(plans: Sequence[TrainingPlan], job_file: str | Path) -> None:
    """Raise PreflightError with all problems of the plans if one is fatal."""
    if plans:
        from ascendrun.query.planner import refuse

        refuse(plans, str(job_file))
