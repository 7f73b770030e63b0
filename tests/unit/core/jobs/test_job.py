"""What another version stored or sent is read, with defaults; and how a pipeline stands, from its stages' jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.errors import AscendrunError, PreflightError, Problem
from ascendrun.core.hosts import Host, load_hosts
from ascendrun.core.jobs.inputs import DependencyFailed, WaitingForNodes
from ascendrun.core.jobs.job import (
    Cause,
    Exit,
    ForkedRank,
    Job,
    NodeProgress,
    Phase,
    Request,
    State,
    dump_job,
    load_job,
    pipeline_status,
)
from ascendrun.core.jobs.lifecycle import advance
from ascendrun.core.jobs.plan import Tree
from ascendrun.core.jobs.reasons import FirstFailure, because, needed
from ascendrun.core.jobs.schedule import check_dependency
from ascendrun.text import Text
from tests.lib.demo_jobs import demo_job

NODE = NodeProgress(
    "n1",
    Phase.ENDED,
    ranks=(0,),
    pids={0: 5},
    exits={0: Exit(code=1, signal=None, at_ns=7)},
    forked={0: ForkedRank(12, Exit(None, 9, 4))},
)
JOB = replace(
    Job(id="j-0001", name="a", run="r", hosts=("n1",), grace_s=1.0, start_s=2.0, created_at_s=3.0),
    pool=("n1", "n2"),
    request=Request(1),
    state=State.FAILED,
    nodes=(NODE,),
    first_failure=FirstFailure(because("rank-exited", ["n1"], [0], code=1), "likely"),
)


def with_unknown(value: Any) -> Any:
    """The same JSON with a key in every object that this version does not know; not where keys are numbers."""
    if isinstance(value, dict) and not {"$text", "$reason"} & set(value):
        extra = {} if not value or any(key.isdigit() for key in value) else {"from_the_future": [1]}
        return {**{key: with_unknown(item) for key, item in value.items()}, **extra}
    return [with_unknown(item) for item in value] if isinstance(value, list) else value


def test_a_record_of_another_version_is_read() -> None:
    record = json.loads(json.dumps(dump_job(JOB)))
    assert load_job(with_unknown(record)) == load_job(record) == JOB
    del record["unconfirmed"], record["nodes"][0]["lingering"], record["nodes"][0]["exits"]["0"]["stopped"]
    assert load_job(record) == JOB


def test_an_error_a_host_and_a_directory_of_another_version_are_read() -> None:
    error = PreflightError(Text("t.a", "no"), problems=[Problem("n1", None, None, Text("t.b", "x"))])
    assert AscendrunError.from_json(with_unknown(error.to_json())).problems == error.problems
    assert load_hosts([with_unknown({"name": "n1", "devices": [1]})]) == (Host("n1", devices=(1,)),)
    assert load_dataclass(Tree, {"name": "a", "sha256": "b", "size_bytes": 1, "files": 1, "x": 2}).name == "a"


def test_a_field_without_a_default_must_be_there() -> None:
    with pytest.raises(TypeError):
        load_dataclass(Host, {"slots": 4})


# --- pipelines ---


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
