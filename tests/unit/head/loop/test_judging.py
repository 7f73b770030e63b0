"""When the diagnosis of a failed attempt begins: with all evidence, or with what can still arrive."""

import time
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.jobfile.model import Checkpoint, JobSpec
from ascendrun.core.jobs.checkpoints import ResumePoint
from ascendrun.core.jobs.endings import Diagnosed
from ascendrun.core.jobs.job import Cause, Phase, State
from ascendrun.core.jobs.restart import Failure, Kind, PastAttempt, RestartPolicy
from ascendrun.head.loop.judging import GATHER_WAIT_S, Judging
from tests.lib.small_world import N1, N2, World
from tests.lib.vcluster.processes import await_true


class NothingToFetch:
    def fetch(self, *_: Any, **__: Any) -> None:
        pass

    def is_waiting(self, *_: Any) -> bool:
        return False


def test_a_job_whose_hosts_have_a_newer_checkpoint_is_restarted_whatever_its_steps_say(world: World) -> None:
    """The newest checkpoint was torn after attempt 2; attempt 4 saved again, to less than attempt 2 had reached."""
    lost = Failure(Kind.INFRA, "node-unreachable", ("n2",), (1,), "likely")
    known = [(1, 0, 700), (2, 640, 760), (3, 680, 700)]
    past = tuple(PastAttempt(k, ("n1", "n2"), 60.0 * k, 60.0 * k + 50, lost, step, last) for k, step, last in known)
    spec = JobSpec(name="demo", command=("true",), checkpoint=Checkpoint(dir="/shared/ckpt"))
    policy = RestartPolicy(9, max_restarts_without_progress=2)
    stopping: dict[str, Any] = {
        "state": State.STOPPING,
        "cause": Cause.FAILURE,
        "unconfirmed": ("n2",),
        "since_s": time.time(),
    }
    resume = ResumePoint(680, "ascendrun")
    job = world.running(N1, N2, spec=spec, policy=policy, past=past, attempt=4, resume=resume, **stopping)
    [runner] = world.jobs
    runner.job = replace(runner.job, nodes=(replace(runner.job.nodes[0], phase=Phase.ENDED), runner.job.nodes[1]))
    node = world.get(N1).node
    node.phases[job.run_id], world.get(N1).is_up = "ended", True
    rows = [("680", 680, True), ("720", 720, True), ("760", 760, False)]
    node.checkpoints = tuple({"format": "ascendrun", "path": p, "step": step, "whole": w} for p, step, w in rows)
    nothing: Any = NothingToFetch
    judging = Judging(world.folder, nothing, world.jobs.steps.feed, lambda call: call())
    judging.start(runner)
    judging.tick(runner, {"n2": GATHER_WAIT_S + 1})
    assert await_true(lambda: world.turn() or world.now(job).failure is not None, deadline_s=60.0)
    assert world.now(job).saved_step == 720
    assert world.now(job).state is State.BACKOFF, world.now(job).reason


@pytest.mark.slow
def test_a_host_that_has_been_silent_for_long_is_not_waited_for_again(world: World) -> None:
    job = world.running(N1, N2, state=State.STOPPING, cause=Cause.FAILURE, unconfirmed=("n2",))
    [runner] = world.jobs
    runner.job = replace(runner.job, nodes=(replace(runner.job.nodes[0], phase=Phase.ENDED), runner.job.nodes[1]))
    world.get(N1).node.phases[job.run_id] = "ended"
    world.get(N1).is_up = True
    fed: list[Any] = []
    nothing: Any = NothingToFetch
    judging = Judging(world.folder, nothing, lambda job_id, event: fed.append((job_id, event)), lambda call: call())
    judging.start(runner)
    judging.tick(runner, {"n2": GATHER_WAIT_S - 1})
    assert runner.copies.has_all(but={"n2"}) and not runner.copies.has_all(but=())
    assert not judging._cases[job.id].is_running, "its logs may explain the failure"
    judging.tick(runner, {"n2": GATHER_WAIT_S + 1})
    assert await_true(lambda: bool(fed), deadline_s=60.0)
    assert fed[0][0] == job.id and isinstance(fed[0][1], Diagnosed)
