"""ascendrun on the head of a bed, as a user has it: this checkout, a state folder of its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.core.settings import STATE_VARIABLE
from ascendrun.node.layout import ROOT_VARIABLE
from benchmarks.bed import Bed, Cost
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.processes import Process
from tests.lib.vcluster.spec import root_home

CHECKOUT = Path(__file__).resolve().parents[1]


class Ours:
    """`state_dir` is the current one; `forget` begins a new one. `checkout`: whose code; `state`: its folder."""

    def __init__(self, bed: Bed, checkout: Path = CHECKOUT, *, state: str = "state") -> None:
        self._bed = bed
        self._checkout = checkout
        self._state = state
        self._number = 0
        self.state_dir = bed.folder / f"{state}-0"

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "ascendrun", *arguments]

    def environ(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(self._checkout),
            STATE_VARIABLE: str(self.state_dir),
            ROOT_VARIABLE: str(self._bed.folder / "local-node"),
            "PYTHONDONTWRITEBYTECODE": "",  # as at a user's, modules are compiled once
        }

    def hostfile(self, hosts: Sequence[str]) -> Path:
        path = self._bed.folder / f"{len(hosts)}.hosts"
        path.write_text(self._bed.cluster.hostfile(names=hosts))
        return path

    def run(self, *arguments: str) -> Cost:
        return self._bed.run(self.argv(*arguments), env=self.environ())

    def stop_controller(self) -> None:
        """No controller and so no connection is left; jobs and installed agents stay."""
        self.run("controller", "stop")

    def forget(self, hosts: Sequence[str]) -> None:
        """As on the first day: no controller, a state folder never used, no agent on the hosts."""
        self.stop_controller()
        self._number += 1
        self.state_dir = self._bed.folder / f"{self._state}-{self._number}"
        for host in hosts:
            shutil.rmtree(self._bed.cluster.path(host, f"{root_home()}/.ascendrun"), ignore_errors=True)

    def on_head(self) -> list[Process]:
        """The guard and the controller as the machine sees them, [] when there are none."""
        return [
            process
            for process in self._bed.cluster.processes(HEAD)
            if process.environ.get(STATE_VARIABLE) == str(self.state_dir) and "controller" in process.argv
        ]

    def controller(self) -> Process | None:
        """The running controller, None when there is none."""
        ours = self.on_head()
        guards = {process.pid for process in ours}
        return next((process for process in ours if process.ppid in guards), None)

    def controller_memory_bytes(self) -> int | None:
        """What the running controller alone holds in memory, its share of what others map too; None: none runs."""
        process = self.controller()
        if process is None:
            return None
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
