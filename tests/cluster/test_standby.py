"""A head on two machines, node1 and node2: the power of one is cut, and the other continues. Jobs run on node3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CODE, start_cluster

from ascendrun.node.failpoint import VARIABLE
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import await_that, await_true

WRAPPER = f'#!/bin/sh\nPYTHONPATH={CODE} exec {sys.executable} -m ascendrun "$@"\n'
HOME = "/root"
SETTINGS = f"""standby:
  heads: [root@node1, root@node2]
  voters: [node3, node4, node5]
  hostfile: {HOME}/cluster.hosts
"""
BEATS = "while [ ! -e /tmp/enough ]; do date +%s.%N >>/tmp/beats; sleep 0.2; done"
WAIT_S = 180.0


class TwoHeads:
    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster, self._standbys = cluster, list[subprocess.Popen[Any]]()
        for name in ("node1", "node2"):
            self._write(name, "/usr/local/bin/ascendrun", WRAPPER).chmod(0o755)
            self._write(name, f"{HOME}/.config/ascendrun/config.yaml", SETTINGS)
            self._write(name, f"{HOME}/cluster.hosts", "node3\nnode4\nnode5\n")
            self._write(name, f"{HOME}/job.hosts", "node3 slots=1\n")
            self._write(name, f"{HOME}/code/part", "packed\n")
            for job, command in (("runs", BEATS), ("waits", "cat part"), ("once", "echo started >>/tmp/started")):
                text = f"name: {job}\ncommand: [sh, -c, {json.dumps(command)}]\nhostfile: job.hosts\n"
                text += "workdir: {path: code}\ndevices: {type: cpu, per_node: 1}\n"
                self._write(name, f"{HOME}/{job}.yaml", text)

    def _write(self, name: str, path: str, text: str) -> Any:
        file = self.cluster.path(name, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def on(self, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
        environ = {**self.cluster.host_environ(), "PYTHONPATH": str(CODE)}
        words = [sys.executable, "-m", "ascendrun", *argv]
        return self.cluster.host_run(name, words, cwd=HOME, env=environ, capture_output=True, text=True)

    def stand_by(self, name: str, head: str) -> None:
        """Start the standby, and return when the voters know that it has everything."""
        environ = {**self.cluster.host_environ(), "PYTHONPATH": str(CODE)}
        words = [sys.executable, "-m", "ascendrun", "controller", "standby"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._standbys.append(self.cluster.host_popen(name, words, cwd=HOME, env=environ, **quiet))
        await_that(lambda: self.status(head).get("in_sync"), "in sync", deadline_s=WAIT_S)

    def run_until(self, name: str, failpoint: str) -> subprocess.Popen[Any]:
        """Run a controller that suspends itself at a failpoint."""
        environ = {**self.cluster.host_environ(), "PYTHONPATH": str(CODE), VARIABLE: f"{failpoint}=pause"}
        words = [sys.executable, "-m", "ascendrun", "controller", "run"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return self.cluster.host_popen(name, words, cwd=HOME, env=environ, **quiet)

    def suspended(self, name: str) -> list[int]:
        """The controllers there that are suspended."""
        found = [one.pid for one in self.cluster.processes(name) if one.argv[-2:] == ("controller", "run")]
        return [pid for pid in found if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"]

    def status(self, name: str) -> dict[str, Any]:
        shown = self.on(name, "controller", "status", "-o", "json")
        return json.loads(shown.stdout).get("standby") or {} if shown.returncode == 0 else {}

    def state(self, name: str, job: str) -> str:
        shown = self.on(name, "show", job, "-o", "json")
        return "" if shown.returncode else str(json.loads(shown.stdout)["job"]["state"])

    def await_state(self, name: str, job: str, state: str) -> None:
        assert await_true(lambda: self.state(name, job) == state, deadline_s=WAIT_S), self.on(name, "show", job).stdout

    def submit(self, name: str, job: str) -> None:
        done = lambda: self.on(name, "submit", f"{job}.yaml", "--detach").returncode == 0  # noqa: E731
        assert await_true(done, deadline_s=WAIT_S)

    def close(self) -> None:
        for name in filter(self.cluster.is_up, ("node1", "node2")):
            self.on(name, "controller", "stop")
        for process in self._standbys:
            process.kill()
            process.wait()


@pytest.fixture
def heads() -> Iterator[TwoHeads]:
    with start_cluster(5) as cluster:
        made = TwoHeads(cluster)
        yield made
        made.close()


def test_without_power_of_the_head_the_standby_continues_and_training_does_not_notice(heads: TwoHeads) -> None:
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
    heads.on("node1", "controller", "run")  # as the entry of `controller install` does
    store = heads.cluster.path("node1", f"{HOME}/.local/state/ascendrun/state.db")
    before = store.read_bytes()
    assert heads.state("node1", "waits") == "SUCCEEDED"  # by node2
    assert heads.on("node1", "controller", "run").returncode != 0 and store.read_bytes() == before
    heads.stand_by("node1", "node2")


def test_a_head_that_is_suspended_in_the_middle_of_a_start_starts_nothing_when_it_wakes(heads: TwoHeads) -> None:
    controller = heads.run_until("node1", "controller.after_save:3")
    heads.stand_by("node2", "node1")
    heads.submit("node1", "once")
    await_that(lambda: heads.suspended("node1"), "suspended", deadline_s=WAIT_S)
    heads.await_state("node2", "once", "SUCCEEDED")
    for pid in heads.suspended("node1"):
        os.kill(pid, signal.SIGCONT)
    assert controller.wait(WAIT_S) == 0  # by itself: another machine continues
    head = json.loads(heads.cluster.path("node1", f"{HOME}/.local/state/ascendrun/head.json").read_text())
    assert head["superseded"] is not None
    assert heads.cluster.path("node3", "/tmp/started").read_text() == "started\n"
