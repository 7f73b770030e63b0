"""Trainings that are slow and not hung, in real time and with the windows that jobs have: nobody is alarmed.

By --real-time. Days of it, for all types of devices, are simulated in tests/unit/health/test_hang.py.
"""

import signal
import time
from pathlib import Path
from typing import Any, Callable

import leftovers
import pytest
from scenes import Scene, await_that

from tests.lib.vcluster.cluster import VirtualCluster

FIRST = ("compile", 1200, "train", 660)
"""Longer than timeouts.first_step_s: from then on everything is judged."""
WITH_PHASES = (*FIRST, "checkpoint", 600, "train", 120, "evaluation", 900, "train", 120, "data", 600)
"""The other ranks wait for one: only the phases tell that it is no hang."""
WITHOUT = ("train", 120, "step", 600, "train", 120, "compile", 1200, "train", 120)
SAVE_S = 600
"""Of programs that do not tell phases: known by what they write, or that they wait for the disk."""
SLEEP_S, AFTER_S = 300, 240


def start(scene: Scene, kind: str, *modes: object, more: str = "") -> str:
    command = ["python3", "slow.py", kind, *[str(one) for one in modes]]
    return scene.start(scene.job(kind, command=command, slots=4, more="restart: {max_restarts: 1}\n" + more))


def alarms(scene: Scene, job: str) -> list[dict[str, Any]]:
    return [event for event in scene.show(job)["events"] if event["code"] == "hang"]


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("only_real_time")
def test_two_hours_of_slow_modes_are_no_hang(ascendrun: Any, cluster: VirtualCluster) -> None:
    scene = Scene(ascendrun, cluster)
    scene.add_code("hanging.py", "slow.py")
    phases = start(scene, "phases", *WITH_PHASES, *WITHOUT)
    plain = start(scene, "plain", *FIRST, "evaluation", 900, *WITHOUT)
    for job, mode in ((phases, "last"), (plain, "last")):
        await_that(lambda job=job, mode=mode: said(scene, job, mode), f"{job}: {mode}", deadline_s=8000)
        print(job, mode, alarms(scene, job), flush=True)
        assert not alarms(scene, job)
    suspend(scene, SLEEP_S)
    time.sleep(AFTER_S)  # longer than the window: what the sleep left behind would be reported by now
    assert not alarms(scene, phases) and not alarms(scene, plain)
    for job in (phases, plain):
        shown = scene.show(job)["job"]
        assert (shown["state"], shown["attempt"]) == ("RUNNING", 1)
        assert scene.ascendrun("stop", "--now", job).returncode == 0


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("only_real_time")
@pytest.mark.parametrize("mode", ["checkpoint", "slow-link", "disk"])
def test_a_checkpoint_without_a_phase_is_no_hang(scene_of: Callable[..., Scene], tmp_path: Path, mode: str) -> None:
    saved = tmp_path / "saved"  # on a disk, unlike those of the hosts: the kernel does not count what memory takes
    saved.mkdir()
    scene = scene_of(2, shares={str(saved): "/saved"} if mode != "disk" else {})
    disk = scene.cluster.file_system(scene.cluster.hosts[0], "/saved") if mode == "disk" else None
    scene.add_code("hanging.py", "slow.py")
    more = "timeouts: {first_step_s: 60}\nenv: {SAVED: /saved}\n"
    job = start(scene, "plain", "train", 180, mode, SAVE_S, more=more)
    if disk is not None:
        await_that(lambda: said(scene, job, "train"), "it trains", deadline_s=300)
        disk.stick(180 + SAVE_S, only="fsync")
    await_that(lambda: said(scene, job, "last"), "the checkpoint is written", deadline_s=1500)
    assert not alarms(scene, job) and scene.show(job)["job"]["attempt"] == 1
    assert scene.ascendrun("stop", "--now", job).returncode == 0


def said(scene: Scene, job: str, mode: str) -> bool:
    assert not list((scene.ascendrun.state_dir / "jobs" / job).glob("attempt-2")), scene.show(job)["events"]
    time.sleep(1)  # the two hours have other work for the processors
    return any(f"mode {mode}" in path.read_text().splitlines() for path in scene.spooled(job, "rank-0.out.*"))


def suspend(scene: Scene, seconds: float) -> None:
    """Everything stands still, as on a laptop that sleeps, only that the monotonic clock goes on."""
    stopped = leftovers.controllers(scene.cluster, scene.ascendrun.state_dir)
    leftovers.kill(stopped, signal.SIGSTOP)
    for host in scene.cluster.hosts:
        scene.cluster.freeze(host)
    time.sleep(seconds)
    for host in scene.cluster.hosts:
        scene.cluster.thaw(host)
    leftovers.kill(stopped, signal.SIGCONT)
