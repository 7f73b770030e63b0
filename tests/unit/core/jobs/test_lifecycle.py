"""A job's life as stories: events in, records and actions out."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.jobs import actions, endings, inputs
from ascendrun.core.jobs.draft import CONFIRM_S, HELD_S, TRANSITIONS, Draft, InvalidTransitionError, Step
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Cause, Job, Leftover, NodeProgress, Phase, Request, State, dump_job, load_job
from ascendrun.core.jobs.lifecycle import advance, resume
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.restart import PastAttempt
from tests.lib.job_stories import HOSTS, Story, ended, make_job, to_running, to_starting


def test_nobody_is_told_go_while_one_node_is_not_ready() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.NodeReady("node1", 29400))
    assert actions.StartNodes() not in story.actions
    assert story.job.go_sent_at_s is None


def test_one_refusal_and_nobody_starts() -> None:
    story = Story(make_job()).tell(
        *to_starting(), inputs.NodeReady("node1", 29400), inputs.Refused("node2", "port 29500 is taken")
    )
    assert story.job.state is State.FAILED
    assert story.actions == [actions.ForgetReplies(), actions.AbortNodes("head-j-0001.1", HOSTS)]
    refusal = because("on-host", ["node2"], why="port 29500 is taken")
    assert story.job.reason == because("preflight-failed", why=refusal)


def pooled(*pool: str, nodes: int = 2, **changes: Any) -> Job:
    return make_job(hosts=(), pool=pool, request=Request(nodes), **changes)


def test_a_host_that_is_not_ready_is_passed_over_and_the_job_placed_again() -> None:
    story = Story(pooled("node1", "node2", "node3")).tell(*to_starting(), inputs.Refused("node2", "no disk"))
    assert (story.job.state, story.job.attempt, story.job.hosts) == (State.QUEUED, 2, ())
    gone = [actions.ForgetReplies(), actions.AbortNodes("head-j-0001.1", HOSTS)]
    assert story.actions == gone, "what was prepared is given back"
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
    story.tell(inputs.HoldChanged(None, "li"), inputs.HoldChanged(None, "li"))
    assert story.job.held_by is None
    assert [(event.code, event.values) for event in story.events] == [
        ("hold-started", {"by": "wang"}),
        ("hold-ended", {"by": "wang", "ended_by": "li"}),
    ]


def test_a_node_that_gets_ready_after_another_refused_is_told_to_forget_it() -> None:
    story = Story(make_job()).tell(*to_starting(), inputs.Refused("node2", "no"), inputs.NodeReady("node1", 29400))
    assert story.actions == [actions.AbortNodes("head-j-0001.1", ("node1",))]


def test_a_failed_rank_stops_every_node_and_the_job_fails_when_all_are_empty() -> None:
    story = Story(make_job()).tell(*to_running(), ended(2, 3))
    assert story.job.state is State.STOPPING
    assert isinstance(story.actions[-2], actions.StopNodes) and story.actions[-2].hosts == HOSTS
    story.tell(ended(0, 1, stopped=True), endings.NodeEnded("node2"))
    assert story.job.state is State.STOPPING
    story.tell(endings.NodeEnded("node1"))
    assert story.job.state is State.FAILED
    assert story.job.reason == because("rank-exited", ["node2"], [2], code=3)


def test_trouble_of_a_node_is_an_event_once_and_ends_nothing() -> None:
    trouble = endings.NodeTrouble("node1", "io-error", {"step": "logs", "errno": "EIO", "count": 1}, 7)
    story = Story(make_job()).tell(*to_running(), trouble, trouble)
    assert [event.code for event in story.events].count("io-error") == 1 and story.job.state is State.RUNNING


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
    assert isinstance(resume(story.job, now_s=0.0).actions[0], actions.StopNodes)
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
    assert isinstance(story.actions[-1], actions.StopNodes) and story.actions[-1].now
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
    assert story.actions == [actions.ForgetReplies(), actions.AbortNodes("head-j-0001.1", HOSTS)], (
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
    assert actions.AbortNodes("head-j-0001.1", HOSTS) in story.actions
    assert [(e.hosts, e.values["by"]) for e in story.events if e.code == "held"] == [(("node2",), "theirs-j-0007.1")]
    assert story.job.not_before_s is not None
    assert tick(story, story.job.not_before_s - 0.1).job.state is State.BACKOFF
    assert tick(story, story.job.not_before_s).job.state is State.QUEUED
    assert (story.job.attempt, story.job.cause, story.job.nodes) == (2, None, ())


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
    assert story.job.hccl_base == 61056 and story.actions == [actions.StartNodes()]
    assert load_job(json.loads(json.dumps(dump_job(story.job)))).nodes == story.job.nodes
    none = inputs.NodeReady("node2", None, (61120,))
    story = Story(make_job()).tell(*to_starting(), ready[0], none)
    assert story.job.state is State.BACKOFF and story.job.go_sent_at_s is None
    assert story.job.reason.code == "no-common-ports"


def test_a_new_controller_says_go_again_when_go_was_decided() -> None:
    story = Story(make_job()).tell(*to_running()[:8])
    assert story.job.go_sent_at_s is not None and story.job.state is State.STARTING
    assert resume(story.job, now_s=50.0).actions == (actions.StartNodes(),)


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
        inputs.Planned({"node1": (0, 1), "node2": (2, 3)}, 4, rng.choice(((), ("node2",)))),
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


def small(**changes: Any) -> Story:
    """A job that requested three hosts and runs on two."""
    job = make_job(pool=(*HOSTS, "node3"), request=Request(3, min_nodes=1), **changes)
    return Story(job).tell(*to_running(), inputs.SparesFree(("node3",)))


def test_a_job_that_runs_on_fewer_hosts_grows_after_the_checkpoint_that_follows() -> None:
    story = small()
    assert (story.job.state, story.job.spares) == (State.RUNNING, ("node3",))
    story.tell(inputs.GrowthPossible(("node3",), 40), inputs.GrowthPossible(("node3",), 40))
    assert story.job.state is State.RUNNING
    [event] = [event for event in story.events if event.code == "grows-later"]
    assert (event.hosts, event.values) == (("node3",), {"found": 2, "count": 3})
    story.tell(inputs.GrowthPossible(("node3",), 50))
    assert (story.job.state, story.job.cause) == (State.STOPPING, Cause.RESIZED)
    stop = next(action for action in story.actions if isinstance(action, actions.StopNodes))
    assert stop.grace_s == story.job.grace_s, "they may save"
    story.tell(*(endings.NodeEnded(host) for host in HOSTS))
    assert (story.job.state, story.job.attempt, story.job.grows_after) == (State.QUEUED, 2, None)
    assert story.job.past[-1].counted is False
    story.tell(inputs.NodesFree((*HOSTS, "node3")))
    assert [event.attempt for event in story.events if event.code == "nodes-missing"] == [1]


def test_a_host_that_is_gone_before_the_checkpoint_is_forgotten() -> None:
    story = small().tell(inputs.GrowthPossible(("node3",), 40), inputs.GrowthPossible(()))
    assert story.job.grows_after is None
    assert story.tell(inputs.GrowthPossible(("node3",), 90)).job.state is State.RUNNING, "its next checkpoint counts"


def test_a_preempted_job_saves_and_is_queued_again_without_a_restart() -> None:
    reason = because("preempted-by", ["node1"], job="j-9", name="high")
    story = Story(make_job()).tell(*to_running(), endings.Preempted(reason), endings.Preempted(reason))
    assert (story.job.state, story.job.cause, story.job.reason) == (State.STOPPING, Cause.REQUEUED, reason)
    [stop] = [action for action in story.actions if isinstance(action, actions.StopNodes)]
    assert stop.grace_s == story.job.grace_s
    story.tell(*(endings.NodeEnded(host) for host in HOSTS))
    assert (story.job.state, story.job.attempt, story.job.past[-1].counted) == (State.QUEUED, 2, False)
    assert story.tell(endings.Preempted(reason)).job.state is State.QUEUED, "it arrived late"


@pytest.mark.parametrize("cause", [Cause.RESIZED, Cause.REQUEUED, Cause.PASSED_OVER])
def test_a_stop_of_the_user_ends_a_job_that_is_being_placed_again(cause: Cause) -> None:
    story = small()
    story.job = replace(story.job, state=State.STOPPING, cause=cause)
    story.tell(inputs.StopRequested("ann"), *(endings.NodeEnded(host) for host in HOSTS))
    assert story.job.state is State.STOPPED


def test_a_job_that_starts_without_some_hosts_tells_how_many() -> None:
    story = Story(make_job(request=Request(3, spares=1, min_nodes=2))).tell(inputs.NodesFree(HOSTS))
    [event] = [event for event in story.events if event.code in ("nodes-missing", "spares-missing")]
    assert (event.code, event.values) == ("nodes-missing", {"found": 2, "count": 3})
