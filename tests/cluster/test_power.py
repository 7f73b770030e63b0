"""Hosts that fall silent and have a management controller: switched off, and then the job trains elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import leftovers
import pytest
import yaml
from conftest import Ascendrun, Watch
from scenes import SAVED, await_that
from test_silent_nodes import Lossy

from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.fence import FAILED, OFF, OK, Bmc

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


class Configured(Ascendrun):
    """Every command has the settings: any of them may start the controller."""

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return super().environ({"XDG_CONFIG_HOME": str(self.folder), **(more or {})})


class Switched(Lossy):
    """Its hosts can be switched off. `bmc`: what answers for them."""

    bmc: Bmc

    def job(self, name: str, *words: object, **options: Any) -> Path:
        path = super().job(name, *words, **options)
        hostfile = self.folder / f"{name}.hosts"
        lines = hostfile.read_text().splitlines()
        hostfile.write_text("".join(f"{line} bmc={line.split()[0]}.bmc\n" for line in lines if line.strip()))
        return path

    def configure(self, settings: dict[str, Any]) -> None:
        path = self.folder / "ascendrun" / "config.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(settings))

    def crash(self, name: str, *, mode: str = "wait") -> str:
        """A job of which node2 has lost its power; its id."""
        job: str = self.train(name, mode=mode)
        self.cluster.crash("node2")
        return job

    def since_off(self) -> list[tuple[str, str]]:
        """What was asked since a host was first to be switched off."""
        asked = self.bmc.asked
        return asked[asked.index(("node2", "off")) :] if ("node2", "off") in asked else []

    def hides(self, host: str, action: str) -> int | None:
        """Answer that the status is unknown before a host was to be switched off: no status ends the attempt."""
        return None if self.since_off() else FAILED


@pytest.fixture
def scene(
    ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster], no_leftovers: Watch, tmp_path: Path
) -> Iterator[Switched]:
    folder = tmp_path / "saved"
    folder.mkdir()
    cluster = cluster_of(3, shares={str(folder): SAVED})
    made = Switched(Configured(lambda: cluster, ascendrun.folder, no_leftovers), cluster)
    made.add_code("hanging.py", "training.py")
    made.bmc = Bmc(cluster, tmp_path / "bmc")
    made.configure(made.bmc.settings(60.0))
    yield made
    made.bmc.close()


def trains_elsewhere(scene: Switched, job: str, why: str = "powered-off") -> None:
    assert scene.await_attempt(job, 2)["hosts"] == ["node1", "node3"]
    [lost] = scene.events(job, "node-lost")
    assert (lost["hosts"], lost["values"]["why"]) == (["node2"], why)
    assert not scene.cluster.is_up("node2") and not scene.events(job, "host-fenced")
    scene.stop(job)


@pytest.mark.parametrize("mode", ["wait", "fence"])
def test_a_host_without_power_is_proved_off_and_the_job_restarts_without_its_lease(scene: Switched, mode: str) -> None:
    scene.bmc.answer = scene.hides
    job = scene.crash("dark", mode=mode)
    trains_elsewhere(scene, job)
    assert scene.since_off() == [("node2", "off"), ("node2", "status")]


def test_a_running_attempt_ends_when_its_silent_host_has_no_power(scene: Switched) -> None:
    job = scene.train("waiting", mode="wait", env={})  # found hung only after minutes
    scene.cluster.crash("node2")
    trains_elsewhere(scene, job, why="no-power")
    assert {action for _, action in scene.bmc.asked} == {"status"}


def test_a_running_attempt_goes_on_when_its_silent_host_has_power(scene: Switched) -> None:
    job = scene.train("cut-off", mode="wait", env={})
    scene.cluster.cut("node2")
    await_that(lambda: ("node2", "status") in scene.bmc.asked, "its status is asked")
    scene.stays(job, "RUNNING", for_s=10)
    assert scene.bmc.asked == [("node2", "status")] and scene.show(job)["job"]["attempt"] == 1
    scene.cluster.heal("node2")
    scene.stop(job)


def test_a_cut_host_that_lives_is_off_before_the_next_attempt_starts(scene: Switched) -> None:
    job = scene.train("cut", mode="wait")
    run, lived, off_at = scene.run(job), [], []

    def look(host: str, action: str) -> None:
        if action == "off":
            lived.append(
                any(one.environ.get("ASCENDRUN_RUN_ID") == f"{run}.1" for one in scene.cluster.processes(host))
            )
        elif lived:
            off_at.append(time.monotonic())

    scene.bmc.answer = look
    scene.cluster.cut("node2")
    scene.await_attempt(job, 2)
    assert lived == [True]
    scene.check_apart(job, 2)
    assert min(first for first, _ in scene.lives(job, 2)) > off_at[0]
    trains_elsewhere(scene, job)


@pytest.mark.parametrize(
    "answers", [{"off": FAILED}, {"off": OK, "status": OK}, {"off": None}], ids=["fails", "lies", "hangs"]
)
def test_what_an_agent_does_not_prove_leaves_the_job_waiting(scene: Switched, answers: dict[str, int | None]) -> None:
    def answer(host: str, action: str) -> int | None:
        if answers.get(action, OK) is None:
            threading.Event().wait(60.0)
        return answers.get(action, FAILED)

    scene.bmc.answer = answer
    scene.configure(scene.bmc.settings(5.0))
    job = scene.crash("unproved")
    scene.await_that_of(job, lambda row: row["reason_code"] == "waiting-for-power", "it waits")
    await_that(lambda: len(scene.events(job, "power-off")) == 2, "the answer is recorded")
    reason = scene.events(job, "power-off")[1]["values"]["reason"]
    assert reason["code"] == "power-off-failed"
    scene.stays(job, "BACKOFF", for_s=5)
    assert not scene.everywhere(job) and sum(action == "off" for _, action in scene.bmc.asked) == 1
    scene.ascendrun("lost", "node2", code=0)
    scene.await_attempt(job, 2)
    scene.stop(job)


def test_the_power_off_of_a_killed_head_is_continued_by_the_next_one(scene: Switched) -> None:
    def answer(host: str, action: str) -> int | None:
        if scene.since_off() == [("node2", "off"), ("node2", "status")]:
            killed = scene.controller()
            assert killed is not None
            leftovers.kill([killed])
        return scene.hides(host, action)

    scene.bmc.answer = answer
    job = scene.crash("killed")
    trains_elsewhere(scene, job)
    assert scene.since_off() == [("node2", "off"), ("node2", "status"), ("node2", "status"), ("node1", "status")]


def test_a_head_killed_before_the_host_was_off_leaves_it_on_for_whoever_uses_it_by_then(scene: Switched) -> None:
    def answer(host: str, action: str) -> int | None:
        killed = scene.controller()
        if action == "off" and killed is not None:
            leftovers.kill([killed])
        return FAILED if action == "off" else None

    scene.bmc.answer = answer
    job = scene.train("between", mode="wait")
    scene.cluster.cut("node2")
    await_that(lambda: len(scene.events(job, "power-off")) == 2, "the next controller refuses")
    reason = scene.events(job, "power-off")[1]["values"]["reason"]
    assert reason["code"] == "power-off-failed" and "could list who else uses it" in str(reason), reason
    scene.stays(job, "BACKOFF", for_s=5)
    assert scene.cluster.is_up("node2") and scene.since_off() == [("node2", "off"), ("node2", "status")]
    scene.cluster.heal("node2")
    scene.await_attempt(job, 2)
    scene.stop(job)


def test_doctor_and_validate_report_an_agent_that_does_not_work(scene: Switched) -> None:
    path = scene.job("checked")
    scene.bmc.answer = lambda host, action: {"node3": FAILED, "node2": OFF}.get(host, OK)
    report = scene.ascendrun.ask("doctor", "-H", scene.folder / "checked.hosts", "--device-type", "cpu")
    found = {tuple(one["hosts"]): one["message"] for one in report["findings"] if one["code"] == "power-agent"}
    assert found.keys() == {("node2",), ("node3",)} and "of another host" in found[("node2",)]
    assert {action for _, action in scene.bmc.asked} == {"status"}
    for power in ({"command": ["no-such-agent"]}, {"command": ["true", "--ip={ipmi}"]}, {"command": "true"}):
        scene.configure({"power": power})
        scene.ascendrun("validate", path, code=2)
