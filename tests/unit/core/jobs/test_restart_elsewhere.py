"""What a job does when a node falls silent: it waits, or is restarted without that host."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.checkpoints import Listed, ResumePoint
from ascendrun.core.jobs.job import State, dump_job, load_job
from ascendrun.core.jobs.restart import Failure, Kind, RestartPolicy
from ascendrun.head.agents.node_query import choose as choose_for_job
from ascendrun.text import Text
from tests.lib.job_stories import HOSTS, Story, ended, make_job, to_running
from tests.unit.core.jobs.test_restart import REBOOTED, attempts, ends_for_node2, rebooted, restarting_job


def test_a_retry_waits_for_a_host_whose_processes_may_live() -> None:
    story = Story(make_job()).tell(*to_running(), ended(2, 3), endings.NodeEnded("node2"))
    story.now_s += 1000.0
    story.tell(inputs.Tick(), inputs.RetryRequested())
    assert story.job.state is State.BACKOFF
    story.tell(endings.NodeEnded("node1"))
    assert (story.job.state, story.job.attempt) == (State.QUEUED, 2)


@pytest.mark.parametrize(
    ("policy", "pool", "state"),
    [
        (RestartPolicy(3, has_epochs=True), (*HOSTS, "node3"), State.QUEUED),
        (RestartPolicy(3, has_epochs=True), HOSTS, State.BACKOFF),
        (RestartPolicy(3, has_epochs=True, on_unreachable_node="wait"), (*HOSTS, "node3"), State.BACKOFF),
        (RestartPolicy(3), (*HOSTS, "node3"), State.BACKOFF),
        (RestartPolicy(3, on_unreachable_node="fence"), (*HOSTS, "node3"), State.BACKOFF),
    ],
)
def test_a_silent_host_is_left_behind_only_if_its_checkpoints_are_fenced_and_others_are_enough(
    policy: RestartPolicy, pool: tuple[str, ...], state: State
) -> None:
    story = Story(make_job(policy=policy, pool=pool)).tell(*to_running(), ended(2, 3), endings.NodeEnded("node2"))
    story.now_s += 1000.0
    story.tell(inputs.Tick(frozenset({"node2"})), endings.Diagnosed(1, REBOOTED))
    story.now_s += 1000.0
    story.tell(inputs.Tick(frozenset({"node2"})))
    assert story.job.state is state
    assert [event.hosts for event in story.events if event.code == "host-fenced"] == (
        [("node1",)] if state is State.QUEUED else []
    )


@pytest.mark.parametrize(("pool", "state"), [((*HOSTS, "node3"), State.QUEUED), (HOSTS, State.BACKOFF)])
def test_a_silent_host_is_left_behind_when_its_lease_has_expired(pool: tuple[str, ...], state: State) -> None:
    policy = RestartPolicy(3, on_unreachable_node="fence")
    story = Story(make_job(policy=policy, pool=pool)).tell(*to_running(), ended(2, 3), endings.NodeEnded("node2"))
    story.now_s += 1000.0
    reachable = frozenset({"node2"})
    story.tell(inputs.Tick(reachable), endings.Diagnosed(1, REBOOTED))
    story.now_s += 1000.0
    story.tell(inputs.Tick(reachable, frozenset({"node2"})))
    assert story.job.state is State.BACKOFF, "the lease of another host"
    story.tell(inputs.Tick(reachable, frozenset({"node1"})))
    assert story.job.state is state
    fenced = [event.values for event in story.events if event.code == "host-fenced"]
    assert fenced == ([{"by": "lease"}] if state is State.QUEUED else [])


def test_a_node_that_ended_its_ranks_without_the_head_uses_no_restart() -> None:
    story = Story(restarting_job()).tell(*to_running(), endings.StopStarted("node1", "fence", "away", 1.0))
    story.tell(endings.NodeEnded("node1"), endings.NodeEnded("node2"))
    story.tell(endings.Diagnosed(1, Failure(Kind.PREEMPTED, "preempted", confidence="certain")))
    assert story.job.state is State.BACKOFF and not story.job.past[-1].counted


def test_a_wait_for_the_only_copy_of_a_checkpoint_ends_when_its_host_is_given_up() -> None:
    (past,) = attempts(REBOOTED)
    story = Story(restarting_job(attempt=2, past=(replace(past, hosts=("node1", "node9")),), pool=(*HOSTS, "node9")))
    story.tell(to_running()[0], inputs.ResumeLost(12, ("node9",)))
    assert (story.job.state, story.job.reason.code) == (State.BACKOFF, "only-copy")
    story.tell(inputs.HostGivenUp("node7", "wang"))
    assert story.job.state is State.BACKOFF and not story.job.lost_hosts, "no attempt used it"
    story.tell(inputs.HostGivenUp("node9", "wang"), inputs.HostGivenUp("node9", "wang"))
    assert (story.job.state, story.job.lost_hosts) == (State.QUEUED, ("node9",))
    assert [event.code for event in story.events].count("host-given-up") == 1
    assert load_job(json.loads(json.dumps(dump_job(story.job)))).lost_hosts == ("node9",)
    listings = {host: (Listed("deepspeed", "/c/5", 5),) for host in HOSTS}
    answer = choose_for_job(story.job, HOSTS, listings)
    assert isinstance(answer, ResumePoint) and answer.step == 5
    story.tell(inputs.NodesFree(("node1", "node9")))
    assert story.job.lost_hosts == (), "it is back"


def test_a_host_that_responds_is_never_left_behind() -> None:
    policy = RestartPolicy(3, has_epochs=True)
    story = Story(make_job(policy=policy, pool=(*HOSTS, "node3"))).tell(*to_running(), ended(2, 3))
    story.tell(endings.NodeEnded("node2"), endings.Diagnosed(1, REBOOTED))
    story.now_s += 35.0
    story.tell(inputs.Tick(frozenset(HOSTS)))
    assert story.job.state is State.STOPPING


def away(story: Story, seconds: float, *, fenced: frozenset[str] = frozenset()) -> Story:
    """node1 is silent for so long."""
    for _ in range(10):
        story.now_s += seconds / 10
        story.tell(inputs.Tick(frozenset({"node2"}), fenced))
    return story


def cut_for_20_s(story: Story) -> Story:
    return away(story, 20).tell(inputs.Tick(frozenset(HOSTS)))


def cut_for_half_an_hour_while_its_ranks_train(story: Story) -> Story:
    return away(story, 1800)


def cut_for_ever(story: Story) -> Story:
    """Its ranks are missed by those of node2, and its lease is over."""
    hung = endings.Hung(("node1",), (0, 1), Text("x", "x"), is_unreachable=True)
    ends_for_node2(away(story, 180).tell(hung), Failure(Kind.UNKNOWN, "hang"))
    return away(story, 3600, fenced=frozenset({"node1"}))


def powered_off(story: Story) -> Story:
    """Ranks of node2 fail of it; the lease of node1 is not over."""
    return away(ends_for_node2(story.tell(ended(2, 3)), Failure(Kind.HCCL, "peer-lost", ("node1",))), 60)


def powered_off_and_given_up(story: Story) -> Story:
    return powered_off(story).tell(endings.NodeLost("node1", "by-user"), inputs.Tick(frozenset({"node2"})))


@pytest.mark.parametrize(
    ("happens", "auto", "auto_with_epochs", "wait", "fence"),
    [
        (cut_for_20_s, "RUNNING", "RUNNING", "RUNNING", "RUNNING"),
        (cut_for_half_an_hour_while_its_ranks_train, "RUNNING", "RUNNING", "RUNNING", "RUNNING"),
        (cut_for_ever, "BACKOFF", "again", "BACKOFF", "again"),
        (powered_off, "BACKOFF", "again", "BACKOFF", "BACKOFF"),
        (powered_off_and_given_up, "again", "again", "again", "again"),
        (rebooted, "again", "again", "again", "again"),
    ],
)
def test_what_a_job_does_when_a_node_falls_silent(
    happens: Any, auto: str, auto_with_epochs: str, wait: str, fence: str
) -> None:
    """docs/recovery.md, "Unreachable nodes", cell by cell; a third host is free."""
    rows = [("auto", False, auto), ("auto", True, auto_with_epochs), ("wait", False, wait), ("fence", False, fence)]
    for mode, has_epochs, expected in rows:
        policy = RestartPolicy(3, backoff_s=(1.0, 1.0), on_unreachable_node=mode, has_epochs=has_epochs)
        story = happens(Story(make_job(policy=policy, pool=(*HOSTS, "node3"))).tell(*to_running()))
        found = "again" if (story.job.state, story.job.attempt) == (State.QUEUED, 2) else story.job.state.value
        assert found == expected, mode
        waits = found == "BACKOFF" and story.job.reason.code == "waiting-for-end"
        assert waits is (expected == "BACKOFF"), "a job that waits says for whom"
