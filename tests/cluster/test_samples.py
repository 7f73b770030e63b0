"""A job on two simulated Ascend nodes is sampled while it runs, also while a node's npu-smi hangs."""

import json
import signal
import sys
import time

import leftovers
import pytest

from ascendrun.head.state.sample_store import SampleStore
from ascendrun.query.top_source import newest_samples
from ascendrun.sim.ascend import tree
from tests.cluster.scenes import NpuScene, Scene, await_that

HOSTS = NpuScene.hosts


@pytest.fixture
def scene(ascendrun, cluster):
    return NpuScene(ascendrun, cluster)


ASK = """
import json, sys
from pathlib import Path
from ascendrun.cluster import Cluster
from ascendrun.core.hosts import Host
from ascendrun.core.settings import Settings
newest, refused = Cluster(Settings(Path(sys.argv[1]))).samples.take([Host(name) for name in sys.argv[2:]])
print(json.dumps([[(one.host, one.device, one.health, one.pids, one.link_up, one.frequency_mhz is not None)
                   for one in newest.devices], [one.host for one in newest.hosts], sorted(refused)]))
"""


def ask_now(scene: Scene, *hosts: str):
    done = scene.cluster.head_run(
        [sys.executable, "-c", ASK, str(scene.ascendrun.state_dir), *hosts],
        text=True,
        capture_output=True,
        env=scene.ascendrun.environ(),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def moments(scene: Scene, series: str, host: str, since_s: float):
    with SampleStore.open_for_reading(scene.ascendrun.state_dir) as store:
        found = getattr(store, series)(since_s=since_s, until_s=time.time() + 60, host=host)
    return sorted({sample.at_s for sample in found})


def test_devices_hosts_and_ranks_are_known_and_a_hanging_tool_silences_nothing_else(scene, cluster):
    state_dir = scene.ascendrun.state_dir
    devices, hosts, refused = ask_now(scene, *HOSTS, "nowhere")
    assert sorted(devices) == [[host, device, "OK", [], True, True] for host in HOSTS for device in range(2)]
    assert sorted(hosts) == list(HOSTS) and refused == ["nowhere"]
    await_that(lambda: len(newest_samples(state_dir).devices) == 4, "what was asked for is kept too")

    submitted_s = time.time()
    job = scene.begin(scene.npu_job())

    await_that(
        lambda: (
            [
                (one.host, one.device, bool(one.pids), bool(one.utilisation), one.link_up)
                for one in newest_samples(state_dir).devices
            ]
            == [(host, device, True, True, True) for host in HOSTS for device in range(2)]
        ),
        "every device is there and at work",
    )
    await_that(lambda: len(newest_samples(state_dir).ranks) == 4, "every rank is there")
    newest = newest_samples(state_dir)
    pids = {(rank["host"], rank["rank"]): rank["pid"] for rank in scene.show(job)["ranks"]}
    for rank in newest.ranks:
        assert rank.device == rank.rank % 2 and rank.pid == pids[rank.host, rank.rank] and rank.job == job
        device = next(one for one in newest.devices if (one.host, one.device) == (rank.host, rank.device))
        assert device.pids == (rank.pid,), "the tool's processes are the ranks"
    assert [host.host for host in newest.hosts] == list(HOSTS) and all(host.memory_used_bytes for host in newest.hosts)

    leftovers.kill(leftovers.controllers(cluster, state_dir), signal.SIGKILL)  # whoever looks next starts another
    tree.set_fault(cluster.path("node2", "/"), None, "hang", value="npu-smi")
    assert scene.state(job) == "RUNNING"
    since_s = time.time()
    await_that(
        lambda: (
            len(moments(scene, "host_series", "node2", since_s)) >= 4
            and len(moments(scene, "rank_series", "node2", since_s)) >= 4
            and len(moments(scene, "device_series", "node1", since_s)) >= 2
        ),
        "all others go on",
    )
    assert len(moments(scene, "device_series", "node2", since_s)) <= 1, "it does hang"
    await_that(lambda: {node["liveness"] for node in scene.show(job)["nodes"]} == {"ALIVE"}, "both nodes answer")
    assert scene.state(job) == "RUNNING"

    assert scene.ascendrun("stop", job, "--now").returncode == 0
    scene.await_nobody(job)
    await_that(lambda: scene.is_drained(job), "every byte is here")
    assert not scene.spooled(job, "samples.*"), "samples are in their store, not in the spool"
    written = b"".join(scene.on_node(job, "samples.*").values()).splitlines()
    count = sum(1 for line in written if "host" in json.loads(line))
    await_that(
        lambda: sum(len(moments(scene, "host_series", host, submitted_s)) for host in HOSTS) == count,
        "each line is one sample, also around the kill",
    )
