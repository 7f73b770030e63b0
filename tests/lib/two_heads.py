"""A head on two machines of a virtual cluster, node1 and node2; the voters are node3, node4 and node5."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import await_that

CODE = Path(__file__).resolve().parents[2]
WRAPPER = f'#!/bin/sh\nPYTHONPATH={CODE} exec {sys.executable} -m ascendrun "$@"\n'
HOME = "/root"
STATE = f"{HOME}/.local/state/ascendrun"
HEADS = ("node1", "node2")
SETTINGS = f"""standby:
  heads: [root@node1, root@node2]
  voters: [node3, node4, node5]
  hostfile: {HOME}/cluster.hosts
"""
WAIT_S = 180.0
COMMAND_S = 900.0
"""For a machine with other work."""


class TwoHeads:
    """Both machines with ascendrun and the same settings."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster, self.standbys = cluster, list[subprocess.Popen[Any]]()
        for name in HEADS:
            self.write(name, "/usr/local/bin/ascendrun", WRAPPER).chmod(0o755)
            self.write(name, f"{HOME}/.config/ascendrun/config.yaml", SETTINGS)
            self.write(name, f"{HOME}/cluster.hosts", "node3\nnode4\nnode5\n")

    def write(self, name: str, path: str, text: str) -> Path:
        file = self.cluster.path(name, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def write_job(self, name: str, job: str, command: str, *, hostfile: str, **more: Any) -> None:
        """Write the file of a job in a shell, whose packed directory has the file `part`."""
        self.write(name, f"{HOME}/code-{job}/part", f"{job}\n")
        values = {"name": job, "command": ["sh", "-c", command], "hostfile": hostfile, **more}
        values |= {"workdir": {"path": f"code-{job}"}, "devices": {"type": "cpu", "per_node": 1}}
        self.write(name, f"{HOME}/{job}.yaml", json.dumps(values))

    def environ(self, **more: str) -> Mapping[str, str]:
        return {**self.cluster.host_environ(), "PYTHONPATH": str(CODE), **more}

    def on(self, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "ascendrun", *argv]
        return self.cluster.host_run(
            name, words, cwd=HOME, env=self.environ(), timeout=COMMAND_S, capture_output=True, text=True
        )

    def popen(self, name: str, *argv: str, **environ: str) -> subprocess.Popen[Any]:
        """Its output is /tmp/ARGV.log there."""
        words = [sys.executable, "-m", "ascendrun", *argv]
        with open(self.cluster.path(name, f"/tmp/{'-'.join(argv)}.log"), "ab") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return self.cluster.host_popen(name, words, cwd=HOME, env=self.environ(**environ), **pipes)

    def start_standby(self, name: str) -> None:
        self.standbys.append(self.popen(name, "controller", "standby"))

    def stand_by(self, name: str, head: str) -> None:
        """Start the standby, and return when the voters know that it has everything."""
        self.start_standby(name)
        await_that(lambda: self.status(head).get("in_sync"), "in sync", deadline_s=WAIT_S)

    def status(self, name: str) -> dict[str, Any]:
        shown = self.on(name, "controller", "status", "-o", "json")
        return json.loads(shown.stdout).get("standby") or {} if shown.returncode == 0 else {}

    def rows(self, name: str) -> list[str]:
        """All that its store has, as SQL: of a copy, as the first process that opens a store after a loss of power
        changes the file."""
        with tempfile.TemporaryDirectory() as copy:
            for file in self.cluster.path(name, STATE).glob("state.db*"):
                shutil.copy(file, copy)
            with closing(sqlite3.connect(Path(copy, "state.db"))) as db:
                return list(db.iterdump())

    def close(self) -> None:
        for name in filter(self.cluster.is_up, HEADS):
            self.on(name, "controller", "stop")
        for process in self.standbys:
            process.kill()
            process.wait()
