"""A job's life as stories: events in, records and actions out."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.events import Event
from ascendrun.core.jobs import draft, endings, inputs
from ascendrun.core.jobs.draft import CONFIRM_S, HELD_S, HUNG_GRACE_S, TRANSITIONS, Draft, InvalidTransitionError, Step
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Cause, Exit, Job, Leftover, NodeProgress, Phase, Request, State, dump_job, load_job
from ascendrun.core.jobs.lifecycle import advance, resume
from ascendrun.core.jobs.outcome import first_failure
from ascendrun.core.jobs.reasons import LOST, FirstFailure, because
from ascendrun.core.jobs.restart import Failure, Kind, PastAttempt, RestartPolicy
from ascendrun.text import Text

HOSTS = ("node1", "node2")


def make_job(**changes: Any) -> Job:
    job = Job(id="j-0001", name="demo", run="head-j-0001", hosts=HOSTS, grace_s=30, start_s=60, created_at_s=0.0)
    return replace(job, **changes)


class Story:
    """A job that lives through events at one second each."""

    def __init__(self, job: Job) -> None:
        self.job, self.now_s = job, 0.0
        self.actions: list[draft.Action] = []
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
        inputs.NodesFree(HOSTS),
        inputs.NodeReported("node1", "b1", 0.0),
        inputs.NodeReported("node2", "b2", 0.0),
        inputs.Planned({"node1": (0, 1), "node2": (2, 3)}, 4),
        inputs.NodeStaged("node1"),
        inputs.NodeStaged("node2"),
    )


def to_running() -> tuple[JobInput, ...]:
    started = tuple(inputs.RankStarted("node1" if rank < 2 else "node2", rank, 100 + rank) for rank in range(4))
    return (*to_starting(), inputs.NodeReady("node1", 29400), inputs.NodeReady("node2", None), *started)


def ended(rank: int, code: int = 0, *, at_ns: int = 5, stopped: bool = False) -> endings.RankExited:
    return endings.RankExited("node1" if rank < 2 else "node2", rank, Exit(code, None, at_ns, stopped))


def test_nobody_is_told_go_while_one_node_is_not_ready() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.NodeReady("node1", 29400))
    assert draft.StartNodes() not in story.actions
    assert story.job.go_sent_at_s is None


def test_one_refusal_and_nobody_starts() -> None:
    story = Story(make_job()).tell(
        *to_starting(), inputs.NodeReady("node1", 29400), inputs.Refused("node2", "port 29500 is taken")
    )
    assert story.job.state is State.FAILED
    assert story.actions == [draft.AbortNodes("head-j-0001.1", HOSTS)]
    refusal = because("on-host", ["node2"], why="port 29500 is taken")
    assert story.job.reason == because("preflight-failed", why=refusal)


def pooled(*pool: str, nodes: int = 2, **changes: Any) -> Job:
    return make_job(hosts=(), pool=pool, request=Request(nodes), **changes)


def test_a_host_that_is_not_ready_is_passed_over_and_the_job_placed_again() -> None:
    story = Story(pooled("node1", "node2", "node3")).tell(*to_starting(), inputs.Refused("node2", "no disk"))
    assert (story.job.state, story.job.attempt, story.job.hosts) == (State.QUEUED, 2, ())
    assert story.actions == [draft.AbortNodes("head-j-0001.1", HOSTS)], "what was prepared is given back"
    assert set(story.job.passed_over) == {"node2"} and story.job.past[-1].counted is False
    [event] = [event for event in story.events if event.code == "host-passed-over"]
    assert (event.hosts, event.values["why"]) == (("node2",), "no disk")
    story.tell(inputs.Refused("node1", "late"))
    assert story.job.state is State.QUEUED, "a refusal of the attempt that was given up"
    story.tell(inputs.NodesFree(("node1", "node3")))
    assert (story.job.state, story.job.hosts, len(story.job.nodes)) == (State.CHECKING, ("node1", "node3"), 2)


def test_without_other_hosts_the_first_start_fails_and_a_restart_waits() -> None:
    story = Story(pooled("node1", "node2")).tell(*to_starting(), inputs.Refused("node2", "no", is_away=True))
    assert (story.job.state, story.job.cause) == (State.FAILED, Cause.REFUSED)
    queued = Story(pooled("node1", "node2", created_at_s=-3600.0)).tell(*to_starting())
    assert queued.tell(inputs.Refused("node2", "no", is_away=True)).job.state is State.QUEUED, "its turn came later"
    past = (PastAttempt(1, HOSTS, 1.0, 2.0),)
    story = Story(pooled("node1", "node2", past=past)).tell(*to_starting(), inputs.Refused("node2", "no", is_away=True))
    assert story.job.state is State.QUEUED


def test_what_most_hosts_refuse_is_wrong_with_the_job() -> None:
    pool = ("node1", "node2", "node3", "node4", "node5")
    story = Story(pooled(*pool)).tell(*to_starting(), inputs.Refused(None, "no python", HOSTS))
    assert story.job.state is State.FAILED
    story = Story(pooled(*pool, nodes=1))
    for host, state in (("node1", State.QUEUED), ("node2", State.QUEUED), ("node3", State.FAILED)):
        story.tell(inputs.NodesFree((host,)), inputs.Refused(host, "no python"))
        assert story.job.state is state
    story = Story(pooled(*pool, nodes=1))
    for host in pool[:4]:
        story.tell(inputs.NodesFree((host,)), inputs.Refused(host, "no route", is_away=True))
        assert story.job.state is State.QUEUED, "hosts that do not respond are no fault of the job"


def test_a_hold_is_recorded_with_its_user_and_ends_once() -> None:
    story = Story(make_job()).tell(inputs.HoldChanged("wang"), inputs.HoldChanged("wang"))
    assert story.job.held_by == "wang"
    story.tell(inputs.HoldChanged(None), inputs.HoldChanged(None))
    assert story.job.held_by is None
    assert [(event.code, event.values) for event in story.events] == [
        ("hold-started", {"by": "wang"}),
        ("hold-ended", {"by": "wang"}),
    ]


def test_a_node_that_gets_ready_after_another_refused_is_told_to_forget_it() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.Refused("node2", "no"), inputs.NodeReady("node1", 29400))
    assert story.actions == [draft.AbortNodes("head-j-0001.1", ("node1",))]


def test_the_first_failing_rank_is_named_after_clock_offsets_are_removed() -> None:
    events = list(to_running())
    events[2] = inputs.NodeReported("node2", "b2", 90.0)
    story = Story(make_job()).tell(*events)
    story.tell(ended(0, 1, at_ns=200_000_000_000), ended(2, 3, at_ns=289_000_000_000))
    assert story.job.first_failure == FirstFailure(because("rank-exited", ["node2"], [2], code=3))


def test_a_process_that_starts_its_ranks_itself_fails_without_a_rank_number() -> None:
    story = Story(replace(make_job(), forks=True)).tell(*to_running(), ended(2, 3))
    assert story.job.first_failure == FirstFailure(because("launcher-exited", ["node2"], code=3))


def forked_end(rank: int, host: str, code: int | None, signal: int | None = None, *, at_s: int = 1) -> list[Any]:
    end = Exit(code, signal, at_s * 1_000_000_000)
    return [endings.ForkedRankStarted(host, rank, 100 + rank), endings.ForkedRankExited(host, rank, end)]


def test_the_first_rank_that_a_script_forked_and_that_failed_is_named() -> None:
    story = Story(replace(make_job(), forks=True)).tell(*to_running())
    story.tell(endings.ForkedRankStarted("node1", 0, 100), *forked_end(1, "node1", 1, at_s=5))
    story.tell(*forked_end(3, "node2", 7, at_s=4), *forked_end(2, "node2", None, 15, at_s=3))
    assert story.job.rank_count == 4 and story.job.node("node1").forked[0].exit is None
    assert load_job(json.loads(json.dumps(dump_job(story.job)))).nodes == story.job.nodes
    story.tell(ended(2, 1))
    assert story.job.first_failure == FirstFailure(because("rank-exited", ["node2"], [3], code=7))


def test_no_rank_is_named_where_the_exit_of_an_earlier_one_was_missed() -> None:
    story = Story(replace(make_job(), forks=True)).tell(*to_running())
    story.tell(*forked_end(3, "node2", 7, at_s=4), *forked_end(2, "node2", None, at_s=3), ended(2, 1))
    assert story.job.first_failure == FirstFailure(because("launcher-exited", ["node2"], code=1))


def test_a_failed_rank_stops_every_node_and_the_job_fails_when_all_are_empty() -> None:
    story = Story(make_job()).tell(*to_running(), ended(2, 3))
    assert story.job.state is State.STOPPING
    assert isinstance(story.actions[-2], draft.StopNodes) and story.actions[-2].hosts == HOSTS
    story.tell(ended(0, 1, stopped=True), endings.NodeEnded("node2"))
    assert story.job.state is State.STOPPING
    story.tell(endings.NodeEnded("node1"))
    assert story.job.state is State.FAILED
    assert story.job.reason == because("rank-exited", ["node2"], [2], code=3)


def test_ranks_that_die_because_they_were_stopped_are_never_the_first_failure() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=False))
    story.tell(
        *(
            endings.RankExited(host, rank, Exit(None, 15, 1, stopped=True))
            for rank, host in enumerate(("node1", "node1", "node2", "node2"))
        )
    )
    story.tell(endings.NodeEnded("node1"), endings.NodeEnded("node2"))
    assert story.job.state is State.STOPPED
    assert story.job.first_failure is None


@pytest.mark.parametrize("by", ["node", "head"])
@pytest.mark.parametrize("restarted", [False, True])
def test_ranks_that_save_and_exit_0_because_they_were_stopped_are_no_success(by: str, restarted: bool) -> None:
    """SIGTERM to a supervisor, as a node's shutdown sends it; and a stop that a restored store does not know."""
    story = Story(make_job()).tell(*to_running())
    told: list[JobInput] = [endings.StopStarted("node1", by, "SIGTERM", 1.0)]
    told += [ended(rank, stopped=True) for rank in range(4)]
    told += [endings.NodeEnded(host) for host in HOSTS]
    story.tell(*(one for event in told for one in ([event, event] if restarted else [event])))
    assert story.job.state is State.FAILED
    if by == "node":
        assert (story.job.cause, story.job.reason.code) == (Cause.PREEMPTED, "preempted")
        assert story.job.reason.hosts == ("node1",)


def test_a_host_that_shuts_down_lets_all_ranks_save() -> None:
    story = Story(make_job()).tell(*to_running(), endings.StopStarted("node1", "node", "SIGTERM", 1.0))
    assert story.actions[-2] == draft.StopNodes(HOSTS, now=False, grace_s=30)


def test_a_shutdown_after_the_work_is_complete_is_a_success() -> None:
    story = Story(make_job()).tell(*to_running(), endings.StopStarted("node1", "node", "SIGTERM", 1.0, done=True))
    exits = [endings.RankExited("node1", rank, Exit(0, None, 5, stopped=True, done=True)) for rank in (0, 1)]
    story.tell(*exits, ended(2), ended(3), *(endings.NodeEnded(host) for host in HOSTS))
    assert story.job.state is State.SUCCEEDED


def test_the_end_of_a_host_corrects_what_its_ranks_may_have_written_about_themselves() -> None:
    story = Story(make_job()).tell(*to_running(), *(ended(rank) for rank in range(4)), endings.NodeEnded("node2"))
    true = {0: Exit(0, None, 9, stopped=False), 1: Exit(3, None, 9, stopped=False)}
    story.tell(endings.NodeEnded("node1", exits=true))
    assert story.job.state is State.FAILED
    assert story.job.first_failure == FirstFailure(because("rank-exited", ["node1"], [1], code=3))


def test_the_end_of_a_host_names_exits_whose_records_were_lost() -> None:
    exits = [{rank: Exit(0, None, 9, stopped=False) for rank in ranks} for ranks in ((0, 1), (2, 3))]
    story = Story(make_job()).tell(*to_running())
    story.tell(*(endings.NodeEnded(host, exits=found) for host, found in zip(HOSTS, exits)))
    assert story.job.state is State.SUCCEEDED and set(story.job.nodes[0].exits) == {0, 1}


def test_trouble_of_a_node_is_an_event_once_and_ends_nothing() -> None:
    trouble = endings.NodeTrouble("node1", "io-error", {"step": "logs", "errno": "EIO", "count": 1}, 7)
    story = Story(make_job()).tell(*to_running(), trouble, trouble)
    assert [event.code for event in story.events].count("io-error") == 1 and story.job.state is State.RUNNING


@pytest.mark.parametrize("is_unreachable, key", [(False, "hung"), (True, "hung-without-host")])
def test_a_hung_job_is_stopped_with_its_stacks_and_fails(is_unreachable: bool, key: str) -> None:
    hung = endings.Hung(("node2",), (2,), Text("hang.x", "rank 2 is stopped"), is_unreachable=is_unreachable)
    story = Story(make_job()).tell(*to_running(), hung, hung)
    assert story.actions.count(draft.StopNodes(HOSTS, now=False, grace_s=HUNG_GRACE_S, hung=True)) == 1
    assert (story.job.cause, story.job.reason.code, story.job.reason.ranks) == (Cause.HUNG, key, (2,))
    stop = next(event for event in story.events if event.values.get("state") == "STOPPING")
    assert (stop.hosts, stop.ranks) == (("node2",), (2,))
    story.tell(*(ended(rank, 134, stopped=True) for rank in range(4)))
    story.tell(*(endings.NodeEnded(host) for host in HOSTS))
    assert (story.job.state, story.job.reason.code) == (State.FAILED, key)


def test_separate_trainings_fail_the_job_without_a_restart() -> None:
    policy = RestartPolicy(max_restarts=3, window_s=3600)
    late = endings.TrainsSeparately(0, "node1", 2)
    story = Story(make_job(policy=policy)).tell(*to_running(), late)
    assert story.job.state is State.RUNNING, "of an earlier attempt"
    story.tell(endings.TrainsSeparately(1, "node1", 2))
    assert (story.job.state, story.job.cause) == (State.STOPPING, Cause.FAILURE)
    story.tell(*(ended(rank, 143, stopped=True) for rank in range(4)))
    story.tell(*(endings.NodeEnded(host) for host in HOSTS))
    assert story.job.state is State.FAILED
    assert [event.values["finding"] for event in story.events if event.code == "gave-up"] == ["separate-trainings"]


@pytest.mark.parametrize("events", [[], [inputs.StopRequested(now=False)]])
def test_a_job_that_does_not_run_is_not_hung(events: list[JobInput]) -> None:
    story = Story(make_job()).tell(*(to_running() if events else ()), *events)
    before = story.job
    assert story.tell(endings.Hung((), (), Text("hang.x", "x"))).job == before


@pytest.mark.parametrize(
    "late",
    [
        inputs.NodeReported("node1", "b1", 0.0),
        inputs.NodeStaged("node1"),
        inputs.NodeReady("node1", 29400),
        inputs.RankStarted("node1", 0, 100),
        ended(0, 3),
        endings.RankHungAtExit("node1", 0, "x", 1.0),
        endings.StartFailed("node1", 0, "x"),
        endings.NodeEnded("node1"),
        endings.LeftoversGone("node1"),
        endings.NodeLost("node1", "by-user"),
        endings.SupervisorLost("node1"),
        endings.StopStarted("node1", "node", "x", 1.0),
        endings.NodeTrouble("node1", "x", {}, 1),
    ],
)
@pytest.mark.parametrize("state", [State.QUEUED, State.CHECKING, State.STARTING, State.RUNNING])
def test_what_arrives_from_a_host_that_the_attempt_does_not_use_changes_nothing(late: Any, state: State) -> None:
    """A host of the attempt before is asked and answers while the next one is placed elsewhere."""
    nodes = () if state is State.QUEUED else (NodeProgress("node2", 0, Phase.STARTED, (0,)),)
    job = make_job(state=state, attempt=2, pool=HOSTS, hosts=tuple(node.host for node in nodes), nodes=nodes)
    assert advance(job, late, now_s=5.0) == Step(job)


def test_a_job_that_starts_without_its_spares_says_so() -> None:
    placed = inputs.NodesFree(HOSTS, spares=("node3",))
    for wanted, said in ((2, [{"found": 1, "count": 2}]), (1, [])):
        story = Story(make_job(request=Request(2, spares=wanted))).tell(placed)
        assert [event.values for event in story.events if event.code == "spares-missing"] == said


def test_a_silent_node_does_not_end_a_running_job() -> None:
    story = Story(make_job()).tell(*to_running())
    for _ in range(5000):
        story.tell(inputs.Tick(frozenset({"node1"})))
    assert story.job.state is State.RUNNING


def test_a_stop_names_the_node_that_could_not_confirm_and_clears_it_when_it_answers() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=False), endings.NodeEnded("node1"))
    story.now_s += 30 + CONFIRM_S
    story.tell(inputs.Tick(frozenset({"node1"})))
    assert story.job.state is State.STOPPED
    assert story.job.unconfirmed == ("node2",)
    assert isinstance(resume(story.job, now_s=0.0).actions[0], draft.StopNodes)
    story.tell(endings.NodeEnded("node2"))
    assert story.job.unconfirmed == ()
    assert story.job.state is State.STOPPED


def test_a_reachable_node_that_is_slow_to_end_keeps_the_job_stopping() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=False), endings.NodeEnded("node1"))
    story.now_s += 30 + CONFIRM_S
    story.tell(inputs.Tick(frozenset(HOSTS)))
    assert story.job.state is State.STOPPING
    story.now_s += CONFIRM_S
    story.tell(inputs.Tick(frozenset(HOSTS)))
    assert story.job.state is State.STOPPED, "but not for ever"
    assert story.job.unconfirmed == ("node2",)


def test_a_stop_does_not_wait_again_for_a_node_that_was_silent_before() -> None:
    grace_s = 30.0
    story = Story(make_job(grace_s=grace_s)).tell(
        *to_running(), inputs.StopRequested(now=False), endings.NodeEnded("node1")
    )
    silent = inputs.Tick(frozenset({"node1"}), quiet_s={"node2": 10 * CONFIRM_S})
    story.now_s += grace_s - 10
    story.tell(silent)
    assert story.job.state is State.STOPPING, "it may still hear the stop, and save"
    story.now_s += 10
    story.tell(inputs.Tick(frozenset({"node1"}), quiet_s={"node2": CONFIRM_S - 1}))
    assert story.job.state is State.STOPPING
    story.tell(silent)
    assert (story.job.state, story.job.unconfirmed) == (State.STOPPED, ("node2",))


def test_a_stop_without_grace_waits_no_grace_for_a_silent_node() -> None:
    story = Story(make_job(grace_s=3000)).tell(
        *to_running(), inputs.StopRequested(now=True), endings.NodeEnded("node1")
    )
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
    story = Story(make_job()).tell(*to_running(), endings.NodeLost("node2", "rebooted"), endings.NodeEnded("node1"))
    assert story.job.state is State.FAILED
    assert (story.job.reason.code, story.job.reason.hosts) == ("node-rebooted", ("node2",))


def test_a_node_whose_folder_vanished_is_lost_although_its_boot_id_is_the_same() -> None:
    story = Story(make_job()).tell(
        *to_running(), endings.NodeLost("node2", "directory-gone"), endings.NodeEnded("node1")
    )
    assert story.job.state is State.FAILED and story.job.cause is Cause.NODE_LOST
    assert (story.job.reason.code, story.job.reason.hosts) == ("node-directory-gone", ("node2",))
    assert story.job.node("node2").lost == "directory-gone"
    assert [(event.hosts, event.values["why"]) for event in story.events if event.code == "node-lost"] == [
        (("node2",), "directory-gone")
    ]


@pytest.mark.parametrize("why", sorted(LOST))
def test_a_lost_node_ends_what_was_unconfirmed_there(why: str) -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=True), endings.NodeEnded("node1"))
    story.now_s += 100.0
    story.tell(inputs.Tick(frozenset({"node1"})))
    assert (story.job.state, story.job.unconfirmed) == (State.STOPPED, ("node2",))
    story.tell(endings.NodeLost("node2", why))
    assert (story.job.state, story.job.unconfirmed, story.job.node("node2").lost) == (State.STOPPED, (), why)
    assert story.job.first_failure is None, "the job had ended before"


def test_processes_that_survive_a_kill_hold_their_host_after_the_end_until_they_are_gone() -> None:
    stuck = Leftover(50, 1234, "python", "D", "fuse_wait_answer", 7)
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=True), endings.NodeEnded("node1"))
    story.tell(endings.NodeEnded("node2", (stuck,)), endings.NodeEnded("node2"))
    assert (story.job.state, story.job.held_hosts) == (State.STOPPED, ("node2",))
    assert load_job(json.loads(json.dumps(dump_job(story.job)))).node("node2").leftovers == (stuck,)
    remain = [event for event in story.events if event.code == "processes-remain"]
    assert [(event.hosts, event.values["pids"]) for event in remain] == [(("node2",), [50])]
    assert remain[0].values["processes"][0]["wait_channel"] == "fuse_wait_answer"
    story.tell(endings.LeftoversGone("node2"), endings.LeftoversGone("node2"))
    assert (story.job.state, story.job.held_hosts) == (State.STOPPED, ())
    assert [event.hosts for event in story.events if event.code == "leftovers-gone"] == [("node2",)]


def test_ranks_not_alive_by_the_deadline_fail_the_start_and_are_named() -> None:
    events = to_running()[:-2]
    story = Story(make_job()).tell(*events)
    story.now_s += 60
    story.tell(inputs.Tick(frozenset(HOSTS)))
    assert story.job.state is State.STOPPING
    assert story.job.reason.hosts == ("node2",)


def test_a_stop_in_the_queue_touches_no_node() -> None:
    story = Story(make_job()).tell(inputs.StopRequested(now=False))
    assert story.job.state is State.STOPPED
    assert story.actions == []


def test_a_second_harsher_stop_is_passed_on_once() -> None:
    story = Story(make_job()).tell(*to_running(), inputs.StopRequested(now=False), inputs.StopRequested(now=True))
    assert isinstance(story.actions[-1], draft.StopNodes) and story.actions[-1].now
    assert advance(story.job, inputs.StopRequested(now=True), now_s=99.0).actions == ()


def test_a_job_succeeds_only_when_every_node_is_empty() -> None:
    story = Story(make_job()).tell(*to_running(), *(ended(rank) for rank in range(4)), endings.NodeEnded("node1"))
    assert story.job.state is State.RUNNING
    story.tell(endings.NodeEnded("node2"))
    assert story.job.state is State.SUCCEEDED
    assert story.states == [State.QUEUED, State.CHECKING, State.STAGING, State.STARTING, State.RUNNING, State.SUCCEEDED]


def test_ranks_so_short_that_they_end_before_all_nodes_started_still_succeed() -> None:
    events = to_running()
    story = Story(make_job()).tell(*events[:-2], ended(0), ended(1), endings.NodeEnded("node1"))
    assert story.job.state is State.STARTING
    story.tell(*events[-2:], ended(2), ended(3), endings.NodeEnded("node2"))
    assert story.job.state is State.SUCCEEDED


def test_a_new_controller_begins_an_unfinished_start_again_as_the_next_attempt() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.NodeReady("node1", 29400))
    story.take(resume(story.job, now_s=50.0))
    assert story.job.state is State.QUEUED
    assert story.job.attempt == 2
    assert story.job.run_id == "head-j-0001.2"
    assert State.BACKOFF in story.states
    assert story.actions == [draft.AbortNodes("head-j-0001.1", HOSTS)], (
        "what the old attempt had reserved is given back"
    )


# --- devices and ports that something else uses ---


def tick(story: Story, at_s: float) -> Story:
    story.take(advance(story.job, inputs.Tick(frozenset(HOSTS)), now_s=at_s))
    return story


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_what_is_held_by_others_returns_the_job_to_the_queue_and_uses_no_restart(steps: int) -> None:
    events = [event for event in to_starting() if steps == 6 or not isinstance(event, inputs.NodeStaged)][:steps]
    story = Story(make_job()).tell(*events, inputs.Held("node2", "NPU 3 is in use", "theirs-j-0007.1"))
    assert story.job.state is State.BACKOFF and story.job.past == () and story.job.cause is Cause.HELD
    assert draft.AbortNodes("head-j-0001.1", HOSTS) in story.actions
    assert [(e.hosts, e.values["by"]) for e in story.events if e.code == "held"] == [(("node2",), "theirs-j-0007.1")]
    assert story.job.not_before_s is not None
    assert tick(story, story.job.not_before_s - 0.1).job.state is State.BACKOFF
    assert tick(story, story.job.not_before_s).job.state is State.QUEUED
    assert (story.job.attempt, story.job.cause, story.job.nodes) == (2, None, ())
    assert story.job.unstarted == 1, "nothing was started"


def test_pauses_grow_to_a_limit_and_start_again_after_go() -> None:
    story, pauses = Story(make_job()), []
    for _ in range(9):
        story.tell(inputs.NodesFree(HOSTS), inputs.Held("node1", "in use"))
        assert story.job.not_before_s is not None
        pauses.append(story.job.not_before_s - story.now_s)
        story.now_s = story.job.not_before_s
        tick(story, story.now_s)
    first, last = HELD_S
    assert all(0.75 * pause <= found <= 1.25 * pause for pause, found in zip((5, 10, 20, 40, 80, 160), pauses))
    assert pauses[0] >= 0.75 * first and 0.75 * last <= pauses[-1] <= 1.25 * last
    story.tell(*to_starting(), inputs.NodeReady("node1", 29400), inputs.NodeReady("node2", None))
    assert story.job.go_sent_at_s is not None and story.job.refusals == 0


def test_a_user_stops_a_job_that_waits_for_others() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.Held("node1", "in use"), inputs.StopRequested(False))
    assert (story.job.state, story.job.cause) == (State.STOPPED, Cause.USER)
    started = to_running()[:-2]
    story = Story(make_job()).tell(*started, inputs.Held("node2", "in use"), inputs.StopRequested(False))
    assert story.job.state is State.STOPPING
    story.tell(endings.NodeEnded("node1"), endings.NodeEnded("node2"))
    assert story.job.state is State.STOPPED


def test_the_lowest_block_of_ports_that_all_nodes_hold_is_the_base_without_one_the_job_waits() -> None:
    ready = inputs.NodeReady("node1", 29400, (61024, 61056, 61088)), inputs.NodeReady("node2", None, (61088, 61056))
    story = Story(make_job()).tell(*to_starting(), *ready)
    assert story.job.hccl_base == 61056 and story.actions == [draft.StartNodes()]
    assert load_job(json.loads(json.dumps(dump_job(story.job)))).nodes == story.job.nodes
    none = inputs.NodeReady("node2", None, (61120,))
    story = Story(make_job()).tell(*to_starting(), ready[0], none)
    assert story.job.state is State.BACKOFF and story.job.go_sent_at_s is None
    assert story.job.reason.code == "no-common-ports"


def test_a_new_controller_says_go_again_when_go_was_decided() -> None:
    story = Story(make_job()).tell(*to_running()[:8])
    assert story.job.go_sent_at_s is not None and story.job.state is State.STARTING
    assert resume(story.job, now_s=50.0).actions == (draft.StartNodes(),)


def test_an_event_told_twice_changes_nothing() -> None:
    story = Story(make_job())
    for event in (*to_running(), ended(0), endings.NodeEnded("node1"), ended(2), ended(3), endings.NodeEnded("node2")):
        if isinstance(event, (inputs.RankStarted, endings.RankExited, endings.NodeEnded)):
            story.tell(event)
            again = advance(story.job, event, now_s=story.now_s)
            assert (again.job, again.actions) == (story.job, ())
        else:
            story.tell(event)


def test_an_illegal_move_raises_with_the_story() -> None:
    draft = Draft(make_job(state=State.SUCCEEDED), 1.0, lambda: ["state: SUCCEEDED: all 4 ranks exited 0"])
    with pytest.raises(InvalidTransitionError, match="SUCCEEDED -> RUNNING.*all 4 ranks exited 0"):
        draft.transition(State.RUNNING, "by mistake")


def any_event(rng: random.Random) -> JobInput:
    host, rank = rng.choice(HOSTS), rng.randrange(4)
    host = "node1" if rank < 2 else "node2"
    choices: Sequence[JobInput] = (
        inputs.NodesFree(HOSTS),
        inputs.WaitingForNodes("held"),
        inputs.NodeReported(host, "b", 0.0),
        inputs.Planned({"node1": (0, 1), "node2": (2, 3)}, 4),
        inputs.NodeStaged(host),
        inputs.NodeReady(host, 29400),
        inputs.NodeReady(host, 29400, rng.choice(((61024,), (61056,), (61024, 61056)))),
        inputs.Refused(host, "no"),
        inputs.Held(host, "NPU 3 is in use"),
        inputs.RankStarted(host, rank, 1),
        ended(rank),
        ended(rank, 3),
        endings.NodeEnded(host),
        endings.NodeEnded(host, (Leftover(50),)),
        endings.LeftoversGone(host),
        endings.NodeLost(host, rng.choice(("rebooted", "directory-gone", "by-user"))),
        endings.SupervisorLost(host),
        inputs.StopRequested(rng.random() < 0.5),
        inputs.Tick(frozenset(rng.sample(HOSTS, rng.randrange(3)))),
        endings.StartFailed(host, rank, "no such file"),
        endings.StopStarted(host, "limit", "max_s", 1.0),
        endings.RankHungAtExit(host, rank, "idle"),
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
            event, (inputs.NodesFree, inputs.WaitingForNodes, inputs.StopRequested, inputs.Tick)
        ):
            continue  # nothing on the nodes can speak of a job that was never looked at
        story.tell(event)
        if before.is_terminal:
            assert story.job.state is before.state
        if story.job.state is State.RUNNING:
            assert all(node.phase in (Phase.STARTED, Phase.ENDED) for node in story.job.nodes)
    assert all(target in TRANSITIONS[source] for source, target in zip(story.states, story.states[1:]))


OTHER = FirstFailure(because("rank-killed", ["node1"], [1], signal=9), "certain")
"""What the diagnosis finds where the exits name rank 2."""


def failed_by_its_exits() -> Story:
    ends = [ended(2, 3), endings.NodeEnded("node1"), endings.NodeEnded("node2")]
    return Story(make_job()).tell(*to_running(), *ends)


def test_a_failed_job_shows_the_exits_until_its_diagnosis_is_there_and_then_that() -> None:
    story = failed_by_its_exits()
    quick = because("rank-exited", ["node2"], [2], code=3)
    assert (story.job.state, story.job.first_failure) == (State.FAILED, FirstFailure(quick, "preliminary"))
    assert draft.Judge(1) in story.actions
    assert resume(story.job, now_s=9.0).actions == (draft.Judge(1),), "another controller diagnoses it"
    story.tell(endings.Diagnosed(1, Failure(Kind.OOM, "host-oom", ("node1",), (1,), "certain"), None, OTHER))
    assert (story.job.first_failure, story.job.reason) == (OTHER, OTHER.reason)
    [event] = [event for event in story.events if event.code == "diagnosed"]
    assert (event.hosts, event.ranks, event.values["confidence"]) == (("node1",), (1,), "certain")
    assert resume(story.job, now_s=9.0).actions == ()


def test_a_later_diagnosis_replaces_the_first_and_a_failed_one_is_said_to_be_unknown() -> None:
    story = failed_by_its_exits().tell(endings.Diagnosed(1, Failure(Kind.UNKNOWN, "unknown")))
    assert story.job.first_failure is not None and story.job.first_failure.confidence == "unknown"
    story.tell(endings.Diagnosed(1, Failure(Kind.OOM, "host-oom", ("node1",), (1,), "certain"), None, OTHER))
    assert story.job.first_failure == OTHER


def test_the_clock_of_a_host_that_is_behind_does_not_make_its_rank_the_first() -> None:
    """Rank 0 of node1, which is 60 s behind, follows rank 2: by its own clock it would be first."""
    nodes = tuple(
        NodeProgress(host, k, ranks=(2 * k,), exits={2 * k: Exit(1, None, at_ns)})
        for k, (host, at_ns) in enumerate([("node1", 41 * 10**9), ("node2", 100 * 10**9)])
    )
    found = first_failure(nodes, {"node1": -60.0, "node2": 0.0}, forks=False)
    assert found is not None and (found.hosts, found.ranks) == (("node2",), (2,))
