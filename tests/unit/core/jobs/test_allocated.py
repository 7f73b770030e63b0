"""Allocations as facts of a job's life: requested, granted, ending, gone."""

from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobs import allocated, endings, inputs
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Cause, Job, Phase, State, dump_job, load_job
from ascendrun.core.jobs.lifecycle import advance
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.restart import RestartPolicy

HOSTS = tuple(Host(name, devices=(0, 1), engine="q", allocation="7") for name in ("a", "b"))
WHY = because("slurm-ended", job="7", state="X", why="None")


def job(*told: JobInput, **changes: Any) -> Job:
    made = Job("j-1", "n", "h-j-1", (), grace_s=30, start_s=60, created_at_s=0.0, engine="q")
    return tell(replace(made, **changes), *told)


def tell(job: Job, *told: JobInput, now_s: float = 1.0) -> Job:
    for one in told:
        job = advance(job, one, now_s=now_s).job
    return job


def running(**changes: Any) -> Job:
    granted = job(allocated.AllocationRequested("h-j-1.1"), allocated.AllocationGranted(HOSTS), **changes)
    starting = [inputs.NodesFree(("a", "b")), *(inputs.NodeReported(name, "b", 0.0) for name in "ab")]
    starting += [inputs.Planned({"a": (0,), "b": (1,)}, 2), *(inputs.NodeStaged(name) for name in "ab")]
    starting += [
        *(inputs.NodeReady(name, 1) for name in "ab"),
        *(inputs.RankStarted(name, rank, 7) for rank, name in enumerate("ab")),
    ]
    made = tell(granted, *starting)
    assert made.state is State.RUNNING
    return made


def gone(cause: str, **values: Any) -> allocated.AllocationGone:
    return allocated.AllocationGone(cause, WHY, **values)


def test_a_granted_allocation_is_the_pool_of_the_job_and_survives_the_store() -> None:
    waiting = job(allocated.AllocationRequested("h-j-1.1"), allocated.AllocationWaiting(WHY))
    assert (waiting.allocation, waiting.pool, waiting.reason) == ("h-j-1.1", (), WHY)
    granted = tell(waiting, allocated.AllocationGranted(HOSTS))
    assert granted.pool == ("a", "b") and granted.granted == HOSTS
    assert load_job(dump_job(granted)) == granted


def test_an_allocation_that_ends_before_its_ranks_could_save_ends_the_job() -> None:
    requested = job(allocated.AllocationRequested("k"))
    short, enough = (tell(requested, allocated.AllocationGranted(HOSTS, length_s)) for length_s in (60.0, 61.0))
    assert (short.state, short.reason.code, short.allocation) == (State.FAILED, "allocation-too-short", "k")
    assert enough.state is State.QUEUED


def test_that_a_job_will_never_start_is_an_event_once() -> None:
    waiting, codes = job(allocated.AllocationRequested("k")), []
    for _ in range(2):
        step = advance(waiting, allocated.AllocationWaiting(WHY, will_start=False), now_s=2.0)
        waiting, codes = step.job, codes + [event.code for event in step.events]
    assert codes == ["allocation-never"] and waiting.state is State.QUEUED


@pytest.mark.parametrize(
    ("cause", "expected"),
    [("cancelled", Cause.USER), ("time-limit", Cause.PREEMPTED), ("preempted", Cause.PREEMPTED)]
    + [(cause, Cause.NODE_LOST) for cause in ("node-failed", "failed", "unknown")],
)
def test_the_end_of_the_allocation_ends_a_running_job_by_its_cause(cause: str, expected: Cause) -> None:
    ended = tell(running(policy=RestartPolicy(max_restarts=3)), gone(cause))
    assert ended.cause is expected and {node.phase for node in ended.nodes} == {Phase.LOST}
    assert (ended.allocation, ended.pool) == (None, ())
    assert (ended.state is State.STOPPED) == (cause == "cancelled")


def test_the_next_attempt_of_a_preempted_job_gets_a_new_allocation() -> None:
    ended = tell(running(policy=RestartPolicy(max_restarts=3)), gone("time-limit"))
    assert ended.state is State.BACKOFF
    again = tell(ended, inputs.Tick(frozenset()), now_s=1000.0)
    assert (again.state, again.attempt, again.past[-1].counted) == (State.QUEUED, 2, False)
    assert tell(again, allocated.AllocationRequested("h-j-1.2")).allocation == "h-j-1.2"


def test_the_ranks_are_stopped_in_time_before_the_allocation_ends() -> None:
    ending = tell(running(), allocated.AllocationEnding(100.0))
    assert (ending.state, ending.cause) == (State.STOPPING, Cause.PREEMPTED)


@pytest.mark.parametrize("cause", ["cancelled", "failed"])
def test_a_queued_job_whose_allocation_is_cancelled_or_cannot_run_ends(cause: str) -> None:
    ended = job(allocated.AllocationRequested("k"), gone(cause))
    assert ended.state is (State.STOPPED if cause == "cancelled" else State.FAILED)


def test_a_queued_job_requests_again_after_a_lost_node_or_its_own_release() -> None:
    for one in (gone("node-failed"), gone("cancelled", is_ours=True)):
        again = job(allocated.AllocationRequested("k"), allocated.AllocationGranted(HOSTS), one)
        assert (again.state, again.allocation, again.pool) == (State.QUEUED, None, ())


def test_the_end_of_the_allocation_confirms_the_end_of_a_stopped_job_and_changes_no_ended_one() -> None:
    stopping = tell(running(), inputs.StopRequested(now=False))
    stopped = tell(stopping, gone("cancelled", is_ours=True))
    assert (stopping.state, stopped.state) == (State.STOPPING, State.STOPPED)
    assert tell(stopped, gone("cancelled")) == stopped


def test_a_refused_request_ends_the_job() -> None:
    assert job(allocated.AllocationRequested("k"), allocated.AllocationRefused(WHY)).state is State.FAILED


def test_a_cancelled_job_is_stopped_although_its_node_saw_the_end_first() -> None:
    told = [endings.StopStarted("a", "node", "SIGTERM", 1.0), *(endings.NodeEnded(name) for name in "ab")]
    ending = tell(running(), *told)
    assert ending.state is State.STOPPING, "the engine decides what it was"
    assert tell(ending, gone("cancelled")).state is State.STOPPED
    assert tell(ending, gone("preempted")).state is State.FAILED
    assert tell(ending, inputs.Tick(), now_s=100.0).state is State.FAILED, (
        "an engine that does not answer is not awaited"
    )


@pytest.mark.parametrize("cause", ["time-limit", "node-failed", "preempted", "unknown"])
def test_a_queued_job_requests_again_by_a_key_that_no_ended_allocation_has(cause: str) -> None:
    granted = (allocated.AllocationRequested("h-j-1.1"), allocated.AllocationGranted(HOSTS))
    for ended in (job(granted[0], gone(cause, is_ours=True)), job(*granted, gone(cause))):
        assert (ended.state, ended.allocation, ended.run_id) == (State.QUEUED, None, "h-j-1.2")
    assert job(*granted, gone(cause), attempt=2).run_id == "h-j-1.2"


def test_an_end_in_the_queue_that_the_same_request_would_meet_again_ends_the_job() -> None:
    """Such as a deadline relative to the request, which each request moves on."""
    ended = job(allocated.AllocationRequested("k"), gone("time-limit"), policy=RestartPolicy(max_restarts=9))
    assert (ended.state, ended.cause, ended.reason.code) == (State.FAILED, Cause.LIMIT, "allocation-gone")


@pytest.mark.parametrize("cause", ["node-failed", "preempted"])
def test_other_ends_in_the_queue_are_restarts_with_the_limits_of_the_job(cause: str) -> None:
    waiting = (allocated.AllocationRequested("h-j-1.1"), allocated.AllocationWaiting(WHY))
    assert job(*waiting, gone(cause)).state is State.FAILED
    one = job(*waiting, policy=RestartPolicy(max_restarts=9))
    states = []
    for now_s in range(1000, 6000, 1000):
        one = tell(one, gone(cause), now_s=now_s)
        states.append(one.state)
        one = tell(one, inputs.Tick(frozenset()), now_s=now_s + 500)
        one = tell(one, allocated.AllocationRequested(one.run_id))
    assert one.past[0].counted == (cause == "node-failed")
    assert states[:4] == [State.BACKOFF] * 3 + [State.FAILED if cause == "node-failed" else State.BACKOFF]
