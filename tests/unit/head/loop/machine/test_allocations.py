"""Queries of an engine with a queue, over one that answers what it is told to."""

from __future__ import annotations

from collections import deque
from typing import Any, Callable

import pytest

from ascendrun.core.allocations import AllocationRequest, Options, Waiting
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import because
from ascendrun.head.loop.machine import allocations
from tests.lib.background import join_threads
from tests.lib.small_world import World

JOBS = 100
SPEC = JobSpec.model_validate({"name": "demo", "command": ("true",)}).model_copy(update={"engine": {"type": "slurm"}})
FULL = Waiting(because("slurm-pending", job="7", state="Resources"))


class Queue:
    """A Slurm that grants nothing."""

    def __init__(self) -> None:
        self.polls: list[set[str]] = []
        self.requested: list[str] = []
        self.answers: deque[Callable[[], None]] = deque()

    def allocator(self, engine: str) -> Queue:
        assert engine == "slurm"
        return self

    def poll(self, keys: Options) -> dict[str, Waiting]:
        self.polls.append(set(keys))
        return dict.fromkeys(set(keys) & set(self.requested), FULL)

    def request(self, wanted: AllocationRequest) -> None:
        self.requested.append(wanted.key)

    def release(self, keys: Options) -> None:
        assert not keys


@pytest.fixture
def queue(world: World) -> Queue:
    made: Any = Queue()
    world.backend = made  # type: ignore[attr-defined]
    world.jobs.context.post = made.answers.append  # of the threads that query
    return made


def turn(world: World, queue: Queue) -> None:
    """The queries of one turn have been answered at its end."""
    world.turn()
    join_threads("engine-")
    while queue.answers:
        queue.answers.popleft()()
    world.jobs.steps.work_off()


def test_a_hundred_queued_jobs_cost_one_query_of_their_engine_in_each_interval(
    world: World, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocations, "EAGER_S", 0.0)
    monkeypatch.setattr(allocations, "INTERVAL_S", 3600.0)
    jobs: list[Job] = [world.job(spec=SPEC) for _ in range(JOBS)]
    turn(world, queue)
    assert len(queue.polls) == 1 and len(set(queue.requested)) == len(queue.requested) == JOBS
    for expected in (2, 3):
        world.jobs.allocations.look_soon()  # the interval is over
        for _ in range(10):
            turn(world, queue)
        assert len(queue.polls) == expected and len(queue.polls[-1]) == JOBS
    assert len(queue.requested) == JOBS and {world.now(job).state for job in jobs} == {State.QUEUED}
    assert {world.now(job).reason for job in jobs} == {FULL.reason}
