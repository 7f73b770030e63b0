"""A large directory on its way to many hosts: each passes on what it receives, and the head sends few copies."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scenes import Scene
from test_traffic import counted

from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.network import BRIDGE

BYTES = 5 << 20
HOSTS, NODES = 12, 10


def start(scene: Scene, name: str) -> str:
    """Submit a job with a new large file, on all hosts but two."""
    (scene.folder / "code" / "weights").write_bytes(os.urandom(BYTES))
    more = f"nodes: {NODES}\nrestart: {{max_restarts: 3}}\n"
    return scene.start(scene.job(name, "beat", 0, slots=1, per_node=1, more=more))


def test_hosts_pass_a_directory_on_and_one_that_loses_power_meanwhile_stops_no_other(
    ascendrun: Any, cluster_of: Callable[..., VirtualCluster]
) -> None:
    cluster = cluster_of(HOSTS, disk="128M")
    scene = Scene(ascendrun.on(cluster), cluster)
    for host in cluster.hosts:
        cluster.rate(host, 16_000)
    cut = start(scene, "cut")
    scene.await_state(cut, "STAGING")
    cluster.crash(cluster.hosts[0])
    scene.await_state(cut, "SUCCEEDED")
    for host in cluster.hosts:
        cluster.rate(host, 0)
    before = counted(cluster, HEAD, BRIDGE, sent=True)
    scene.await_state(start(scene, "whole"), "SUCCEEDED")
    copies = (counted(cluster, HEAD, BRIDGE, sent=True) - before) / BYTES
    assert copies < NODES * 2 / 3, f"the head sent {copies:.1f} copies for {NODES} hosts"
    file, names = scene.folder / "code" / "weights", cluster.hosts[1:]
    hosts = scene.folder / "some.hosts"
    hosts.write_text(cluster.hostfile(names=names))
    done = scene.ascendrun("cp", "-H", hosts, file, f"node[2-{HOSTS}]:.", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(Path(cluster.path(host, "/root/weights")).read_bytes() == file.read_bytes() for host in names)
    copies = (counted(cluster, HEAD, BRIDGE, sent=True) - before) / BYTES - copies
    assert copies < len(names) * 2 / 3, f"the head sent {copies:.1f} copies for {len(names)} hosts"
