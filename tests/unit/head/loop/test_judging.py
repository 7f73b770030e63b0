"""When the diagnosis of a failed attempt begins: with all evidence, or with what can still arrive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.jobs.endings import Diagnosed
from ascendrun.core.jobs.job import Cause, Phase, State
from ascendrun.head.loop.judging import GATHER_WAIT_S, Judging
from tests.lib.small_world import N1, N2, World
from tests.lib.vcluster.processes import await_true


class NothingToFetch:
    def fetch(self, *_: Any, **__: Any) -> None:
        pass

    def is_waiting(self, *_: Any) -> bool:
        return False


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
