"""Hosts that fail examinations: found while they are idle, closed to jobs, and opened by an examination that passes."""

from __future__ import annotations

import json
from typing import Any, Callable

import pytest
from conftest import Ascendrun
from scenes import Scene, await_that, run_text, venv_python

from ascendrun.sim.vcluster.cluster import VirtualCluster

DEADLINE_S = 280.0


@pytest.fixture
def scene(ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster]) -> Scene:
    cluster = cluster_of(2)
    return Scene(ascendrun.on(cluster), cluster)


def states(scene: Scene) -> dict[str, str]:
    done = scene.ascendrun("nodes", "--all", "-o", "json")
    assert done.returncode == 0, run_text(done)
    return {row["names"][0]: row["state"] for row in json.loads(done.stdout)["machines"]}


def codes(scene: Scene) -> list[str]:
    """Of the events that belong to no job."""
    done = scene.ascendrun("events", "-o", "json")
    assert done.returncode == 0, run_text(done)
    found: list[dict[str, Any]] = json.loads(done.stdout)["events"]
    return [event["code"] for event in found if event["code"].startswith("host-")]


@pytest.mark.thorough
@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_full_disk_closes_an_idle_host_until_an_examination_passes(scene: Scene) -> None:
    idle = {"ASCENDRUN_IDLE_CHECK_S": "5"}
    known = scene.start(scene.job("known", "print", "done"), env=idle)
    scene.await_state(known, "SUCCEEDED")
    scene.cluster.fill("node2")
    await_that(lambda: states(scene)["node2"] == "quarantined", "two strikes, a minute apart", deadline_s=180)
    assert states(scene)["node1"] == "free"
    assert codes(scene) == ["host-strike", "host-strike", "host-closed"]
    elsewhere = scene.start(scene.job("elsewhere", "print", "done", more="nodes: 1\n", hosts=["node2", "node1"]))
    scene.await_state(elsewhere, "SUCCEEDED")
    assert scene.show(elsewhere)["job"]["hosts"] == ["node1"]

    refused = scene.ascendrun("undrain", "node2")
    assert refused.returncode == 3 and states(scene)["node2"] == "quarantined", run_text(refused)
    scene.cluster.unfill("node2")
    deep = scene.job(
        "deep", hosts=["node2"], per_node=1, more=f"python: {venv_python()}\n", command=["python3", "-c", "pass"]
    )
    done = scene.ascendrun("doctor", deep, "--quick", "--deep", "-o", "json", timeout=DEADLINE_S)
    assert done.returncode == 0, run_text(done)
    assert states(scene)["node2"] == "free" and codes(scene)[-1] == "host-opened"

    assert scene.ascendrun("drain", "node2", "--reason", "optics").returncode == 0
    scene.cluster.fill("node2")
    refused = scene.ascendrun("undrain", "node2")
    assert refused.returncode == 3 and states(scene)["node2"] == "drained", run_text(refused)
    scene.cluster.unfill("node2")
    done = scene.ascendrun("undrain", "node2")
    assert done.returncode == 0 and states(scene)["node2"] == "free", run_text(done)
    back = scene.start(scene.job("back", "print", "done", hosts=["node2"]))
    scene.await_state(back, "SUCCEEDED")
