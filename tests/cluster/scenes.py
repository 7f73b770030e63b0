"""What the scenarios share: job files with the scripted rank, and questions about a job."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import leftovers
from looks import DEADLINE_S

from ascendrun.core.errors import AscendrunError
from ascendrun.head.state.store import Store
from ascendrun.node import layout
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.npus import install_on
from tests.lib.vcluster.processes import Process, await_true
from tests.lib.vcluster.processes import await_that as await_that  # beside a scene, tests await with it

CODE = Path(__file__).resolve().parents[2]
RANK_SCRIPT = Path(__file__).resolve().parent / "rank.py"
ASK_S = 3.0
ENOUGH = "/tmp/enough"
SAVED = "/ckpt"
"""Where the hosts of `training_scene_of` share a directory."""
BEAT_ON = ("beat-on", ENOUGH)
"""Words of a rank that goes on until the test has seen what it came for, and calls `Scene.enough`."""


class Scene:
    """A folder with job files on the head, and the command that submits them."""

    def __init__(self, ascendrun: Any, cluster: VirtualCluster) -> None:
        self.ascendrun, self.cluster = ascendrun, cluster
        self.folder: Path = ascendrun.folder
        self._run_ids: dict[str, str] = {}
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        shutil.copy(RANK_SCRIPT, code)
        for host in cluster.hosts:
            Path(cluster.path(host, ENOUGH)).unlink(missing_ok=True)

    def add_code(self, *names: str) -> None:
        """Put scripts of this directory into the working directory of the jobs."""
        for name in names:
            shutil.copy(RANK_SCRIPT.with_name(name), self.folder / "code")

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

    def begin(self, job_file: Path, line: str = "ready") -> str:
        """Starts it and waits until each of four ranks has printed the line; the job's id."""
        job = self.start(job_file)
        self.await_line(job, line, count=4)
        return job

    def enough(self) -> None:
        """Lets ranks that `beat-on` end."""
        for host in filter(self.cluster.is_up, self.cluster.hosts):
            Path(self.cluster.path(host, ENOUGH)).touch()

    def controllers(self) -> list[Process]:
        return list(leftovers.controllers(self.cluster, self.ascendrun.state_dir))

    def lose_the_records(self, job: str) -> None:
        """Kills the controller, and removes all of the state directory but the name of the head."""
        leftovers.kill(self.controllers(), signal.SIGKILL)
        shutil.rmtree(self.ascendrun.state_dir / "jobs" / job)
        for path in self.ascendrun.state_dir.glob("state.db*"):
            path.unlink()

    def show(self, job: str) -> dict[str, Any]:
        done = self.ascendrun("show", job, "-o", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        detail: dict[str, Any] = json.loads(done.stdout)
        return detail

    def run(self, job: str) -> str:
        if job not in self._run_ids:
            self._run_ids[job] = str(self.show(job)["run"])
        return self._run_ids[job]

    def state(self, job: str) -> str:
        return str(self.show(job)["job"]["state"])

    def reason(self, job: str) -> dict[str, Any]:
        """The code and the values of the reason that the job's newest change of state recorded."""
        changes = [event for event in self.show(job)["events"] if event["code"] == "state-changed"]
        reason: dict[str, Any] = changes[-1]["values"]["reason"]
        return reason

    def await_state(self, job: str, *states: str, deadline_s: float = DEADLINE_S) -> None:
        if not self._looks_often(job, lambda state: state in states, deadline_s=deadline_s):
            detail = self.show(job)
            log = self.ascendrun.state_dir / "controller.log"
            raise AssertionError(
                f"{job} is {detail['job']['state']}, not {states}: {detail['job']['reason']}\n"
                f"{json.dumps(detail['events'], indent=1)}\n{log.read_text() if log.exists() else ''}"
            )

    def stays(self, job: str, *states: str, for_s: float) -> None:
        """The job's state is one of these for so long."""
        has_left = self._looks_often(job, lambda state: state not in states, deadline_s=for_s)
        assert not has_left and self.state(job) in states, self.show(job)["events"]

    def _looks_often(self, job: str, fact: Callable[[str], bool], *, deadline_s: float) -> bool:
        """Whether the command tells of such a state in time.

        The command is asked now and then, as by a user; between that the store is read, which takes no processor.
        """
        asked_mono = float("-inf")

        def is_told() -> bool:
            nonlocal asked_mono
            if time.monotonic() < asked_mono + ASK_S and not fact(self.stored_state(job)):
                return False
            asked_mono = time.monotonic()
            return fact(self.state(job))

        return await_true(is_told, deadline_s=deadline_s)

    def stored_state(self, job: str) -> str:
        """ "" where the store cannot be read at this moment."""
        try:
            with Store.open_for_reading(self.ascendrun.state_dir) as store:
                return store.jobs.find(job).job.state.value
        except AscendrunError:
            return ""

    def await_line(self, job: str, text: str, *, count: int = 1, deadline_s: float = DEADLINE_S) -> None:
        """Until `text` stands so many times in the head's copy of the logs."""

        def seen() -> bool:
            return sum(path.read_bytes().count(text.encode()) for path in self.spooled(job, "rank-*.out.*")) >= count

        assert await_true(seen, deadline_s=deadline_s), f"{text!r} not {count} times in the logs of {job}"

    def spooled(self, job: str, pattern: str = "*") -> list[Path]:
        folder = self.ascendrun.state_dir / "jobs" / job
        return sorted(path for path in folder.glob(f"attempt-*/*/{pattern}") if ".times." not in path.name)

    def runs_on(self, host: str) -> Path:
        """The folder of the host's own runs, also where the hosts share a home."""
        key = layout.make_machine_key(self.cluster.path(host, "/etc/machine-id").read_text().strip(), host)
        return Path(self.cluster.path(host, layout.runs_dir("/root/.ascendrun", key)))

    def on_node(self, job: str, pattern: str = "rank-*") -> dict[str, bytes]:
        """{"host/file" or "host/attempt-2/file": bytes} of the job's pulled files as they lie on the nodes."""
        run = self.run(job)
        files: dict[str, bytes] = {}
        for host in self.cluster.hosts:
            for folder in self.runs_on(host).glob(f"{run}/attempt-*"):
                where = folder / layout.WHERE
                streams = json.loads(where.read_text())["streams"] if where.exists() else None
                for path in (folder if streams is None else self.cluster.path(host, streams)).glob(pattern):
                    files[_name(host, folder.name, path.name)] = path.read_bytes()
        return files

    def on_head(self, job: str, pattern: str = "rank-*") -> dict[str, bytes]:
        folder = self.ascendrun.state_dir / "jobs" / job
        return {
            _name(path.parent.name, path.parent.parent.name, path.name): path.read_bytes()
            for path in folder.glob(f"attempt-*/*/{pattern}")
        }

    def lives(self, job: str, attempt: int) -> list[tuple[float, float]]:
        """When each rank of the attempt began and was seen last, by the one clock of all hosts; of ranks that tell."""
        found = []
        for host in filter(self.cluster.is_up, self.cluster.hosts):
            for path in self.cluster.path(host, "/tmp").glob(f"alive-{self.run(job)}.{attempt}-*"):
                times = [float(number) for number in re.findall(r"^\d+\.\d{3}$", path.read_text(), re.MULTILINE)]
                found += [(times[0], times[-1])] if times else []
        return found

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

    def await_nobody(self, job: str, *, deadline_s: float = DEADLINE_S) -> None:
        def left() -> list[int]:
            return [pid for host in self.cluster.hosts for pid in self.ranks_of(job, host, with_sampler=True)]

        assert await_true(lambda: not left(), deadline_s=deadline_s), f"{job} has left processes: {left()}"

    def controller(self) -> Process | None:
        """The running one, without its guard."""
        both = leftovers.controllers(self.cluster, self.ascendrun.state_dir)
        guards = {one.pid for one in both}
        return next((one for one in both if one.ppid in guards), None)

    def is_drained(self, job: str) -> bool:
        """Whether every byte of all attempts is here."""
        attempts = [*(self.ascendrun.state_dir / "jobs" / job).glob("attempt-*")]
        return bool(attempts) and all((one / "complete").exists() for one in attempts)


def _name(host: str, attempt: str, file: str) -> str:
    return f"{host}/{file}" if attempt == "attempt-1" else f"{host}/{attempt}/{file}"


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


def venv_python() -> str:
    return sys.executable


def run_text(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
