"""A job's life as stories: events in, records and actions out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.events import Event
from ascendrun.core.jobs import inputs, reasons
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Exit, Job, Phase, State
from ascendrun.core.jobs.lifecycle import CONFIRM_S, TRANSITIONS, InvalidTransitionError, Step, _Draft, advance, resume
from ascendrun.core.jobs.reasons import FirstFailure

HOSTS = ("node1", "node2")


def make_job(**changes: Any) -> Job:
    job = Job(id="j-0001", name="demo", run="head-j-0001", hosts=HOSTS, grace_s=30, start_s=60, created_at_s=0.0)
    return replace(job, **changes)


class Story:
    """A job that lives through events at one second each."""

    def __init__(self, job: Job) -> None:
        self.job, self.now_s = job, 0.0
        self.actions: list[inputs.Action] = []
        self.events: list[Event] = []
        self.states: list[State] = [job.state]

    def tell(self, *events: JobInput) -> Story:
        for event in events:
            self.now_s += 1.0
            self.take(advance(self.job, event, now_s=self.now_s))
        return self

    def take(self, step: Step) -> None:
        self.job = step.job
        self.actions = list(step.actions) or self.actions
        self.events += step.events
        self.states += [move.target for move in step.transitions]


def to_starting() -> tuple[JobInput, ...]:
    return (
        inputs.NodesAvailable(),
        inputs.NodeReported("node1", "b1", 0.0),
        inputs.NodeReported("node2", "b2", 0.0),
        inputs.Planned({"node1": (0, 1), "node2": (2, 3)}, 4),
        inputs.NodeStaged("node1"),
        inputs.NodeStaged("node2"),
    )


def to_running() -> tuple[JobInput, ...]:
    started = tuple(inputs.RankStarted("node1" if rank < 2 else "node2", rank, 100 + rank) for rank in range(4))
    return (*to_starting(), inputs.NodeReady("node1", 29400), inputs.NodeReady("node2", None), *started)


def ended(rank: int, code: int = 0, *, at_ns: int = 5, stopped: bool = False) -> inputs.RankExited:
    return inputs.RankExited("node1" if rank < 2 else "node2", rank, Exit(code, None, at_ns, stopped))


def test_nobody_is_told_go_while_one_node_is_not_ready() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.NodeReady("node1", 29400))
    assert inputs.StartNodes() not in story.actions
    assert story.job.go_sent_at_s is None


def test_one_refusal_and_nobody_starts() -> None:
    story = Story(make_job()).tell(
        *to_starting(), inputs.NodeReady("node1", 29400), inputs.Refused("node2", "port 29500 is taken")
    )
    assert story.job.state is State.FAILED
    assert story.actions == [inputs.AbortNodes("head-j-0001.1")]
    assert story.job.reason == reasons.preflight_failed(
        ["node2"], reasons.on_host("node2", story.job.reason.values["why"].values["why"])
    )


def test_a_node_that_gets_ready_after_another_refused_is_told_to_forget_it() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.Refused("node2", "no"), inputs.NodeReady("node1", 29400))
    assert story.actions == [inputs.AbortNodes("head-j-0001.1")]


def test_the_first_failing_rank_is_named_after_clock_offsets_are_removed() -> None:
    events = list(to_running())
    events[2] = inputs.NodeReported("node2", "b2", 90.0)
    story = Story(make_job()).tell(*events)
    story.tell(ended(0, 1, at_ns=200_000_000_000), ended(2, 3, at_ns=289_000_000_000))
    assert story.job.first_failure == FirstFailure("rank-exited", "node2", 2, code=3)


def test_a_failed_rank_stops_every_node_and_the_job_fails_when_all_are_empty() -> None:
    story = Story(make_job()).tell(*to_running(), ended(2, 3))
    assert story.job.state is State.STOPPING
    assert isinstance(story.actions[-1], inputs.StopNodes) and story.actions[-1].hosts == HOSTS
    story.tell(ended(0, 1, stopped=True), inputs.NodeEnded("node2"))
    assert story.job.state is State.STOPPING
    story.tell(inputs.NodeEnded("node1"))
    assert story.job.state is State.FAILED
    assert story.job.reason == FirstFailure("rank-exited", "node2", 2, code=3).reason()


def test_ranks_that_die_because_they_were_stopped_are_never_the_first_failure() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=False))
    story.tell(
        *(
            inputs.RankExited(host, rank, Exit(None, 15, 1, stopped=True))
            for rank, host in enumerate(("node1", "node1", "node2", "node2"))
        )
    )
    story.tell(inputs.NodeEnded("node1"), inputs.NodeEnded("node2"))
    assert story.job.state is State.STOPPED
    assert story.job.first_failure is None


def test_a_silent_node_does_not_end_a_running_job() -> None:
    story = Story(make_job()).tell(*to_running())
    for _ in range(5000):
        story.tell(inputs.Tick(frozenset({"node1"})))
    assert story.job.state is State.RUNNING


def test_a_stop_names_the_node_that_could_not_confirm_and_clears_it_when_it_answers() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=False), inputs.NodeEnded("node1"))
    story.now_s += 30 + CONFIRM_S
    story.tell(inputs.Tick(frozenset({"node1"})))
    assert story.job.state is State.STOPPED
    assert story.job.unconfirmed == ("node2",)
    assert isinstance(resume(story.job, now_s=0.0).actions[0], inputs.StopNodes)
    story.tell(inputs.NodeEnded("node2"))
    assert story.job.unconfirmed == ()
    assert story.job.state is State.STOPPED


def test_a_reachable_node_that_is_slow_to_end_keeps_the_job_stopping() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=False), inputs.NodeEnded("node1"))
    story.now_s += 30 + CONFIRM_S
    story.tell(inputs.Tick(frozenset(HOSTS)))
    assert story.job.state is State.STOPPING
    story.now_s += CONFIRM_S
    story.tell(inputs.Tick(frozenset(HOSTS)))
    assert story.job.state is State.STOPPED, "but not for ever"
    assert story.job.unconfirmed == ("node2",)


def test_a_stop_without_grace_waits_no_grace_for_a_silent_node() -> None:
    story = Story(make_job(grace_s=3000)).tell(*to_running(), inputs.StopRequested(now=True), inputs.NodeEnded("node1"))
    story.now_s += CONFIRM_S
    story.tell(inputs.Tick(frozenset({"node1"})))
    assert story.job.state is State.STOPPED


def test_a_head_that_could_not_look_lets_its_waits_begin_anew() -> None:
    starting = (
        Story(make_job(start_s=60))
        .tell(*to_starting(), inputs.NodeReady("node1", 29400), inputs.NodeReady("node2", None))
        .job
    )
    stopping = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=True)).job
    for job in (starting, stopping):
        story = Story(job)
        story.now_s = 10_000.0
        story.take(resume(job, now_s=story.now_s))
        story.tell(inputs.Tick())
        assert story.job.state is job.state


def test_a_rebooted_node_is_a_fact_that_fails_the_job() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.NodeRebooted("node2"), inputs.NodeEnded("node1"))
    assert story.job.state is State.FAILED
    assert (story.job.reason.key, story.job.reason.values["host"]) == ("reason.node-rebooted", "node2")


def test_ranks_not_alive_by_the_deadline_fail_the_start_and_are_named() -> None:
    events = to_running()[:-2]
    story = Story(make_job()).tell(*events)
    story.now_s += 60
    story.tell(inputs.Tick(frozenset(HOSTS)))
    assert story.job.state is State.STOPPING
    assert story.job.reason.values["hosts"] == ["node2"]


def test_a_stop_in_the_queue_touches_no_node() -> None:
    story = Story(make_job()).tell(inputs.StopRequested(now=False))
    assert story.job.state is State.STOPPED
    assert story.actions == []


def test_a_second_harsher_stop_is_passed_on_once() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=False), inputs.StopRequested(now=True))
    assert isinstance(story.actions[-1], inputs.StopNodes) and story.actions[-1].now
    assert advance(story.job, inputs.StopRequested(now=True), now_s=99.0).actions == ()


def test_a_job_succeeds_only_when_every_node_is_empty() -> None:
    story = Story(make_job()).tell(*to_running(), *(ended(rank) for rank in range(4)), inputs.NodeEnded("node1"))
    assert story.job.state is State.RUNNING
    story.tell(inputs.NodeEnded("node2"))
    assert story.job.state is State.SUCCEEDED
    assert story.states == [State.QUEUED, State.CHECKING, State.STAGING, State.STARTING, State.RUNNING, State.SUCCEEDED]


def test_ranks_so_short_that_they_end_before_all_nodes_started_still_succeed() -> None:
    events = to_running()
    story = Story(make_job()).tell(*events[:-2], ended(0), ended(1), inputs.NodeEnded("node1"))
    assert story.job.state is State.STARTING
    story.tell(*events[-2:], ended(2), ended(3), inputs.NodeEnded("node2"))
    assert story.job.state is State.SUCCEEDED


def test_a_new_controller_begins_an_unfinished_start_again_as_the_next_attempt() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.NodeReady("node1", 29400))
    story.take(resume(story.job, now_s=50.0))
    assert story.job.state is State.QUEUED
    assert story.job.attempt == 2
    assert story.job.run_id == "head-j-0001.2"
    assert State.BACKOFF in story.states
    assert story.actions == [inputs.AbortNodes("head-j-0001.1")], "what the old attempt had reserved is given back"


def test_a_new_controller_says_go_again_when_go_was_decided() -> None:
    story = Story(make_job()).tell(*to_running()[:8])
    assert story.job.go_sent_at_s is not None and story.job.state is State.STARTING
    assert resume(story.job, now_s=50.0).actions == (inputs.StartNodes(),)


def test_an_event_told_twice_changes_nothing() -> None:
    story = Story(make_job())
    for event in (*to_running(), ended(0), inputs.NodeEnded("node1"), ended(2), ended(3), inputs.NodeEnded("node2")):
        if isinstance(event, (inputs.RankStarted, inputs.RankExited, inputs.NodeEnded)):
            story.tell(event)
            again = advance(story.job, event, now_s=story.now_s)
            assert (again.job, again.actions) == (story.job, ())
        else:
            story.tell(event)


def test_an_illegal_move_raises_with_the_story() -> None:
    draft = _Draft(make_job(state=State.SUCCEEDED), 1.0, lambda: ["state: SUCCEEDED: all 4 ranks exited 0"])
    with pytest.raises(InvalidTransitionError, match="SUCCEEDED -> RUNNING.*all 4 ranks exited 0"):
        draft.transition(State.RUNNING, "by mistake")


def any_event(rng: random.Random) -> JobInput:
    host, rank = rng.choice(HOSTS), rng.randrange(4)
    host = "node1" if rank < 2 else "node2"
    choices: Sequence[JobInput] = (
        inputs.NodesAvailable(),
        inputs.WaitingForNodes("held"),
        inputs.NodeReported(host, "b", 0.0),
        inputs.Planned({"node1": (0, 1), "node2": (2, 3)}, 4),
        inputs.NodeStaged(host),
        inputs.NodeReady(host, 29400),
        inputs.Refused(host, "no"),
        inputs.RankStarted(host, rank, 1),
        ended(rank),
        ended(rank, 3),
        inputs.NodeEnded(host),
        inputs.NodeRebooted(host),
        inputs.SupervisorLost(host),
        inputs.StopRequested(rng.random() < 0.5),
        inputs.Tick(frozenset(rng.sample(HOSTS, rng.randrange(3)))),
        inputs.StartFailed(host, rank, "no such file"),
        inputs.StopStarted(host, "limit", "max_s", 1.0),
        inputs.RankHungAtExit(host, rank, "idle"),
    )
    return rng.choice(choices)


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_events_makes_an_illegal_move_or_wakes_an_ended_job(seed: int) -> None:
    rng = random.Random(seed)
    story = Story(make_job())
    for _ in range(120):
        before = story.job
        event = any_event(rng)
        if not before.nodes and not isinstance(
            event, (inputs.NodesAvailable, inputs.WaitingForNodes, inputs.StopRequested, inputs.Tick)
        ):
            continue  # nothing on the nodes can speak of a job that was never looked at
        story.tell(event)
        if before.is_terminal:
            assert story.job.state is before.state
        if story.job.state is State.RUNNING:
            assert all(node.phase in (Phase.STARTED, Phase.ENDED) for node in story.job.nodes)
    assert all(target in TRANSITIONS[source] for source, target in zip(story.states, story.states[1:]))
