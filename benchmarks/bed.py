"""The test bed: a virtual cluster, and the cost of commands that run on its head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.lib.vcluster.cluster import DISK, VirtualCluster
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.spec import root_home

HOSTS = "hosts"
STOPWATCH = Path(__file__).with_name("stopwatch.py")
TIMEOUT_S = 180.0
SETTLE_S = 30.0
"""How long after a command its CPU time may still be counted: sshd ends sessions, ascendrun's agents come up."""
QUIET_SHARE = 0.10
"""Head and hosts that together use less of one core than this are quiet: 256 open connections beat now and then."""
_LOOK_S = 0.15
_QUIET_LOOKS = 2


@dataclass(frozen=True)
class Cost:
    """One command on the head. `head_cpu_s`, `hosts_cpu_s`: all that ran there meanwhile, None where nothing counts it.

    `status`: the exit code, or minus the signal that ended it. `tail`: the end of its output.
    """

    wall_s: float
    head_cpu_s: float | None
    hosts_cpu_s: float | None
    status: int
    tail: str


class Bed:
    """A cluster of `count` hosts that all trust the head, and a folder of the head for files of the benchmark.

    `disk`: size of each host's disk, as tmpfs takes it. `shared`: where all hosts see one folder, `shared` of this one;
    with a Slurm they see it where the head does. `shares`: further folders of the machine that all hosts see.
    """

    def __init__(
        self,
        count: int,
        *,
        disk: str = DISK,
        shared: str | None = None,
        shares: Mapping[str, str] = {},
        has_slurm: bool = False,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ascendrun-bench-")
        self.folder = Path(self._temporary.name)
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        shares = {**shares, **({} if shared is None else {str(self.shared): shared})}
        if has_slurm:
            shares[str(self.shared)] = str(self.shared)
        self.cluster = VirtualCluster.up(count, disk=disk, shares=shares, has_slurm=has_slurm)
        self._stopwatch = subprocess.Popen(
            self.cluster.head_argv([sys.executable, "-I", "-S", str(STOPWATCH)], cwd="/"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Bed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.down()  # with it every command on the head ends, the stopwatch too
        self._stopwatch.communicate()
        self._temporary.cleanup()

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What root finds in its environment on the head."""
        path = os.pathsep.join((os.path.dirname(sys.executable), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"))
        return {"PATH": path, "HOME": root_home(), "USER": "root", "LANG": "C.UTF-8", **(more or {})}

    def run(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> Cost:
        """The command on the head, untimed for the CPU: for what comes before and after a measurement."""
        asked = {"argv": list(argv), "env": self.environ(env), "timeout_s": timeout_s}
        assert self._stopwatch.stdin and self._stopwatch.stdout
        self._stopwatch.stdin.write(json.dumps(asked) + "\n")
        self._stopwatch.stdin.flush()
        answer = json.loads(self._stopwatch.stdout.readline())
        return Cost(answer["wall_s"], None, None, answer["status"], answer["tail"])

    def measure(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
    ) -> Cost:
        """The command on a resting head, with the CPU time of both sides until they rest again."""
        self.settle()
        head_s, hosts_s = self.cpu_seconds()
        cost = self.run(argv, env=env, timeout_s=timeout_s)
        self.settle()
        head_end_s, hosts_end_s = self.cpu_seconds()
        return Cost(cost.wall_s, head_end_s - head_s, hosts_end_s - hosts_s, cost.status, cost.tail)

    def rest(self, seconds: float) -> Cost:
        """What doing nothing costs for so long."""
        head_s, hosts_s = self.cpu_seconds()
        time.sleep(seconds)
        head_end_s, hosts_end_s = self.cpu_seconds()
        return Cost(seconds, head_end_s - head_s, hosts_end_s - hosts_s, 0, "")

    def settle(self) -> None:
        """Returns when head and hosts were quiet in two looks, or after SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        quiet, before = 0, sum(self.cpu_seconds())
        while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            now = sum(self.cpu_seconds())
            quiet = quiet + 1 if now - before < QUIET_SHARE * _LOOK_S else 0
            before = now

    def cpu_seconds(self) -> list[float]:
        """CPU time used so far by the head, then by all hosts together."""
        return [self.cluster.cpu_seconds(HEAD), self.cluster.cpu_seconds(HOSTS)]
