"""The plan of a training is judged with the facts of each start: the first, a retry, a restart on another host."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.endings import Diagnosed, NodeEnded
from ascendrun.core.jobs.inputs import RetryRequested
from ascendrun.core.jobs.job import Cause, Job, State
from ascendrun.core.jobs.plan import PROGRAMS_TREE, Tree
from ascendrun.core.jobs.restart import Failure, Kind, RestartPolicy
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.state.job_files import read_plan
from ascendrun.node.agent import training_files
from tests.lib.background import join_threads
from tests.lib.plan_world import POINTS
from tests.lib.small_world import N1, N2, Node, World

TREES = (Tree(PROGRAMS_TREE, "a" * 64, 1, 1),)


class Data:
    """The file of the data on each host, and the jobs that train on it."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        folder.mkdir()
        for host in (N1, N2):
            self.put(host)

    def put(self, host: Host) -> None:
        (self.folder / f"{host.name}.csv").write_text(POINTS)

    def remove(self, host: Host) -> None:
        (self.folder / f"{host.name}.csv").unlink()

    def spec(self, **args: Any) -> JobSpec:
        return JobSpec(
            name="ships",
            program="trajectory",
            nodes=1,
            devices={"type": "cpu", "per_node": 1},
            args={"data_path": "/data/points.csv", **args},
        )

    def submit(self, *hosts: Host, **changes: Any) -> Job:
        return self.world.job(*hosts, spec=changes.pop("spec", None) or self.spec(), trees=TREES, **changes)

    def examine(self, host: Host, request: agent.Survey) -> dict[str, Any]:
        """What the agent of a host reads for the items of a survey; the other probes have no reply."""
        found: dict[str, Any] = {}
        for item in request.items:
            if item["kind"] == "training":
                own = {path: str(self.folder / f"{host.name}.csv") for path in item["paths"]}
                read = training_files.examine({"paths": list(own.values())}, time.monotonic() + 30)["paths"]
                found[item["name"]] = {"paths": {path: read[real] for path, real in own.items()}}
        return found

    def go_on(self) -> None:
        """Let the job go on until nothing moves: the plan is made in a thread."""
        for _ in range(6):
            self.world.turn()
            join_threads("training-plan")


class Reader(Node):
    def __init__(self, data: Data, host: Host) -> None:
        super().__init__(f"key-{host.name}")
        self.data, self.host, self.survey = data, host, {}

    def answer(self, request: Any) -> Any:
        if isinstance(request, agent.Survey):
            self.asked.append(request)
            return agent.SurveyReply(self.data.examine(self.host, request))
        if isinstance(request, agent.Checkpoints):
            self.asked.append(request)
            return agent.CheckpointsReply(())
        return super().answer(request)


@pytest.fixture
def data(world: World, tmp_path: Path) -> Data:
    made = Data(world, tmp_path / "data")
    for host in (N1, N2):
        world.nodes[host.name] = Reader(made, host)
    return made


def readings(world: World, host: Host) -> int:
    """How often an agent was asked to read the files of a training."""
    asked = [one for one in world.nodes[host.name].asked if isinstance(one, agent.Survey)]
    return sum(item["kind"] == "training" for one in asked for item in one.items)


def test_a_start_whose_training_would_fail_is_refused_with_every_problem(world: World, data: Data) -> None:
    job = data.submit(N1, spec=data.spec(hidden_size=65, column_map=("time=when",)))
    world.up(N1)
    data.go_on()
    found = world.now(job)
    assert (found.state, found.cause, found.reason.code) == (State.FAILED, Cause.TRAINING, "training-refused")
    assert found.failure is not None and (found.failure.kind, found.failure.code) == (Kind.USER, "training-refused")
    assert found.reason.why.values["count"] >= 2 and found.go_sent_at_s is None
    assert readings(world, N1) == 1


def test_a_retry_is_judged_with_the_files_of_its_own_start(world: World, data: Data) -> None:
    job = data.submit(N1, spec=data.spec(device="npu", chip="910B3"))
    data.remove(N1)
    world.up(N1)
    data.go_on()
    assert world.now(job).cause is Cause.TRAINING
    data.put(N1)
    world.jobs.adopt(world.store.jobs.find(job.id))
    world.jobs.steps.feed(job.id, RetryRequested())
    data.go_on()
    retried = world.now(job)
    assert (retried.attempt, retried.state) == (2, State.STARTING) and readings(world, N1) == 2
    assert read_plan(world.folder, job.id) != {}, "the controller keeps what the report compares with"


def test_a_host_that_lacks_the_data_is_passed_over_for_one_that_has_it(world: World, data: Data) -> None:
    job = data.submit(N1, N2)
    data.remove(N1)
    world.up(N1, N2)
    data.go_on()
    found = world.now(job)
    assert (found.hosts, found.state, set(found.passed_over)) == (("n2",), State.STARTING, {"n1"})


def test_a_restart_is_refused_and_not_repeated_when_the_data_is_gone(world: World, data: Data) -> None:
    job = data.submit(N1, policy=RestartPolicy(5))
    world.up(N1)
    data.go_on()
    assert world.now(job).state is State.STARTING
    data.remove(N1)
    [runner] = [one for one in world.jobs if one.job.id == job.id]
    runner.job = replace(runner.job, state=State.STOPPING, cause=Cause.FAILURE)
    world.jobs.steps.feed(job.id, NodeEnded("n1", ()))
    world.jobs.steps.feed(job.id, Diagnosed(1, Failure(Kind.INFRA, "x")))
    data.go_on()
    runner.job = replace(runner.job, not_before_s=0.0)
    data.go_on()
    found = world.now(job)
    assert (found.attempt, found.state, found.cause) == (2, State.FAILED, Cause.TRAINING)
    assert readings(world, N1) == 2


def test_ranks_get_the_micro_batch_that_the_plan_chose_and_the_batch_of_the_job(world: World, data: Data) -> None:
    args = {"device": "npu", "chip": "910B3", "micro_batch_size": -1, "global_batch_size": 24}
    job = data.submit(N1, spec=data.spec(**args))
    world.up(N1)
    data.go_on()
    [runner] = [one for one in world.jobs if one.job.id == job.id]
    assert world.now(job).state is State.STARTING and runner.start.plan is not None
    [chosen] = [one.values for one in world.store.events.of(job.id) if one.code == "micro-batch-chosen"]
    size = chosen["micro_batch_size"]
    argv = runner.start.plan.nodes[0].ranks[0].argv
    assert 0 < size <= 24 and chosen["global_batch_size"] == 24 and chosen["ranks"] == 1
    assert {f"--micro_batch_size={size}", "--global_batch_size=24"} <= set(argv)


def test_a_start_without_a_choice_is_refused(world: World, data: Data) -> None:
    job = data.submit(N1, spec=data.spec(micro_batch_size=-1))
    world.up(N1)
    data.go_on()
    assert world.now(job).cause is Cause.TRAINING, "the memory of a CPU says nothing"
