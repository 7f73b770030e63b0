"""A job on many hosts: what one rank reports costs the same with twenty hosts as with eighty."""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.draft import Draft
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Job, NodeProgress, Phase, State
from ascendrun.core.jobs.lifecycle import advance
from tests.lib.demo_jobs import demo_job

RANKS = 8


def starting(hosts: int) -> tuple[Job, list[JobInput]]:
    """A job that was told GO, and the starts of its ranks."""
    names = tuple(f"n{number:03d}" for number in range(hosts))
    ranks = {name: tuple(range(RANKS * number, RANKS * (number + 1))) for number, name in enumerate(names)}
    nodes = tuple(NodeProgress(name, k, phase=Phase.GO_SENT, ranks=ranks[name]) for k, name in enumerate(names))
    job = demo_job(hosts=names, nodes=nodes, state=State.STARTING, go_sent_at_s=2.0, world_size=RANKS * hosts)
    return job, [inputs.RankStarted(name, rank, 1000 + rank) for name in names for rank in ranks[name]]


def run(job: Job, events: Sequence[JobInput]) -> Job:
    for event in events:
        job = advance(job, event, now_s=3.0).job
    return job


def calls_of_an_input(hosts: int) -> float:
    job, events = starting(hosts)
    run(job, events[:1])  # classes are made when they are first used
    count = 0

    def note(frame: Any, event: str, value: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run(job, events[: len(events) // 2])
    finally:
        sys.setprofile(None)
    return count / (len(events) // 2)


def test_the_start_of_a_rank_costs_the_same_with_four_times_the_hosts() -> None:
    assert calls_of_an_input(80) < 1.5 * calls_of_an_input(20)


@pytest.mark.parametrize("seed", range(5))
def test_in_any_order_the_job_runs_with_the_last_rank_and_not_before(seed: int) -> None:
    job, events = starting(12)
    random.Random(seed).shuffle(events)
    before = run(job, events[:-1])
    assert before.state is State.STARTING
    after = run(before, events[-1:])
    assert after.state is State.RUNNING
    assert [node.host for node in after.nodes] == list(after.hosts) and job.nodes[0].pids == {}
    assert all(node.phase is Phase.STARTED and set(node.pids) == set(node.ranks) for node in after.nodes)
    assert run(after, events) == after, "told twice they change nothing"


def test_a_node_is_found_wherever_it_is() -> None:
    job, _ = starting(3)
    assert [job.place_of(host) for host in (*job.hosts, "other")] == [0, 1, 2, None]
    turned = replace(job, nodes=job.nodes[::-1])
    assert [turned.place_of(host) for host in job.hosts] == [2, 1, 0] and turned.node("n000").node_rank == 0
    assert [replace(job, nodes=job.nodes[:1]).place_of(host) for host in job.hosts] == [0, None, None]
    with pytest.raises(KeyError):
        job.node("other")


def test_a_change_of_a_field_that_a_node_does_not_have_is_an_error() -> None:
    draft = Draft(starting(2)[0], 1.0, tuple)
    with pytest.raises(AssertionError):
        draft.set_node("n000", phse=Phase.ENDED)
    draft.set_node("other", phase=Phase.ENDED)
    assert draft.job == starting(2)[0]
