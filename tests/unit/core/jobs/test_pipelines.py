"""How a pipeline stands, from its stages' jobs; and whether a stage may start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ascendrun.core.jobs.inputs import DependencyFailed, WaitingForNodes
from ascendrun.core.jobs.job import Cause, Job, State, pipeline_status
from ascendrun.core.jobs.lifecycle import advance
from ascendrun.core.jobs.reasons import because, needed
from ascendrun.core.jobs.schedule import check_dependency
from tests.lib.demo_jobs import demo_job


def job(stage: str, state: State = State.QUEUED, *, cause: Cause | None = None, number: int = 1) -> Job:
    return demo_job(
        id=f"j-0001-{number}",
        name=f"pipe.{stage}",
        run=f"h-j-0001-{number}",
        hosts=("a",),
        state=state,
        stage=stage,
        pipeline="j-0001",
        cause=cause,
        reason=because("rejected", why="why"),
    )


def jobs(*states: State, causes: Sequence[Cause | None] = ()) -> Sequence[Job]:
    return [
        job(name, state, cause=cause, number=index)
        for index, (name, state, cause) in enumerate(zip("abcd", states, [*causes, None, None, None, None]), start=1)
    ]


DONE, WAITS, RUNS, FAILED, STOPPED = State.SUCCEEDED, State.QUEUED, State.RUNNING, State.FAILED, State.STOPPED


@pytest.mark.parametrize(
    "states, representative, state",
    [
        ((WAITS, WAITS, WAITS), 0, WAITS),
        ((DONE, RUNS, WAITS), 1, RUNS),
        ((DONE, WAITS, WAITS), 1, WAITS),
        ((DONE, FAILED, STOPPED), 1, FAILED),
        ((DONE, FAILED, WAITS), 1, State.STOPPING),
        ((DONE, DONE, DONE), 2, DONE),
        ((FAILED, RUNS, STOPPED), 1, RUNS),
    ],
)
def test_the_stage_that_tells_most_speaks_for_the_pipeline(
    states: Sequence[State], representative: int, state: State
) -> None:
    status = pipeline_status(jobs(*states, causes=[None, None, Cause.NEED]))
    assert (status.representative, status.state) == (representative, state)
    assert status.reason == because(
        "stage-progress",
        why=because("rejected", why="why"),
        number=representative + 1,
        stages=3,
        stage="abc"[representative],
    )


def test_of_a_stage_that_was_repeated_the_newest_job_counts() -> None:
    again = [
        *jobs(DONE, FAILED, STOPPED, causes=[None, None, Cause.NEED]),
        job("b", DONE, number=4),
        job("c", RUNS, number=5),
    ]
    status = pipeline_status(again)
    assert (status.representative, status.state) == (4, RUNS)
    assert [(one.stage, one.job_id) for one in status.stages] == [
        ("a", "j-0001-1"),
        ("b", "j-0001-4"),
        ("c", "j-0001-5"),
    ]


def test_a_stage_starts_after_success_waits_for_life_and_is_called_off_after_anything_else() -> None:
    waiting = job("b", number=2)
    assert check_dependency(waiting, job("a", DONE)) is None
    assert check_dependency(waiting, job("a", RUNS)) == WaitingForNodes(
        because("waiting-for-job", needed=needed("j-0001-1", "a"), job="j-0001-1")
    )
    failed = check_dependency(waiting, job("a", FAILED))
    reason = because("dependency-failed", needed=needed("j-0001-1", "a"), job="j-0001-1", state="FAILED")
    assert failed == DependencyFailed(reason)
    step = advance(waiting, failed, now_s=5.0)
    assert [move.target for move in step.transitions] == [State.STOPPING, STOPPED] and not step.actions
    assert step.job.reason == reason
    called_off = replace(job("b", STOPPED, number=2), cause=Cause.NEED, reason=step.job.reason)
    assert check_dependency(job("c", number=3), called_off) == failed  # it leads to the stage that ended by itself
    unknown = check_dependency(replace(waiting, needs="j-0001-1"), None)
    assert unknown == DependencyFailed(because("dependency-unknown", job="j-0001-1"))
    checking = replace(waiting, state=State.CHECKING)
    assert advance(checking, failed, now_s=5.0).job == checking
