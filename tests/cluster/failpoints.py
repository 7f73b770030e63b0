"""The failpoints of the code, and deaths at them: a process pauses where it is to die, and is killed there.

A pause instead of a kill shows that the place was reached, and lets two processes be dead at their places at once.
"""

from __future__ import annotations

import ast
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ascendrun.head.loop.guard import GUARDED_VARIABLE
from ascendrun.node.failpoint import VARIABLE
from ascendrun.node.procs import read_stat
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.machines import HEAD

PACKAGE = Path(__file__).resolve().parents[2] / "ascendrun"
TOGETHER_S = 1.0
"""How long the first of two that pause waits for the other."""
_POLL_S = 0.03


@cache
def failpoints() -> Mapping[str, Sequence[str]]:
    """Names by the side that reaches them, "head" or "node", as they stand in the code."""
    found: dict[str, set[str]] = {"head": set(), "node": set()}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "failpoint(" in text:
            side = "node" if path.relative_to(PACKAGE).parts[0] == "node" else "head"
            found[side].update(_names(ast.parse(text)))
    return {side: sorted(names) for side, names in found.items()}


def _names(tree: ast.AST) -> list[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == "failpoint"]
    constants = [part for call in calls for argument in call.args for part in ast.walk(argument)]
    return [part.value for part in constants if isinstance(part, ast.Constant) and "." in str(part.value)]


def _called(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def paused(cluster: VirtualCluster, machine: str) -> list[int]:
    """The pids on the machine that a signal has stopped."""
    stats = {one.pid: read_stat(one.pid) for one in cluster.processes(machine)}
    return [pid for pid, stat in stats.items() if stat is not None and stat.state == "T"]


@dataclass
class Deaths:
    """Kills whoever pauses on the head or the host, once each; `reached`: the machines where somebody did.

    A context manager: it watches in a thread of its own, since the commands of a test wait for who pauses.
    """

    cluster: VirtualCluster
    points: Mapping[str, str]
    """{machine: failpoint}"""
    reached: list[str] = field(default_factory=list)

    def __enter__(self) -> Deaths:
        for host, point in self.points.items():
            if host != HEAD:
                self.cluster.sshd_options(host, (f"SetEnv {VARIABLE}={point}=pause",))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def environ(self) -> dict[str, str]:
        """What the controller that is to die is started with."""
        if HEAD not in self.points:
            return {}
        return {
            VARIABLE: f"{self.points[HEAD]}=pause",
            GUARDED_VARIABLE: "test",
        }  # no guard: it would pause there again

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S) and len(self.reached) < len(self.points):
            if self._paused():
                self._over.wait(TOGETHER_S if len(self.reached) + len(self._paused()) < len(self.points) else 0)
                for machine, pids in self._paused().items():
                    self._kill(machine, pids)

    def _paused(self) -> dict[str, list[int]]:
        looked = {machine: paused(self.cluster, machine) for machine in self.points if machine not in self.reached}
        return {machine: pids for machine, pids in looked.items() if pids}

    def _kill(self, machine: str, pids: Sequence[int]) -> None:
        """The process that it is replaced by must not die there again."""
        if machine != HEAD:
            self.cluster.sshd_options(machine, ())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.reached.append(machine)
