"""Directories of nodes that fail for a while, and ends that only look like success."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from typing import Any, Callable

import leftovers
import pytest
from invariants import check_ended, states_of
from scenes import BEAT_ON, Scene, await_that

from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.fuse_server import ERRORS

Ascendrun = Any
LONG_S = {**dict.fromkeys(ERRORS, 60.0), "hang": 20.0}
SHORT_S = 4.0
"""Longer than what the supervisor waits between two tries."""


@pytest.fixture
def scene(ascendrun: Ascendrun, cluster: VirtualCluster) -> Scene:
    for host in cluster.hosts:
        cluster.node_fs(host)
    return Scene(ascendrun, cluster)


def set_fault(cluster: VirtualCluster, hosts: Sequence[str], fault: str, seconds: float) -> None:
    for host in hosts:
        faulty = cluster.node_fs(host)
        if fault == "hang":
            faulty.hang(seconds)
        else:
            faulty.fail(fault, seconds)


def await_sound(cluster: VirtualCluster, hosts: Sequence[str]) -> None:
    sound = lambda: not any(cluster.node_fs(host).status()["fault"] for host in hosts)  # noqa: E731
    await_that(sound, "the fault is over")


def check_succeeded(scene: Scene, job: str) -> None:
    """The job saw nothing of the faults, and every line of every rank is there or named as lost."""
    check_ended(scene, job, state="SUCCEEDED")
    assert "FAILED" not in [state.value for state in states_of(scene, job)]
    named = any("lost" in event["code"] for event in scene.show(job)["events"])
    for name, data in scene.on_head(job, "rank-*.out.*").items():
        numbers = [int(line.split()[1]) for line in data.splitlines() if line.startswith(b"beat ")]
        assert numbers == sorted(set(numbers)), f"{name}: doubled or out of order"
        assert numbers == list(range(len(numbers))) or named, f"{name}: lines are missing: {json.dumps(numbers)}"


def test_a_directory_that_fails_for_a_while_ends_no_job(scene: Scene) -> None:
    job = scene.start(scene.job("hiccups", "print", "ready", *BEAT_ON))
    scene.await_line(job, "ready", count=4)
    for fault in LONG_S:
        set_fault(scene.cluster, ["node2"], fault, SHORT_S)
        await_sound(scene.cluster, ["node2"])
        assert scene.state(job) == "RUNNING", (fault, scene.show(job)["events"])
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    check_succeeded(scene, job)


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", LONG_S)
@pytest.mark.parametrize("hosts", [("node2",), ("node1", "node2")], ids=["one", "both"])
def test_a_directory_that_fails_for_long_ends_no_job(
    ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster], fault: str, hosts: Sequence[str]
) -> None:
    cluster = cluster_of(2)
    for host in hosts:
        cluster.node_fs(host)
    scene = Scene(ascendrun.on(cluster), cluster)
    job = scene.start(scene.job("hiccup", "print", "ready", *BEAT_ON))
    scene.await_line(job, "ready", count=4)
    set_fault(scene.cluster, hosts, fault, LONG_S[fault])
    scene.stays(job, "RUNNING", for_s=LONG_S[fault])
    await_sound(scene.cluster, hosts)
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    check_succeeded(scene, job)


# --- ends that look like success ---

SAVING = ("save-on-term", "print", "ready", "hang")


def signal_all(scene: Scene, host: str, word: str) -> None:
    leftovers.kill([one for one in scene.cluster.processes(host) if word in one.argv], signal.SIGTERM)


def test_a_supervisor_that_is_terminated_is_no_success(scene: Scene) -> None:
    job = scene.start(scene.job("drained", *SAVING))
    scene.await_line(job, "ready", count=4)
    for host in scene.cluster.hosts:
        signal_all(scene, host, "supervise")
    scene.await_state(job, "FAILED")
    assert scene.reason(job)["code"] == "preempted"
    check_ended(scene, job, state="FAILED")


def test_a_node_that_shuts_down_is_no_success(scene: Scene) -> None:
    job = scene.start(scene.job("shut", *SAVING))
    scene.await_line(job, "ready", count=4)
    everything = [one for one in scene.cluster.processes("node2") if one.inner_pid != 1]
    leftovers.kill(everything, signal.SIGTERM)
    await_that(lambda: not scene.ranks_of(job, "node2"), "its ranks have saved")
    scene.cluster.reboot("node2", keep_disk=True)
    scene.await_state(job, "FAILED")
    check_ended(scene, job, state="FAILED")


def test_a_stop_during_a_save_is_no_success(scene: Scene) -> None:
    job = scene.start(scene.job("saving", *SAVING))
    scene.await_line(job, "ready", count=4)
    assert scene.ascendrun("stop", job).returncode == 0
    check_ended(scene, job, state="STOPPED")


def test_at_night_a_dead_rank_ends_the_others_though_the_controller_was_killed(scene: Scene) -> None:
    """Nobody types a command; the guard starts the controller again."""
    job = scene.start(scene.job("night", "print", "ready", "hang"))
    scene.await_line(job, "ready", count=4)
    jobs = scene.ascendrun.state_dir / "jobs"
    scene.run(job)  # asked now, since a command would start a controller
    both = leftovers.controllers(scene.cluster, scene.ascendrun.state_dir)
    guards = {one.pid for one in both}
    leftovers.kill([one for one in both if one.ppid in guards])
    os.kill(scene.ranks_of(job, "node1")[0], signal.SIGKILL)
    scene.await_nobody(job)
    await_that(lambda: any((jobs / job).glob("attempt-*/complete")), "its end is recorded")
    assert scene.state(job) == "FAILED"
    check_ended(scene, job, state="FAILED")
