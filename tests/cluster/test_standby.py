"""A head on two machines, node1 and node2: the power of one is cut, and the other continues. Jobs run on node3."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import start_cluster

from ascendrun.node.failpoint import VARIABLE
from tests.lib.two_heads import HEADS, HOME, SETTINGS, STATE, WAIT_S, TwoHeads
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import await_that, await_true

pytestmark = pytest.mark.timeout(1800)
BEATS = "while [ ! -e /tmp/enough ]; do date +%s.%N >>/tmp/beats; sleep 0.2; done"
COMMANDS = {"runs": BEATS, "waits": "cat part", "once": "echo started >>/tmp/started"}


class Jobs(TwoHeads):
    def __init__(self, cluster: VirtualCluster) -> None:
        super().__init__(cluster)
        for name in HEADS:
            self.write(name, f"{HOME}/job.hosts", "node3 slots=1\n")
            for job, command in COMMANDS.items():
                self.write_job(name, job, command, hostfile="job.hosts")

    def run_until(self, name: str, failpoint: str) -> subprocess.Popen[Any]:
        """Run a controller that suspends itself at a failpoint."""
        return self.popen(name, "controller", "run", **{VARIABLE: f"{failpoint}=pause"})

    def suspended(self, name: str) -> list[int]:
        """The controllers there that are suspended."""
        found = [one.pid for one in self.cluster.processes(name) if one.argv[-2:] == ("controller", "run")]
        return [pid for pid in found if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"]

    def shown(self, name: str, job: str) -> dict[str, Any]:
        shown = self.on(name, "show", job, "-o", "json")
        return {} if shown.returncode else dict(json.loads(shown.stdout)["job"])

    def state(self, name: str, job: str) -> str:
        return str(self.shown(name, job).get("state", ""))

    def await_state(self, name: str, job: str, state: str) -> None:
        assert await_true(lambda: self.state(name, job) == state, deadline_s=WAIT_S), self.on(name, "show", job).stdout

    def submit(self, name: str, job: str) -> None:
        done = lambda: self.on(name, "submit", f"{job}.yaml", "--detach").returncode == 0  # noqa: E731
        assert await_true(done, deadline_s=WAIT_S)


@pytest.fixture
def heads() -> Iterator[Jobs]:
    with start_cluster(5) as cluster:
        made = Jobs(cluster)
        yield made
        made.close()


def test_without_power_of_the_head_the_standby_continues_and_training_does_not_notice(heads: Jobs) -> None:
    heads.submit("node1", "runs")
    heads.await_state("node1", "runs", "RUNNING")
    heads.stand_by("node2", "node1")
    heads.submit("node2", "waits")  # typed on the standby
    term = heads.status("node1")["term"]
    assert (heads.state("node1", "waits"), heads.state("node2", "runs")) == ("QUEUED", "RUNNING")
    heads.cluster.crash("node1")
    heads.await_state("node2", "runs", "RUNNING")
    assert heads.status("node2")["term"] == term + 1
    heads.cluster.path("node3", "/tmp/enough").touch()
    for job in ("runs", "waits"):
        heads.await_state("node2", job, "SUCCEEDED")
    beats = [float(line) for line in heads.cluster.path("node3", "/tmp/beats").read_text().split()]
    assert beats == sorted(beats), "one process wrote them"

    heads.cluster.reboot("node1", keep_disk=True)
    rows = heads.rows("node1")
    heads.on("node1", "controller", "run")  # as the entry of `controller install` does
    assert heads.rows("node1") == rows
    assert heads.cluster.path("node1", f"{STATE}/controller.lock").read_text() == "", "cron starts it no more"
    assert "node2" in heads.on("node1", "controller", "status").stderr
    store = heads.cluster.path("node1", f"{STATE}/state.db")
    before = store.read_bytes()
    assert heads.state("node1", "waits") == "SUCCEEDED"  # by node2
    assert heads.on("node1", "controller", "run").returncode != 0 and store.read_bytes() == before
    heads.stand_by("node1", "node2")


def test_a_head_and_its_standby_are_set_up_and_get_other_voters_as_the_page_shows(heads: Jobs) -> None:
    hosts, lease = ("nodes", "-H", "cluster.hosts"), lambda: heads.status("node1").get("lease")
    assert heads.on("node1", *hosts).returncode == 0
    await_that(lease, "lease", deadline_s=WAIT_S)
    heads.stand_by("node2", "node1")
    for name in HEADS:
        await_that(lambda name=name: heads.status(name).get("in_sync"), f"in sync on {name}", deadline_s=WAIT_S)
    [standby] = heads.standbys
    standby.terminate()
    standby.wait()
    heads.on("node1", "controller", "stop")
    assert heads.on("node1", "controller", "status").returncode == 4, "a status starts no controller"
    shutil.rmtree(heads.cluster.path("node2", f"{STATE}.standby"))
    settings = f"{HOME}/.config/ascendrun/config.yaml"
    heads.write("node1", settings, "")
    assert heads.on("node1", *hosts).returncode == 0
    heads.on("node1", "controller", "stop")
    for name in HEADS:
        heads.write(name, settings, SETTINGS.replace("node3", "node2"))
        heads.write(name, f"{HOME}/cluster.hosts", "node2\nnode4\nnode5\n")
    assert heads.on("node1", *hosts).returncode == 0
    await_that(lease, "lease", deadline_s=WAIT_S)
    assert set(heads.status("node1")["voters"]) == {"node2", "node4", "node5"}
    heads.stand_by("node2", "node1")


def test_the_shared_queue_of_the_second_machine_decides_after_a_takeover(heads: Jobs) -> None:
    for name in HEADS:
        heads.write(name, f"{HOME}/.config/ascendrun/config.yaml", f"queue: {HOME}/queue\n{SETTINGS}")
    servers = [heads.popen("node1", "controller", "run", "--shared", "queue")]
    await_that(lambda: heads.on("node1", "ps", "--all-users").returncode == 0, "the queue", deadline_s=WAIT_S)
    reason = lambda name: heads.shown(name, "waits").get("reason_code")  # noqa: E731
    try:
        heads.submit("node1", "runs")
        heads.await_state("node1", "runs", "RUNNING")
        heads.submit("node1", "waits")
        await_that(lambda: reason("node1") == "nodes-in-use", "it waits", deadline_s=WAIT_S)
        heads.stand_by("node2", "node1")
        heads.cluster.crash("node1")
        heads.await_state("node2", "runs", "RUNNING")
        await_that(lambda: reason("node2") == "queue-away", "no server decides yet", deadline_s=WAIT_S)
        servers.append(heads.popen("node2", "controller", "run", "--shared", "queue"))
        await_that(lambda: reason("node2") == "nodes-in-use", "the server there knows the job", deadline_s=WAIT_S)
        assert heads.state("node2", "runs") == "RUNNING"
        heads.cluster.path("node3", "/tmp/enough").touch()
        for job in ("runs", "waits"):
            heads.await_state("node2", job, "SUCCEEDED")
        beats = [float(line) for line in heads.cluster.path("node3", "/tmp/beats").read_text().split()]
        assert beats == sorted(beats), "one process wrote them"
    finally:
        for server in servers:
            server.kill()
            server.wait()


def test_a_head_that_is_suspended_in_the_middle_of_a_start_starts_nothing_when_it_wakes(heads: Jobs) -> None:
    controller = heads.run_until("node1", "controller.after_save:3")
    heads.stand_by("node2", "node1")
    heads.submit("node1", "once")
    await_that(lambda: heads.suspended("node1"), "suspended", deadline_s=WAIT_S)
    heads.await_state("node2", "once", "SUCCEEDED")
    for pid in heads.suspended("node1"):
        os.kill(pid, signal.SIGCONT)
    assert controller.wait(WAIT_S) == 0  # by itself: another machine continues
    head = json.loads(heads.cluster.path("node1", f"{STATE}/head.json").read_text())
    assert head["superseded"] is not None
    assert heads.cluster.path("node3", "/tmp/started").read_text() == "started\n"


def test_without_space_for_the_copy_the_head_continues_and_later_the_standby_catches_up(heads: Jobs) -> None:
    heads.submit("node1", "runs")
    heads.stand_by("node2", "node1")
    heads.cluster.fill("node2")
    heads.submit("node1", "waits")  # the reply comes when the voters know that the copy is incomplete
    assert heads.status("node1")["in_sync"] is False
    copies = lambda: list(heads.cluster.path("node2", f"{STATE}.standby/jobs").glob("*/job.json"))  # noqa: E731
    assert len(copies()) == 1
    heads.cluster.unfill("node2")
    await_that(lambda: heads.status("node1")["in_sync"], "in sync", deadline_s=WAIT_S)
    assert len(copies()) == 2
