"""Jobs of launcher: ray with the Ray of PyPI, on two hosts with two simulated NPUs each."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CODE
from invariants import check_nobody_listens
from leftovers import kill
from scenes import NpuScene, await_that, run_text

from ascendrun.node import layout
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import await_true

pytestmark = pytest.mark.timeout(1200)
PYTHON = CODE / ".venv-ray" / "bin" / "python"
READY = "driver ready"
SITE = """setup: source /usr/local/Ascend/ascend-toolkit/set_env.sh
checks: {skip: [torch-npu]}
"""
DRIVER = """
import time, ray
ray.init()
@ray.remote(resources={"NPU": 1})
class Worker:
    def wait(self, seconds):
        time.sleep(seconds)
workers = [Worker.remote() for _ in range(int(ray.cluster_resources()["NPU"]))]
ray.get([worker.wait.remote(0) for worker in workers])
print("driver ready", flush=True)
ray.get([worker.wait.remote(600) for worker in workers])
"""


@pytest.fixture(scope="session", autouse=True)
def ray_environment() -> None:
    setup = [CODE / "bin/setup-env", "--venv", str(PYTHON.parents[1]), "--over", ".venv", "ray"]
    subprocess.run(setup, cwd=CODE, check=True)


class RayScene(NpuScene):
    def ray_job(self, name: str, command: str = "driver.py", more: str = "") -> Path:
        (self.folder / "code" / "driver.py").write_text(DRIVER)
        path = self.folder / f"{name}.yaml"
        path.write_text(
            f"name: {name}\ncommand: [python, {command}]\nlauncher: ray\npython: {PYTHON}\n"
            f"hostfile: {self.hostfile.name}\nworkdir: {{path: code}}\ndevices: {{type: npu, per_node: 2}}\n"
            f"{SITE}{more}"
        )
        return path

    def await_end(self, job: str) -> str:
        """Wait for the end; return the state."""
        self.await_state(job, "SUCCEEDED", "FAILED", "STOPPED", deadline_s=180)
        return self.state(job)

    def folders(self) -> list[Path]:
        """The directories of clusters that are left on the hosts."""
        bases = {self.cluster.path(host, layout.local_base()) for host in self.hosts}
        return [path for base in bases for path in base.glob("????????")]

    def require_nothing_left(self, job: str) -> None:
        self.await_nobody(job)
        assert await_true(lambda: not self.folders(), deadline_s=60.0), self.folders()  # removed after the last process
        check_nobody_listens(self.cluster)

    def verdict(self, job: str) -> dict[str, Any]:
        await_that(lambda: self.show(job)["job"]["confidence"] != "preliminary", "it is diagnosed")
        return dict(self.ascendrun.ask("explain", job)["diagnosis"])

    def text(self, job: str, pattern: str) -> str:
        await_that(lambda: self.is_drained(job), "every byte is here")
        return "".join(path.read_text() for path in self.spooled(job, pattern))


@pytest.fixture
def scene(ascendrun: object, cluster: VirtualCluster) -> Iterator[RayScene]:
    yield RayScene(ascendrun, cluster)


def test_the_quick_start_of_the_page_runs_when_both_nodes_have_joined(scene: RayScene) -> None:
    page = (CODE / "docs/ray.md").read_text(encoding="utf-8")
    (train,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (job_file,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^\$ ascendrun (.*)$", page, re.MULTILINE)
    (scene.folder / "train.py").write_text(train)
    (scene.folder / "cluster.hosts").write_text(scene.hostfile.read_text())
    (scene.folder / "job.yaml").write_text(job_file.replace("/opt/venv/bin/python", str(PYTHON)) + SITE)
    done = scene.ascendrun(*command.split(), timeout=600)
    assert done.returncode == 0, run_text(done)
    assert "4 NPUs on 2 nodes" in scene.text("j-0001", "rank-0.out.*")
    steps = [line for line in scene.text("j-0001", "node-*.out.*").splitlines() if "step 3 on" in line]
    assert sorted(line[-1] for line in steps) == ["0", "0", "1", "1"]
    assert len({line.partition(")")[0] for line in steps}) == 4 and all(line.startswith("(worker ") for line in steps)
    (row,) = json.loads(scene.ascendrun("ps", "-a", "-o", "json").stdout)["jobs"]
    assert (row["state"], row["progress"]["step"]) == ("SUCCEEDED", 3), row
    scene.require_nothing_left("j-0001")


@pytest.mark.thorough
def test_the_template_trains_with_ray_train_on_two_hosts(scene: RayScene) -> None:
    folder = scene.folder / "ray-train"
    scene.ascendrun("init", "ray-train", folder, code=0)
    (folder / "cluster.hosts").write_text(scene.hostfile.read_text())
    done = scene.ascendrun("submit", folder / "job.yaml", "--set", f"python={PYTHON}", timeout=400)
    assert done.returncode == 0, run_text(done)
    (row,) = scene.ascendrun.ask("ps", "-a")["jobs"]
    assert row["progress"]["step"] == 200 and row["progress"]["loss"] < 0.01, row
    printed = [
        (path.parent.name, path.read_text().count("'step': 200")) for path in scene.spooled("j-0001", "node-*.out.*")
    ]
    assert sum(count for _, count in printed) == 4 and len({host for host, count in printed if count}) == 2, printed
    scene.require_nothing_left("j-0001")


def kill_one_of(scene: RayScene, host: str, name: str) -> None:
    found = [one for one in scene.cluster.processes(host) if one.argv and name in " ".join(one.argv[:1])]
    assert found, [one.argv[:1] for one in scene.cluster.processes(host)]
    kill(found[:1], signal.SIGKILL)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(metafunc.config.getoption("--deaths")))


@pytest.mark.parametrize(
    ("host", "victim", "code", "shown"),
    [
        ("node2", "raylet/raylet", "ray-raylet-died", "(ray) raylet [exit code=-9"),
        pytest.param("node1", "gcs/gcs_server", "ray-gcs-died", "gcs_server [exit code=-9", marks=pytest.mark.thorough),
        pytest.param("node2", "ray::Worker", "exception", "ActorDiedError", marks=pytest.mark.thorough),
        pytest.param("node1", "driver.py", "killed", "SIGKILL", marks=pytest.mark.thorough),
        pytest.param("node2", None, "node-rebooted", "", marks=pytest.mark.thorough),
    ],
)
def test_what_died_is_the_verdict_and_nothing_is_left(
    scene: RayScene, host: str, victim: str | None, code: str, shown: str, number: int
) -> None:
    job = scene.start(scene.ray_job("wait"))
    scene.await_line(job, READY, deadline_s=180)
    if victim is None:
        scene.cluster.reboot(host, keep_disk=True)
    elif victim == "driver.py":
        kill([one for one in scene.cluster.processes(host) if "driver.py" in one.argv[1:2]], signal.SIGKILL)
    else:
        kill_one_of(scene, host, victim)
    assert scene.await_end(job) == "FAILED"
    found = scene.verdict(job)
    assert found["code"] == code and (code == "exception" or found["hosts"] == [host]), found
    assert shown in str(found["values"]) and "environ." not in str(found["evidence"]), found
    scene.require_nothing_left(job)


TRAIN = """
import json, os, pathlib, time, ray
ray.init()
first = int(os.environ.get("ASCENDRUN_RESUME_STEP", 0))
@ray.remote(resources={"NPU": 2}, max_restarts=0)
class Worker:
    def save(self, step):
        place = pathlib.Path("/root/ray-checkpoints", f"checkpoint-{step}")
        place.mkdir(parents=True, exist_ok=True)
        (place / "pytorch_model.bin").write_bytes(b"weights")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
workers = [Worker.remote() for _ in range(2)]
while first < 30:
    ray.get([one.save.remote(first + 10) for one in workers])
    print({"step": first + 10, "loss": 1.0}, "saved", flush=True)
    time.sleep(0.2)
    first += 10 if first == 20 else 0
"""


@pytest.mark.thorough
def test_a_lost_raylet_and_a_lost_node_restart_the_job_from_its_checkpoint_and_are_counted(scene: RayScene) -> None:
    more = "restart: {max_restarts: 2, backoff_s: [1, 2]}\ncheckpoint: {dir: /root/ray-checkpoints}\n"
    path = scene.ray_job("again", "train.py", more)
    (scene.folder / "code" / "train.py").write_text(TRAIN)
    job = scene.start(path)
    scene.await_line(job, "'step': 10,", deadline_s=90)
    kill_one_of(scene, "node2", "raylet/raylet")
    scene.await_line(job, "'step': 20,", deadline_s=120)
    scene.cluster.reboot("node2", keep_disk=True)
    assert scene.await_end(job) == "SUCCEEDED"
    detail = scene.show(job)
    events = {code: [one["values"] for one in detail["events"] if one["code"] == code] for code in EVENTS}
    found = [(one["kind"], one["finding"], one["used"], one["limit"]) for one in events["restarting"]]
    assert found == [("infra", "ray-raylet-died", 0, 2), ("infra", "node-rebooted", 1, 2)]
    assert [one["step"] for one in events["resume-chosen"]] == [10, 20] and detail["job"]["attempt"] == 3
    scene.require_nothing_left(job)


EVENTS = ("restarting", "resume-chosen")
SLOW = "import sys, time\ntime.sleep(3600 if '--block' in sys.orig_argv else 0)\n"


@pytest.mark.thorough
def test_a_node_that_does_not_join_in_time_is_named(scene: RayScene) -> None:
    slow = "[ $(hostname) = node1 ] || export PYTHONPATH=$PWD/slow\n"
    path = scene.ray_job("late", more="timeouts: {start_s: 60}\n")
    path.write_text(path.read_text().replace("setup: ", f"setup: |\n  {slow}  "))
    (scene.folder / "code" / "slow").mkdir()
    (scene.folder / "code" / "slow" / "sitecustomize.py").write_text(SLOW)
    job = scene.start(path)
    assert scene.await_end(job) == "FAILED"
    found = scene.verdict(job)
    assert (found["code"], found["hosts"]) == ("ray-late", ["node2"]), found
    scene.require_nothing_left(job)


EATER = """
import time, ray
ray.init()
@ray.remote(max_retries=0)
def eat():
    data = bytearray(300 << 20)
    time.sleep(600)
ray.get(eat.remote())
"""


@pytest.mark.thorough
def test_a_worker_that_ray_ended_for_memory_is_the_verdict(scene: RayScene) -> None:
    path = scene.ray_job(
        "eater", "eat.py", "env: {RAY_memory_usage_threshold: 0.01, RAY_memory_monitor_refresh_ms: 100}\n"
    )
    (scene.folder / "code" / "eat.py").write_text(EATER)
    job = scene.start(path)
    assert scene.await_end(job) == "FAILED"
    found = scene.verdict(job)
    assert (found["code"], found["domain"]) == ("ray-out-of-memory", "host-memory"), found
    scene.require_nothing_left(job)


@pytest.mark.thorough
def test_two_jobs_on_the_same_hosts_leave_each_other_and_a_foreign_cluster_alone(scene: RayScene) -> None:
    argv = [str(PYTHON.with_name("ray")), "start", "--head", "--disable-usage-stats"]
    assert scene.cluster.host_run("node1", argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    foreign = [one for one in scene.cluster.processes("node1") if "/gcs_server" in "".join(one.argv[:1])]
    files = [scene.ray_job(f"half-{ids}") for ids in (0, 1)]
    for ids, file in enumerate(files):
        file.write_text(file.read_text().replace("per_node: 2", f"ids: [{ids}]"))
    first, second = jobs = [scene.start(file) for file in files]
    for job in jobs:
        scene.await_line(job, READY, deadline_s=180)
    assert len(scene.folders()) == 4
    scene.ascendrun("stop", first, code=0)
    assert scene.await_end(first) == "STOPPED"
    scene.await_nobody(first)
    assert scene.state(second) == "RUNNING" and len(scene.folders()) == 2
    scene.ascendrun("stop", second, code=0)
    assert scene.await_end(second) == "STOPPED"
    scene.await_nobody(second)
    left = [one for one in scene.cluster.processes("node1") if "ray" in " ".join(one.argv)]  # also of Python files
    assert len(foreign) == 1 and foreign[0].pid in {one.pid for one in left}
    kill(left, signal.SIGKILL)
    assert scene.folders() == []
