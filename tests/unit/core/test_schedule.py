"""Who waits for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ascendrun.core.jobs import reasons
from ascendrun.core.jobs.inputs import DependencyFailed, NodesAvailable, WaitingForNodes
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.schedule import Claim, schedule_all, schedule_queue


def job(number: int, state: State, **changes: Any) -> Job:
    made = Job(
        id=f"j-{number:04d}",
        name=f"job{number}",
        run=f"h-j-{number:04d}",
        hosts=("a", "b"),
        grace_s=1,
        start_s=1,
        created_at_s=0.0,
        state=state,
    )
    return replace(made, **changes)


def whole(*hosts: str) -> tuple[Claim, ...]:
    return tuple(Claim(host, 8) for host in hosts)


def part(host: str, count: int, capacity: int = 4) -> tuple[Claim, ...]:
    return (Claim(host, count, capacity=capacity),)


def ids(host: str, *devices: int, capacity: int | None = None) -> tuple[Claim, ...]:
    return (Claim(host, len(devices), capacity=capacity, ids=devices),)


def test_a_job_waits_for_the_node_that_another_holds_and_says_whose() -> None:
    decision = schedule_queue([(job(1, State.RUNNING), whole("a", "b")), (job(2, State.QUEUED), whole("b", "c"))])
    assert decision == {"j-0002": WaitingForNodes(reasons.nodes_in_use("j-0001", "job1", ["b"]))}


def test_a_younger_job_does_not_pass_an_older_one_that_waits() -> None:
    decision = schedule_queue(
        [
            (job(1, State.RUNNING), whole("a")),
            (job(2, State.QUEUED), whole("a", "b")),
            (job(3, State.QUEUED), whole("b")),
        ]
    )
    assert decision["j-0003"] == WaitingForNodes(reasons.queued_behind("j-0002", "job2", ["b"]))


def test_jobs_on_other_nodes_do_not_wait() -> None:
    decision = schedule_queue([(job(1, State.RUNNING), whole("a")), (job(2, State.QUEUED), whole("b"))])
    assert decision == {"j-0002": NodesAvailable()}


def test_slots_are_shared_until_they_are_full() -> None:
    running = [(job(1, State.RUNNING), part("a", 2)), (job(2, State.RUNNING), part("a", 1))]
    assert schedule_queue([*running, (job(3, State.QUEUED), part("a", 1))])["j-0003"] == NodesAvailable()
    assert isinstance(schedule_queue([*running, (job(3, State.QUEUED), part("a", 2))])["j-0003"], WaitingForNodes)


def test_named_devices_clash_only_when_they_overlap() -> None:
    running = (job(1, State.RUNNING), ids("a", 0, 1))
    assert schedule_queue([running, (job(2, State.QUEUED), ids("a", 2, 3))])["j-0002"] == NodesAvailable()
    assert isinstance(schedule_queue([running, (job(2, State.QUEUED), ids("a", 1, 2))])["j-0002"], WaitingForNodes)


def test_a_job_that_wants_the_whole_node_waits_for_named_devices_too() -> None:
    decision = schedule_queue([(job(1, State.RUNNING), ids("a", 0)), (job(2, State.QUEUED), whole("a"))])
    assert isinstance(decision["j-0002"], WaitingForNodes)


def test_a_node_not_confirmed_empty_is_still_held_after_the_job_ended() -> None:
    over = job(1, State.STOPPED, unconfirmed=("b",))
    decision = schedule_queue(
        [(over, whole("a", "b")), (job(2, State.QUEUED), whole("b")), (job(3, State.QUEUED), whole("a"))]
    )
    assert decision["j-0002"] == WaitingForNodes(reasons.nodes_unconfirmed("j-0001", ["b"]))
    assert decision["j-0003"] == NodesAvailable()


def test_a_stage_that_waits_for_another_keeps_no_place_and_one_whose_need_is_gone_stops_nobody() -> None:
    jobs = [
        (job(1, State.RUNNING, stage="a"), whole("a")),
        (job(2, State.QUEUED, needs="j-0001"), whole("b")),
        (job(3, State.QUEUED, needs="j-0009"), whole("b")),
        (job(4, State.QUEUED), whole("b")),
        (job(5, State.QUEUED, needs="j-0008"), whole("c")),
        (job(6, State.QUEUED, needs="j-0008"), whole("c")),
    ]
    known = {**{one.id: one for one, _ in jobs}, "j-0008": job(8, State.SUCCEEDED)}
    decisions = schedule_all(jobs, known.get)
    assert decisions["j-0002"] == WaitingForNodes(reasons.waiting_for_job("j-0001", "a"))
    assert isinstance(decisions["j-0003"], DependencyFailed)
    assert decisions["j-0004"] == NodesAvailable()
    # Two that need the same one start together where there is room, one after the other where there is not.
    assert decisions["j-0005"] == NodesAvailable()
    assert decisions["j-0006"] == WaitingForNodes(reasons.queued_behind("j-0005", "job5", ["c"]))
