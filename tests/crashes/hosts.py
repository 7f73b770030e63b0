"""Two virtual hosts without a common disk, jobs of two ranks on each, and the blows that they take."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import UnreachableError
from ascendrun.head.protocol.control_socket import ControlClient
from tests.cluster.conftest import end_controller, head_environ
from tests.crashes.remains import Story, read_story
from tests.crashes.trainings import Training
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import Process, await_true

DEADLINE_S = 300.0
RANKS = 4
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}


class CampaignError(AssertionError):
    """A promise was broken; the message is the whole story."""


class Hosts:
    """The cluster, and the command line on its head. `folder`: for the head's files; `environ`: of its commands."""

    def __init__(self, cluster: VirtualCluster, folder: Path) -> None:
        self.cluster, self.folder, self.state_dir = cluster, folder, folder / "state"
        self.environ = head_environ(self.state_dir)
        (folder / "two.hosts").write_text(cluster.hostfile(slots=2))

    def ascendrun(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = self.cluster.head_argv([sys.executable, "-m", "ascendrun", *words], cwd=str(self.folder))
        return subprocess.run(argv, env=self.environ, capture_output=True, text=True, timeout=DEADLINE_S)

    def do(self, *words: str) -> str:
        """What such a command prints; it must exit with 0."""
        done = self.ascendrun(*words)
        if done.returncode:
            raise CampaignError(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def await_controller(self) -> None:
        """On a machine with other work it may need longer to start than `submit` waits."""

        def responds() -> bool:
            with suppress(UnreachableError):
                ControlClient(self.state_dir).close()
                return True
            return False

        self.ascendrun("exec", "-H", "two.hosts", "--", "true")  # starts it, however long it needs
        if not await_true(responds, deadline_s=2 * DEADLINE_S):
            raise CampaignError("the controller does not respond")

    def close(self) -> None:
        end_controller(self.cluster, self.state_dir)

    def start(self, training: Training, name: str, **more: Any) -> str:
        """Submit a job of it over two hosts; the id."""
        job = {
            "name": name,
            "nodes": 2,
            "python": sys.executable,
            "devices": {"type": "cpu", "per_node": RANKS // 2},
            "env": QUIET,
            **more,
        }
        if training.program:
            job = {"program": training.program, "args": training.arguments, **job}
        else:
            script = {"path": str(Path(__file__).parent), "exclude": ["histories/"]}
            job |= {"command": ["python3", "script.py", str(training.steps)], "workdir": script}
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(job))
        return str(json.loads(self.do("submit", path.name, "--detach", "-o", "json"))["id"])

    def submit(self, training: Training, home: str) -> Job:
        """`home`: the folder on the nodes that keeps checkpoints and results over all starts."""
        more = {
            "hostfile": "two.hosts",
            "args": {**training.arguments, "output_dir": f"{home}/out"},
            "restart": {"max_restarts": 0},
            "checkpoint": {"dir": f"{home}/checkpoints", "grace_period_s": 120},
        }
        return Job(self, self.start(training, training.name, **more))

    def on(self, host: str, path: str) -> Path:
        return self.cluster.path(host, path)

    def checkpoints(self, home: str, folder: str) -> list[Path]:
        """Of every node: where the checkpoints of one training lie."""
        return [self.on(host, f"{home}/checkpoints/{folder}") for host in self.cluster.hosts]

    def results(self, training: Training, home: str) -> dict[str, str]:
        """Hashes of the results by host and name."""
        found = {}
        for host in self.cluster.hosts:
            for name in training.results:
                path = self.on(host, f"{home}/out/{name}")
                if path.is_file():
                    found[f"{host}/{name}"] = content_hash(path)
        return found


def content_hash(path: Path) -> str:
    """Of a file's bytes; of torch's archives those of their members, whose names begin with a process's number."""
    if not zipfile.is_zipfile(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            inner = name.partition("/")[2]
            digest.update(f"{inner} {archive.getinfo(name).file_size}\n".encode() + archive.read(name))
    return digest.hexdigest()


class Job:
    """One start of a training."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts, self.name = hosts, name
        self.run = str(self.show()["run"])

    def show(self) -> dict[str, Any]:
        return dict(json.loads(self.hosts.do("show", self.name, "-o", "json")))

    def is_over(self) -> bool:
        """On the nodes themselves, cheaply: no rank that ran is there any more."""
        return any(path.exists() for path in self._on_nodes("ended.json"))

    def _on_nodes(self, name: str) -> list[Path]:
        return [
            path
            for host in self.hosts.cluster.hosts
            if self.hosts.cluster.is_up(host)
            for path in self.hosts.on(host, "/root/.ascendrun/nodes").glob(f"*/runs/{self.run}/attempt-1/{name}")
        ]

    def told(self) -> Story:
        """What rank 0 has written on its node by now."""
        return read_story(sorted(self._on_nodes("rank-0.metrics.[0-9]*")))

    def ranks(self) -> dict[int, Process]:
        return {
            int(one.environ["RANK"]): one
            for host in self.hosts.cluster.hosts
            for one in self.hosts.cluster.processes(host)
            if one.environ.get("ASCENDRUN_RUN_ID", "").startswith(f"{self.run}.")
            and "RANK" in one.environ
            and any("ascendrun.programs" in word for word in one.argv)
        }

    def wait_for(self, fact: Callable[[], bool], what: str) -> None:
        """Until the fact is true or the job is over."""
        if not await_true(lambda: fact() or self.is_over(), deadline_s=DEADLINE_S):
            raise CampaignError(f"{self.name}: within {DEADLINE_S:.0f} s never {what}: {self.story()}")

    def end(self) -> str:
        """How it ended, once its logs are on the head; a job whose node died is over once that came up again."""
        self.hosts.ascendrun("wait", self.name)
        spool = self.hosts.state_dir / "jobs" / self.name / "attempt-1"
        if not await_true(lambda: (spool / "complete").exists(), deadline_s=DEADLINE_S):
            raise CampaignError(f"{self.name}: its logs never came whole: {self.story()}")
        return str(self.show()["job"]["state"])

    def spooled(self) -> Story:
        """As `told`, from the head's own copy."""
        spool = self.hosts.state_dir / "jobs" / self.name / "attempt-1" / "node1"
        return read_story(sorted(spool.glob("rank-0.metrics.[0-9]*")))

    def story(self) -> str:
        told = self.hosts.ascendrun("explain", self.name)
        logs = self.hosts.ascendrun("logs", self.name)
        return f"\n{told.stdout[-3000:]}{told.stderr[-500:]}\n{logs.stdout[-5000:]}"

    # --- the blows ---

    def kill_rank(self, rank: int, pid: int | None) -> str:
        if pid is not None and os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGKILL)
        return f"rank {rank} killed"

    def stop(self) -> str:
        self.hosts.ascendrun("stop", self.name)
        return "stopped"

    def crash(self, host: str) -> str:
        """Power loss: silence, nothing is written any more, no exit record; then it comes up with its disk."""
        self.hosts.cluster.crash(host)
        self.hosts.cluster.reboot(host, keep_disk=True)
        return f"{host} lost its power"


def keep_line(line: str, file: Path | None) -> None:
    """On standard output, and at the end of the file."""
    print(line, flush=True)
    if file is not None:
        with open(file, "a") as kept:
            kept.write(line + "\n")
