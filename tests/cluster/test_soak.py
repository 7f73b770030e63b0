"""Random bad luck, seeded: jobs run, stop and fail while nodes, cables, agents and the controller do what they like.

Runs only with `--long` (`--long=SEED,ROUNDS`); a failure names its seed and round.
"""

from __future__ import annotations

import random
from typing import Any, Callable

import leftovers
import pytest
from invariants import check_ended
from scenes import Scene, await_that

from ascendrun.sim.vcluster.cluster import VirtualCluster
from ascendrun.sim.vcluster.processes import await_true

Ascendrun = Any
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")


@pytest.fixture
def scene(ascendrun: Ascendrun, cluster: VirtualCluster) -> Scene:
    return Scene(ascendrun, cluster)


def kill_some(scene: Scene, host: str, word: str) -> None:
    leftovers.kill([one for one in scene.cluster.processes(host) if word in one.argv])


def kill_controller(scene: Scene) -> None:
    leftovers.kill(leftovers.controllers(scene.cluster, scene.ascendrun.state_dir))


def faults(scene: Scene, host: str) -> dict[str, Callable[[], None]]:
    cluster = scene.cluster
    return {
        "cut": lambda: cluster.cut(host),
        "freeze": lambda: cluster.freeze(host),
        "block-in": lambda: cluster.block("head", host),
        "block-out": lambda: cluster.block(host, "head"),
        "loss": lambda: cluster.loss(host, 30),
        "fill": lambda: cluster.fill(host),
        "agent": lambda: kill_some(scene, host, "serve"),
        "supervisor": lambda: kill_some(scene, host, "supervise"),
        "reboot": lambda: cluster.reboot(host, keep_disk=True),
        "controller": lambda: kill_controller(scene),
        "sshd": lambda: cluster.sshd_restart(host),
    }


@pytest.mark.usefixtures("only_long")
@pytest.mark.timeout(0)
def test_random_bad_luck_breaks_no_promise(scene: Scene, request: pytest.FixtureRequest) -> None:
    seed, rounds = (int(part) for part in request.config.getoption("--long").split(","))
    for number in range(rounds):
        lot = random.Random(f"{seed}-{number}")
        host = lot.choice(scene.cluster.hosts)
        name = lot.choice(sorted(faults(scene, host)))
        before_s, during_s, is_stopped = lot.uniform(0, 3), lot.uniform(0, 20), lot.random() < 0.5
        print(f"round {number}: {name} on {host} after {before_s:.1f} s for {during_s:.1f} s, stop: {is_stopped}")
        job = scene.start(
            scene.job(
                "unlucky",
                "family",
                "print",
                "ready",
                "beat",
                5,
                more="checkpoint: {grace_period_s: 1}\ntimeouts: {start_s: 20}\n",
            )
        )
        await_true(lambda job=job: scene.state(job) in ENDS, deadline_s=before_s)
        faults(scene, host)[name]()
        await_true(lambda job=job: scene.state(job) in ENDS, deadline_s=during_s)
        if is_stopped:
            scene.ascendrun("stop", "--no-wait", *(["--now"] if lot.random() < 0.5 else []), job)
            await_true(lambda job=job: scene.state(job) in ENDS, deadline_s=lot.uniform(0, 5))
        scene.cluster.clean()
        await_that(lambda job=job: scene.state(job) in ENDS, f"{job} ends", deadline_s=120)
        await_that(lambda job=job: not scene.show(job)["unconfirmed_hosts"], f"{job} is confirmed", deadline_s=60)
        print(f"  {scene.state(job)}: {scene.show(job)['job']['reason']}")
        check_ended(scene, job, state=scene.state(job))
