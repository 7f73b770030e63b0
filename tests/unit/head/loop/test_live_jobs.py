"""What nodes say of live jobs' files, and where it is told."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core import node_messages
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.checkpoints import ResumePoint
from ascendrun.core.jobs.endings import Diagnosed
from ascendrun.core.jobs.inputs import HoldChanged, NodeStaged, RankStarted, ResumeChosen, Tick
from ascendrun.core.jobs.job import Cause, NodeProgress, Phase, State
from ascendrun.core.jobs.restart import Failure, Kind, PastAttempt, RestartPolicy
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.live_jobs import LiveJobs
from ascendrun.head.protocol.agent_bootstrap import AgentImage
from ascendrun.head.protocol.file_messages import FileLimited, FileTruncated, FileUnreadable
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.head.survey.submission import Submission, make_job
from tests.lib.demo_jobs import add_job
from tests.lib.small_world import Alone
from tests.unit.head.agents.test_connections import Deaf, Nowhere

CUT = FileTruncated("", "rank-0.out", 0, 10)
HELD = FileUnreadable("", "rank-0.out", 1, "Too many open files")


class FullDisk(Store):
    """Takes nothing while `is_full`."""

    is_full = False

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        if self.is_full:
            raise StoreUnusableError("no space left on device")
        with super().writing() as db:
            yield db


class Live:
    """Live jobs over a real store, whose nodes nobody reaches."""

    def __init__(self, folder: Path) -> None:
        self.store = FullDisk.open(folder)
        self.links = Connections(Nowhere(), AgentImage({}), Deaf(), lambda call: call())  # type: ignore[arg-type]
        self.jobs = LiveJobs(Alone(self.store, self.links))

    def add(self, key: str) -> Any:
        """The runner of a new job on the host n1."""
        submission = Submission(key, JobSpec(name=key, command=("true",)), (Host("n1"),), (), None)
        job = add_job(self.store, key, lambda i, h: make_job(submission, i, h, 1.0))
        return self.jobs.add(job, submission)

    def close(self) -> None:
        self.links.close()
        self.store.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path)
    yield made
    made.close()


def test_what_a_node_said_is_not_lost_while_the_store_takes_nothing_and_the_head_stood_still(live: Live) -> None:
    runner = live.add("mine")
    node = NodeProgress("n1", 0, Phase.GO_SENT, (0,))
    runner.job = replace(runner.job, state=State.STARTING, go_sent_at_s=time.time(), nodes=(node,), world_size=1)
    live.store.is_full = True
    live.jobs.steps.feed(runner.job.id, RankStarted("n1", 0, 77))
    live.jobs.steps.work_off()
    live.jobs.tick(was_away=True)
    live.jobs.steps.work_off()
    assert runner.job.state is State.STARTING
    live.store.is_full = False
    live.jobs.steps.feed(runner.job.id, Tick())
    live.jobs.steps.work_off()
    assert runner.job.state is State.RUNNING and live.store.jobs.find(runner.job.id).job.state is State.RUNNING


def test_a_job_for_which_an_action_cannot_be_done_ends_with_the_fault_and_the_place_of_its_trace(
    live: Live, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = live.add("mine")  # without the plan that nodes are prepared by
    node = NodeProgress("n1", 0, Phase.REPORTED, (0,))
    runner.job = replace(runner.job, state=State.STAGING, hosts=("n1",), nodes=(node,), world_size=1)
    live.jobs.steps.feed(runner.job.id, NodeStaged("n1"))
    live.jobs.steps.work_off()
    live.jobs.steps.work_off()
    job = live.store.jobs.find(runner.job.id).job
    why = job.reason.why
    assert job.is_terminal and (job.reason.code, why.code) == ("preflight-failed", "internal-error")
    assert "controller.log" in why.values["log"] and "Traceback" in capfd.readouterr().err


def test_an_internal_error_in_one_job_loses_no_input_of_the_others(
    live: Live, capfd: pytest.CaptureFixture[str]
) -> None:
    bad, good = live.add("bad"), live.add("good")
    bad.job = replace(bad.job, state=State.CHECKING, hosts=("n1",), nodes=(NodeProgress("n1", 0),))
    before = bad.job
    live.jobs.steps.feed(good.job.id, HoldChanged("wang"))
    live.jobs.steps.feed(bad.job.id, ResumeChosen(ResumePoint(5, "hf", {})))  # a checkpoint that lies nowhere
    live.jobs.steps.feed(good.job.id, HoldChanged(None))
    live.jobs.steps.feed(good.job.id, HoldChanged("li"))
    live.jobs.steps.work_off()
    assert (good.job.held_by, bad.job) == ("li", before) and "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(("trouble", "code", "generation"), [(CUT, "file-truncated", 0), (HELD, "file-unreadable", 1)])
def test_the_trouble_of_a_node_with_a_file_stands_in_the_story_of_the_job_whose_it_is(
    live: Live, trouble: FileTruncated | FileUnreadable, code: str, generation: int
) -> None:
    mine, other = live.add("mine"), live.add("other")
    live.jobs.handle_message(live.links.get(Host("n1")), replace(trouble, tag=mine.job.run_id), b"")
    event = live.jobs.steps.events_of(mine.job.id)[-1]
    assert (event.code, event.hosts, event.values["generation"]) == (code, ("n1",), generation)
    assert code not in [event.code for event in live.jobs.steps.events_of(other.job.id)]


def test_a_file_over_its_limit_is_an_event_once_for_each_file_and_attempt(live: Live) -> None:
    runner, files = live.add("mine"), ("rank-0.out", "rank-1.out")
    tags = [runner.job.run_id] * 3 + [runner.job.run_id[:-1] + "2"]
    for tag, size in zip(tags, (11, 12, 13, 11)):  # a new connection reports it again
        for file in files:
            live.jobs._record_trouble(runner, "n1", FileLimited(tag, file, 0, size, 10))
    events = [one for one in live.jobs.steps.events_of(runner.job.id) if one.code == "file-limited"]
    assert [(one.attempt, one.values["file"]) for one in events] == [*product((1, 2), files)]


@pytest.mark.parametrize(("kind", "is_closed", "strikes"), [(Kind.DEVICE, 1, 0), (Kind.HCCL, 0, 1), (Kind.INFRA, 0, 0)])
def test_a_bad_device_closes_its_machine_a_bad_link_is_a_strike_and_a_reboot_nothing(
    live: Live, kind: Kind, is_closed: int, strikes: int
) -> None:
    runner = live.add("job")
    runner.job = replace(runner.job, state=State.STOPPING, cause=Cause.FAILURE, policy=RestartPolicy(9))
    live.jobs.steps.feed(runner.job.id, Diagnosed(1, Failure(kind, "x", ("n1",), (0,), "certain")))
    live.jobs.steps.work_off()
    live.jobs.machines.tick()
    records = live.store.machines.all()
    assert sum(record.quarantine is not None for record in records) == is_closed
    assert sum(len(record.strikes) for record in records) == strikes


@pytest.mark.parametrize(("kind", "passed_over"), [(Kind.STORAGE, set()), (Kind.HCCL, {"n1"})])
def test_a_restart_after_a_storage_failure_waits_for_space(live: Live, kind: Kind, passed_over: set[str]) -> None:
    runner = live.add("full")
    past = (PastAttempt(1, ("n1",), 1.0, 2.0, Failure(kind, "x")),)
    job = replace(runner.job, state=State.STARTING, attempt=2, past=past, hosts=("n1",), nodes=(NodeProgress("n1", 0),))
    runner.job = replace(job, policy=RestartPolicy(3))
    runner.refuse("n1", node_messages.Failure("disk-full", "/ckpt is full"))
    live.jobs.steps.work_off()
    assert set(runner.job.passed_over) == passed_over
    if not passed_over:
        assert (runner.job.state, runner.job.cause, runner.job.reason.code) == (State.BACKOFF, Cause.HELD, "held")
        assert runner.job.past == past, "a wait is no attempt"


def test_a_node_that_refuses_says_which_run_has_the_device(live: Live) -> None:
    runner = live.add("waits")
    runner.job = replace(runner.job, state=State.STARTING, hosts=("n1",), nodes=(NodeProgress("n1", 0),))
    values = {"type": "npu", "device": 0, "user": "li", "tag": "aa-j-0007.1", "since_s": 1.0}
    refused = node_messages.Failure.of_node({"code": "held", "message": {"key": "device-leased", "values": values}})
    runner.refuse("n1", replace(refused, message="in other words"))
    live.jobs.steps.work_off()
    [event] = [one for one in live.jobs.steps.events_of(runner.job.id) if one.code == "held"]
    assert event.values["by"] == "aa-j-0007.1"
