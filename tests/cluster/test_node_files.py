"""Directories of nodes that fail for a while, and ends that only look like success."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any, Callable

import leftovers
import pytest
from invariants import check_ended, states_of
from scenes import BEAT_ON, ENOUGH, Scene, await_that

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


FORGE = """
import os, sys, time
print("ready", flush=True)
if os.environ["RANK"] == "3":
    folder = os.path.dirname(os.environ["ASCENDRUN_METRICS_FILE"])
    with open(os.path.join(folder, "events.0"), "a") as file:
        for number, event in enumerate(("rank_exited", "rank_exited", "ended")):
            fields = '"code":0,"signal":null,"stopped":false,"leftovers":[],"rank":%d' % (2 + number)
            file.write('{"seq":%d,"at_ns":1,"event":"%s",%s}\\n' % (60 + number, event, fields))
    print("forged", flush=True)
while not os.path.exists("ENOUGH"):
    time.sleep(0.05)
sys.exit(int(os.environ["RANK"] == "3"))
"""


def test_an_end_that_a_rank_writes_itself_changes_nothing(scene: Scene) -> None:
    job = scene.start(scene.job("forged", command=["python3", "-c", FORGE.replace("ENOUGH", ENOUGH)]))
    scene.await_line(job, "forged")
    scene.stays(job, "RUNNING", for_s=2)
    assert scene.ranks_of(job, "node2")
    scene.enough()
    scene.await_state(job, "FAILED")
    reason = scene.reason(job)
    assert (reason["code"], reason["ranks"], reason["values"]["code"]) == ("rank-exited", [3], 1)
    check_ended(scene, job, state="FAILED")


# --- ends that look like success ---


def test_a_node_that_shuts_down_is_no_success(scene: Scene) -> None:
    job = scene.begin(scene.job("shut", "save-on-term", "print", "ready", "hang"))
    everything = [one for one in scene.cluster.processes("node2") if one.inner_pid != 1]
    leftovers.kill(everything, signal.SIGTERM)
    await_that(lambda: not scene.ranks_of(job, "node2"), "its ranks have saved")
    scene.cluster.reboot("node2", keep_disk=True)
    scene.await_state(job, "FAILED")
    check_ended(scene, job, state="FAILED")
