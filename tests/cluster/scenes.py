"""What the scenarios share: job files with the scripted rank, and questions about a job."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tree import install_on
from ascendrun.sim.vcluster.cluster import VirtualCluster
from ascendrun.sim.vcluster.processes import await_true

RANK_SCRIPT = Path(__file__).resolve().parent / "rank.py"


class Scene:
    """A folder with job files on the head, and the command that submits them."""

    def __init__(self, ascendrun: Any, cluster: VirtualCluster) -> None:
        self.ascendrun, self.cluster = ascendrun, cluster
        self.folder: Path = ascendrun.folder
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        shutil.copy(RANK_SCRIPT, code)

    def job(
        self,
        name: str,
        *words: object,
        hosts: Sequence[str] | None = None,
        per_node: int = 2,
        slots: int = 2,
        more: str = "",
        command: list[str] | None = None,
    ) -> Path:
        """Writes a job whose ranks do `words` (or run `command`) on the cluster's hosts."""
        hostfile = self.folder / f"{name}.hosts"
        hostfile.write_text(self.cluster.hostfile(slots=slots, names=hosts))
        argv = command or ["python3", "rank.py", *[str(word) for word in words]]
        path = self.folder / f"{name}.yaml"
        path.write_text(
            f"name: {name}\ncommand: {json.dumps(argv)}\nhostfile: {hostfile.name}\n"
            f"workdir: {{path: code}}\ndevices: {{type: cpu, per_node: {per_node}}}\n{more}"
        )
        return path

    def start(self, job_file: Path, *options: object, env: dict[str, str] | None = None) -> str:
        """Submits without following; the job's id."""
        done = self.ascendrun("submit", job_file, "--detach", "-o", "json", *options, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout)["id"])

    def show(self, job: str) -> dict[str, Any]:
        done = self.ascendrun("show", job, "-o", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        detail: dict[str, Any] = json.loads(done.stdout)
        return detail

    def run(self, job: str) -> str:
        return str(self.show(job)["run"])

    def state(self, job: str) -> str:
        return str(self.show(job)["job"]["state"])

    def reason(self, job: str) -> dict[str, Any]:
        """The code and the values of the reason that the job's newest change of state recorded."""
        changes = [event for event in self.show(job)["events"] if event["code"] == "state-changed"]
        reason: dict[str, Any] = changes[-1]["values"]["reason"]
        return reason

    def await_state(self, job: str, *states: str, deadline_s: float = 60.0) -> None:
        if not await_true(lambda: self.state(job) in states, deadline_s=deadline_s):
            detail = self.show(job)
            log = self.ascendrun.state_dir / "controller.log"
            raise AssertionError(
                f"{job} is {detail['job']['state']}, not {states}: {detail['job']['reason']}\n"
                f"{json.dumps(detail['events'], indent=1)}\n{log.read_text() if log.exists() else ''}"
            )

    def await_line(self, job: str, text: str, *, count: int = 1, deadline_s: float = 60.0) -> None:
        """Until `text` stands so many times in the head's copy of the logs."""

        def seen() -> bool:
            return sum(path.read_bytes().count(text.encode()) for path in self.spooled(job, "rank-*.out.*")) >= count

        assert await_true(seen, deadline_s=deadline_s), f"{text!r} not {count} times in the logs of {job}"

    def spooled(self, job: str, pattern: str = "*") -> list[Path]:
        folder = self.ascendrun.state_dir / "jobs" / job
        return sorted(path for path in folder.glob(f"attempt-*/*/{pattern}") if ".times." not in path.name)

    def on_node(self, job: str, pattern: str = "rank-*") -> dict[str, bytes]:
        """{"host/file": bytes} of the job's pulled files as they lie on the nodes."""
        run = self.run(job)
        files: dict[str, bytes] = {}
        for host in self.cluster.hosts:
            root = self.cluster.path(host, "/root/.ascendrun/runs")
            for path in root.glob(f"{run}/attempt-*/{pattern}"):
                files[f"{host}/{path.name}"] = path.read_bytes()
        return files

    def on_head(self, job: str, pattern: str = "rank-*") -> dict[str, bytes]:
        folder = self.ascendrun.state_dir / "jobs" / job
        return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.glob(f"attempt-*/*/{pattern}")}

    def ranks_of(self, job: str, host: str, *, with_sampler: bool = False) -> list[int]:
        """Pids, as the machine sees them, of everything on the host that carries the job's tag."""
        mark = f"{self.run(job)}."
        return [
            one.pid
            for one in self.cluster.processes(host)
            if (one.environ.get("ASCENDRUN_RUN_ID") or "").startswith(mark)
            and (with_sampler or "ASCENDRUN_SAMPLER" not in one.environ)
        ]

    def everywhere(self, job: str) -> list[int]:
        return [pid for host in self.cluster.hosts for pid in self.ranks_of(job, host)]

    def await_nobody(self, job: str, *, deadline_s: float = 30.0) -> None:
        def left() -> list[int]:
            return [pid for host in self.cluster.hosts for pid in self.ranks_of(job, host, with_sampler=True)]

        assert await_true(lambda: not left(), deadline_s=deadline_s), f"{job} has left processes: {left()}"

    def is_drained(self, job: str) -> bool:
        return any((self.ascendrun.state_dir / "jobs" / job).glob("attempt-*/complete"))


class NpuScene(Scene):
    """Two hosts with two simulated devices each; `hostfile` names them."""

    hosts = ("node1", "node2")

    def __init__(self, ascendrun: Any, cluster: VirtualCluster) -> None:
        super().__init__(ascendrun, cluster)
        for number, name in enumerate(self.hosts, start=1):
            install_on(cluster, name, Scenario(cards=2, number=number))
        self.hostfile = self.folder / "npu.hosts"
        self.hostfile.write_text(cluster.hostfile(slots=2, names=self.hosts))

    def npu_job(self) -> Path:
        """Four ranks, one on each device, sampled twice a second."""
        command = ["env", "ASCENDRUN_SIM_NPU=auto", "python3", "rank.py", "meet", "print", "ready", "beat", "600"]
        path = self.folder / "npu.yaml"
        path.write_text(
            f"name: npu\ncommand: {json.dumps(command)}\nhostfile: {self.hostfile.name}\n"
            "setup: source /usr/local/Ascend/ascend-toolkit/set_env.sh\nsampling: {interval_s: 0.5}\n"
            "workdir: {path: code}\ndevices: {type: npu, per_node: 2}\nenv: {PYTHONUNBUFFERED: '1'}\n"
        )
        return path


def await_that(condition: Callable[[], bool], what: str, *, deadline_s: float = 60.0) -> None:
    assert await_true(condition, deadline_s=deadline_s), f"within {deadline_s:g} s it never was true: {what}"


def venv_python() -> str:
    return sys.executable


def run_text(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
