"""top over real connections to two simulated Ascend nodes: asked while they idle, sampled while a job runs."""

from __future__ import annotations

import json

import pytest

from ascendrun.sim.ascend import tree
from tests.cluster.scenes import NpuScene, await_that

HOSTS = NpuScene.hosts


@pytest.fixture
def scene(ascendrun, cluster):
    return NpuScene(ascendrun, cluster)


def test_idle_hosts_are_asked_ranks_are_found_on_their_devices_and_a_fault_is_seen(scene, cluster):
    more = scene.folder / "more.hosts"
    more.write_text(scene.hostfile.read_text() + "nowhere addr=127.0.0.1 port=1\n")

    def top(*words: str, code: int = 0) -> dict:
        run = scene.ascendrun("top", "--once", "-o", "json", *words)
        assert run.returncode == code, run.stderr
        return json.loads(run.stdout)

    idle = top("-H", str(more), code=6)
    assert [(row["host"], row["device"], row["health"], row["job"]) for row in idle["rows"]] == [
        (host, device, "OK", None) for host in HOSTS for device in range(2)
    ]
    assert [(host["host"], host["why"]) for host in idle["hosts"] if host["why"]] == [("nowhere", "no-reply")]

    job = scene.begin(scene.npu_job())
    wanted = [(host, device, 2 * node + device, job) for node, host in enumerate(HOSTS) for device in range(2)]
    await_that(
        lambda: (
            [
                (row["host"], row["device"], row["rank"], row["job"])
                for row in top()["rows"]
                if row["pid"] is not None and row["external_pids"] == [] and row["cpu"] is not None
            ]
            == wanted
        ),
        "every rank is on its device, and nobody else",
    )
    await_that(lambda: all(host["liveness"] == "ALIVE" for host in top()["hosts"]), "both answer")

    tree.set_fault(cluster.path("node2", "/"), 1, "health_alarm")
    tree.set_fault(cluster.path("node1", "/"), 0, "ghost_process", value="39999")
    await_that(
        lambda: (
            [(row["host"], row["device"], row["health"], row["external_pids"]) for row in top("--problems")["rows"]]
            == [("node1", 0, "OK", [39999]), ("node2", 1, "Alarm", [])]
        ),
        "the faults are seen",
    )

    assert scene.ascendrun("stop", job, "--now").returncode == 0
    scene.await_nobody(job)
    assert top("--job", job)["rows"] == []
