"""The folder of a node fails for a while under a running job: the job goes on, and what is lost is named."""

from __future__ import annotations

import re

import pytest
from invariants import check_ended
from scenes import BEAT_ON, ENOUGH, Scene, await_that

from tests.thorough import examples

FAULTS = ["EACCES", "EIO", "ESTALE", "ENOSPC", "EROFS", "hang"]
FAULT_S = examples(4, 60)
HANG_S = examples(4, 20)


def fail(scene: Scene, fault: str, host: str = "node2") -> None:
    fs = scene.cluster.node_fs(host)
    fs.hang() if fault == "hang" else fs.fail(fault)


def check_lines(scene: Scene, job: str) -> None:
    """Each rank's beats are there without a gap."""
    for rank in range(4):
        text = b"".join(path.read_bytes() for path in scene.spooled(job, f"rank-{rank}.out.*")).decode()
        beats = [int(number) for number in re.findall(r"^beat (\d+) of rank", text, re.MULTILINE)]
        assert beats == list(range(len(beats))) and len(beats) > 50, (rank, beats[:3], len(beats))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_fails_ends_no_job_and_costs_no_line(scene: Scene, fault: str) -> None:
    scene.cluster.node_fs("node2")
    seconds = HANG_S if fault == "hang" else FAULT_S
    job = scene.start(scene.job("io", "print", "ready", *BEAT_ON))
    scene.await_line(job, "ready", count=4)
    fail(scene, fault)
    scene.stays(job, "RUNNING", for_s=seconds)
    scene.cluster.node_fs("node2").heal()
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: scene.is_drained(job), "every byte arrives")
    check_lines(scene, job)
    check_ended(scene, job, state="SUCCEEDED")


@pytest.mark.parametrize("now", [False, True])
def test_a_stop_reaches_ranks_whose_folder_takes_no_request(scene: Scene, now: bool) -> None:
    scene.cluster.node_fs("node2")
    job = scene.start(scene.job("stopped", "deaf" if now else "save-on-term", "print", "ready", "hang"))
    scene.await_line(job, "ready", count=4)
    fail(scene, "EIO")
    assert scene.ascendrun("stop", "--no-wait", job, *(["--now"] if now else [])).returncode == 0
    await_that(lambda: not scene.ranks_of(job, "node2"), "its ranks are ended")
    scene.cluster.node_fs("node2").heal()
    scene.await_state(job, "STOPPED")
    check_ended(scene, job, state="STOPPED")


def test_the_end_of_ranks_waits_for_the_folder_to_be_written(scene: Scene) -> None:
    scene.cluster.node_fs("node2")
    job = scene.start(scene.job("ends", "print", "ready", *BEAT_ON))
    scene.await_line(job, "ready", count=4)
    fail(scene, "EROFS")
    scene.enough()
    await_that(lambda: not scene.ranks_of(job, "node2"), "its ranks end")
    scene.stays(job, "RUNNING", for_s=2)
    scene.cluster.node_fs("node2").heal()
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: scene.is_drained(job), "every byte arrives")
    check_lines(scene, job)


FORGE = """
import os, sys, time
print("ready", flush=True)
if os.environ["RANK"] == "3":
    folder = os.path.dirname(os.environ["ASCENDRUN_METRICS_FILE"])
    with open(os.path.join(folder, "events.0"), "a") as file:
        for number, event in enumerate(("rank_exited", "rank_exited", "ended")):
            fields = '"code":0,"signal":null,"stopped":false,"leftovers":[],"rank":%d' % (2 + number)
            file.write('{"seq":%d,"at_ns":1,"event":"%s",%s}\\n' % (60 + number, event, fields))
    print("forged", flush=True)
while not os.path.exists("ENOUGH"):
    time.sleep(0.05)
sys.exit(int(os.environ["RANK"] == "3"))
"""


def test_an_end_that_a_rank_writes_itself_changes_nothing(scene: Scene) -> None:
    job = scene.start(scene.job("forged", command=["python3", "-c", FORGE.replace("ENOUGH", ENOUGH)]))
    scene.await_line(job, "forged")
    scene.stays(job, "RUNNING", for_s=2)
    assert scene.ranks_of(job, "node2")
    scene.enough()
    scene.await_state(job, "FAILED")
    reason = scene.reason(job)
    assert (reason["code"], reason["ranks"], reason["values"]["code"]) == ("rank-exited", [3], 1)
    check_ended(scene, job, state="FAILED")


@pytest.mark.thorough
def test_a_process_that_survives_sigkill_holds_its_host_until_it_is_gone(scene: Scene) -> None:
    stuck = scene.cluster.file_system("node2", "/srv")
    read = (
        "import os, time; print('ready', flush=True); os.environ['RANK'] != '3' or os.listdir('/srv'); time.sleep(600)"
    )
    command = ["python3", "-c", read]
    job = scene.start(scene.job("stuck", command=command))
    stuck.stick()
    scene.await_line(job, "ready", count=4)
    await_that(lambda: stuck.status()["stuck"] > 0, "rank 3 waits for the file system")
    assert scene.ascendrun("stop", "--now", job).returncode == 6
    scene.await_state(job, "STOPPED")
    left = next(event for event in scene.show(job)["events"] if event["code"] == "processes-remain")
    assert left["hosts"] == ["node2"] and left["values"]["processes"][0]["state"] == "D"
    stuck.heal()
    gone = lambda: "leftovers-gone" in [event["code"] for event in scene.show(job)["events"]]  # noqa: E731
    await_that(gone, "the supervisor records that they are gone")
    check_ended(scene, job, state="STOPPED")
