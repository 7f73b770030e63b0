"""Directories of nodes that fail for a while."""

import re
from collections.abc import Sequence
from typing import Any, Callable

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


def check_lines(scene: Scene, job: str) -> None:
    """Each rank's beats are there without a gap."""
    for rank in range(4):
        text = b"".join(path.read_bytes() for path in scene.spooled(job, f"rank-{rank}.out.*")).decode()
        beats = [int(number) for number in re.findall(r"^beat (\d+) of rank", text, re.MULTILINE)]
        assert beats == list(range(len(beats))) and len(beats) > 50, (rank, beats[:3], len(beats))


def check_succeeded(scene: Scene, job: str) -> None:
    """The job saw nothing of the faults, and every line of every rank is there."""
    check_ended(scene, job, state="SUCCEEDED")
    assert "FAILED" not in [state.value for state in states_of(scene, job)]
    check_lines(scene, job)


def test_a_directory_that_fails_for_a_while_ends_no_job(scene: Scene) -> None:
    job = scene.begin(scene.job("hiccups", "print", "ready", *BEAT_ON))
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
    scene_of: Callable[..., Scene], fault: str, hosts: Sequence[str]
) -> None:
    scene = scene_of(2)
    for host in hosts:
        scene.cluster.node_fs(host)
    job = scene.begin(scene.job("hiccup", "print", "ready", *BEAT_ON))
    set_fault(scene.cluster, hosts, fault, LONG_S[fault])
    scene.stays(job, "RUNNING", for_s=LONG_S[fault])
    await_sound(scene.cluster, hosts)
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    check_succeeded(scene, job)


@pytest.mark.parametrize("now", [False, True])
def test_a_stop_reaches_ranks_whose_folder_takes_no_request(scene: Scene, now: bool) -> None:
    job = scene.begin(scene.job("stopped", "deaf" if now else "save-on-term", "print", "ready", "hang"))
    scene.cluster.node_fs("node2").fail("EIO")
    assert scene.ascendrun("stop", "--no-wait", job, *(["--now"] if now else [])).returncode == 0
    await_that(lambda: not scene.ranks_of(job, "node2"), "its ranks are ended")
    scene.cluster.node_fs("node2").heal()
    scene.await_state(job, "STOPPED")
    check_ended(scene, job, state="STOPPED")


def test_the_end_of_ranks_waits_for_the_folder_to_be_written(scene: Scene) -> None:
    job = scene.begin(scene.job("ends", "print", "ready", *BEAT_ON))
    scene.cluster.node_fs("node2").fail("EROFS")
    scene.enough()
    await_that(lambda: not scene.ranks_of(job, "node2"), "its ranks end")
    scene.stays(job, "RUNNING", for_s=2)
    scene.cluster.node_fs("node2").heal()
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: scene.is_drained(job), "every byte arrives")
    check_lines(scene, job)
