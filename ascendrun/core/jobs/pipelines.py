"""State of a pipeline, from the jobs of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.job import Cause, Job, State
from ascendrun.core.jobs.reasons import Reason, because


@dataclass(frozen=True)
class StageStatus:
    """One stage: the newest job of its name. `job_id`: its id."""

    stage: str
    job_id: str
    state: State


@dataclass(frozen=True)
class PipelineStatus:
    """Summary of a pipeline. `representative`: index, in the jobs it was made from, of the job that shows its progress.
    `reason`: the stage number, the number of stages, and the reason of that stage."""

    representative: int
    state: State
    reason: Reason
    stages: tuple[StageStatus, ...]


def newest_stages(jobs: Sequence[Job]) -> tuple[int, ...]:
    """Return the indexes of each stage's newest job, in the order in which the stages were first submitted."""
    return tuple({job.stage: index for index, job in enumerate(jobs) if job.stage is not None}.values())


def representative_stage(jobs: Sequence[Job]) -> int:
    """Return the index of the job that represents the pipeline: a job with nodes, else the first that failed or was
    stopped itself, else the first that waits, else the last."""
    stages = newest_stages(jobs)
    if all(jobs[index].state is State.SUCCEEDED for index in stages):
        return stages[-1]
    return min(stages, key=lambda index: _precedence(jobs[index]))


def _precedence(job: Job) -> int:
    """Return the sort key; 0 is first."""
    if not job.is_terminal:
        return 2 if job.state is State.QUEUED else 0
    return 1 if job.state is not State.SUCCEEDED and job.cause is not Cause.NEED else 3


def pipeline_status(jobs: Sequence[Job]) -> PipelineStatus:
    """Return the status of a pipeline. `jobs`: all its jobs, oldest first. SUCCEEDED: the newest of each stage did."""
    newest = newest_stages(jobs)
    representative = representative_stage(jobs)
    job = jobs[representative]
    stages = tuple(StageStatus(str(jobs[index].stage), jobs[index].id, jobs[index].state) for index in newest)
    state = job.state
    if job.state.value in ("STOPPED", "FAILED") and any(not jobs[index].is_terminal for index in newest):
        state = State.STOPPING  # its last stages are still being skipped
    number = newest.index(representative) + 1
    reason = because("stage-progress", why=job.reason, number=number, stages=len(newest), stage=job.stage)
    return PipelineStatus(representative, state, reason, stages)
