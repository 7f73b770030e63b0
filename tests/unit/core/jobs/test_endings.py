"""Ends of attempts: the first failure, stopped ranks, hosts that shut down or are lost, hangs, diagnoses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.jobs import actions, endings, inputs
from ascendrun.core.jobs.draft import HUNG_GRACE_S
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Cause, Exit, Leftover, NodeProgress, State, dump_job, load_job
from ascendrun.core.jobs.lifecycle import resume
from ascendrun.core.jobs.outcome import first_failure
from ascendrun.core.jobs.reasons import LOST, FirstFailure, because
from ascendrun.core.jobs.restart import Failure, Kind, RestartPolicy
from ascendrun.text import Text
from tests.lib.job_stories import HOSTS, Story, ended, make_job, to_running


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
    assert story.actions[-2] == actions.StopNodes(HOSTS, now=False, grace_s=30)


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


@pytest.mark.parametrize("is_unreachable, key", [(False, "hung"), (True, "hung-without-host")])
def test_a_hung_job_is_stopped_with_its_stacks_and_fails(is_unreachable: bool, key: str) -> None:
    hung = endings.Hung(("node2",), (2,), Text("hang.x", "rank 2 is stopped"), is_unreachable=is_unreachable)
    story = Story(make_job()).tell(*to_running(), hung, hung)
    assert story.actions.count(actions.StopNodes(HOSTS, now=False, grace_s=HUNG_GRACE_S, hung=True)) == 1
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


@pytest.mark.parametrize("why", ["rebooted", "directory-gone"])
def test_a_lost_node_is_a_fact_that_fails_the_job(why: str) -> None:
    story = Story(make_job()).tell(*to_running(), endings.NodeLost("node2", why), endings.NodeEnded("node1"))
    assert story.job.state is State.FAILED and story.job.cause is Cause.NODE_LOST
    assert (story.job.reason.code, story.job.reason.hosts) == (f"node-{why}", ("node2",))
    assert story.job.node("node2").lost == why
    told = [(event.hosts, event.values["why"]) for event in story.events if event.code == "node-lost"]
    assert told == [(("node2",), why)]


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


OTHER = FirstFailure(because("rank-killed", ["node1"], [1], signal=9), "certain")
"""What the diagnosis finds where the exits name rank 2."""


def failed_by_its_exits() -> Story:
    ends = [ended(2, 3), endings.NodeEnded("node1"), endings.NodeEnded("node2")]
    return Story(make_job()).tell(*to_running(), *ends)


def test_a_failed_job_shows_the_exits_until_its_diagnosis_is_there_and_then_that() -> None:
    story = failed_by_its_exits()
    quick = because("rank-exited", ["node2"], [2], code=3)
    assert (story.job.state, story.job.first_failure) == (State.FAILED, FirstFailure(quick, "preliminary"))
    assert actions.Judge(1) in story.actions
    assert resume(story.job, now_s=9.0).actions == (actions.Judge(1),), "another controller diagnoses it"
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


def served() -> Story:
    """A running job whose node2 serves the ranks of node1."""
    events = [replace(one, serving=("node2",)) if isinstance(one, inputs.Planned) else one for one in to_running()]
    return Story(make_job(policy=RestartPolicy(max_restarts=3))).tell(*events)


WORK = (ended(0), ended(1), endings.NodeEnded("node1"))


def cut(rank: int, *, at_ns: int = 9, stopped: bool = True) -> endings.RankExited:
    return endings.RankExited("node2", rank, Exit(None, 15, at_ns, stopped))


def test_a_node_that_serves_is_stopped_when_the_work_is_complete_and_its_end_is_no_failure() -> None:
    story = served().tell(*WORK)
    assert (story.job.state, story.job.cause, story.job.reason.code) == (State.STOPPING, Cause.COMPLETED, "completed")
    assert story.actions[-1] == actions.StopNodes(("node2",), now=False, grace_s=30)
    assert resume(load_job(json.loads(json.dumps(dump_job(story.job)))), now_s=9.0).actions == (story.actions[-1],)
    story.tell(cut(2), endings.RankExited("node2", 3, Exit(1, None, 9)), endings.NodeEnded("node2"))
    assert (story.job.state, story.job.first_failure, story.job.reason.code) == (State.SUCCEEDED, None, "completed")
    assert not any(isinstance(one, actions.Judge) for one in story.actions)


def test_a_node_that_serves_and_exits_0_ends_nothing() -> None:
    story = served().tell(ended(2), ended(3), endings.NodeEnded("node2"), ended(0), ended(1))
    assert story.job.state is State.RUNNING
    assert story.tell(endings.NodeEnded("node1")).job.state is State.SUCCEEDED
    assert State.STOPPING not in story.states


def test_a_node_that_serves_fails_the_job_while_there_is_work() -> None:
    story = served().tell(ended(0), ended(2, 7))
    assert (story.job.state, story.job.cause) == (State.STOPPING, Cause.FAILURE)
    story.tell(ended(1, stopped=True), *(endings.NodeEnded(host) for host in HOSTS))
    assert story.job.state is State.STOPPING and story.job.first_failure == FirstFailure(
        because("rank-exited", ["node2"], [2], code=7)
    )


@pytest.mark.parametrize("is_stopped", [False, True])
def test_work_that_is_complete_without_a_stop_is_a_success_also_if_the_end_of_a_server_is_known_first(
    is_stopped: bool,
) -> None:
    """As after a time without a controller: it loses those that it serves. Clocks of busy hosts do not decide."""
    work = [ended(rank, stopped=is_stopped) for rank in (0, 1)]
    story = served().tell(ended(3, 1), endings.NodeEnded("node2"), *work, endings.NodeEnded("node1"))
    assert (story.job.state, story.job.first_failure is None) == (
        (State.STOPPING, False) if is_stopped else (State.SUCCEEDED, True)
    )
    story.tell(endings.Diagnosed(1, Failure(Kind.UNKNOWN, "unknown"), first=FirstFailure(because("stopped-by-user"))))
    assert story.job.state is (State.BACKOFF if is_stopped else State.SUCCEEDED)


def test_a_server_without_a_proven_end_holds_its_host_and_not_the_job() -> None:
    story = served().tell(*WORK, *[inputs.Tick()] * 70)
    assert (story.job.state, story.job.unconfirmed) == (State.SUCCEEDED, ("node2",))
    story.tell(endings.NodeEnded("node2", exits={2: Exit(137, None, 70)}))
    assert (story.job.state, story.job.unconfirmed, story.job.first_failure) == (State.SUCCEEDED, (), None)


def test_a_lost_server_after_the_work_changes_nothing() -> None:
    story = served().tell(*WORK, endings.NodeLost("node2", "rebooted"))
    assert (story.job.state, story.job.first_failure) == (State.SUCCEEDED, None)
