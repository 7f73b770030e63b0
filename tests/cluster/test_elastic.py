"""A job that shrinks when a host is gone, and grows when it is back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ascendrun
from invariants import check_ended
from scenes import Scene, await_that

from tests.lib.vcluster.cluster import VirtualCluster

SAVED = "/ckpt"


@pytest.fixture
def scene(ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster], tmp_path: Path) -> Scene:
    folder = tmp_path / "saved"
    folder.mkdir()
    cluster = cluster_of(3, shares={str(folder): SAVED})
    made = Scene(ascendrun.on(cluster), cluster)
    for name in ("hanging.py", "training.py"):
        shutil.copy(Path(__file__).with_name(name), made.folder / "code")
    return made


def test_a_job_shrinks_when_a_host_is_gone_and_grows_when_it_is_back(scene: Scene) -> None:
    path = scene.job(
        "elastic",
        per_node=1,
        slots=1,
        command=["python3", "training.py", SAVED],
        more=(
            "nodes: 3\nmin_nodes: 2\nrestart: {max_restarts: 3, backoff_s: [0, 0]}\n"
            f"checkpoint: {{dir: {SAVED}, grace_period_s: 0, fenced: true}}\nsampling: {{interval_s: 0.5}}\n"
        ),
    )
    job = scene.start(path, env={"ASCENDRUN_HANG_DIVISOR": "20"})
    scene.await_line(job, "saved 20")
    scene.cluster.crash("node2")

    def hosts_of(attempt: int) -> list[str] | None:
        shown = scene.show(job)["job"]
        is_here = (shown["attempt"], shown["state"]) == (attempt, "RUNNING")
        return list(shown["hosts"]) if is_here else None

    await_that(lambda: hosts_of(2), lambda: str(scene.show(job)["events"]))
    assert hosts_of(2) == ["node1", "node3"]
    scene.await_line(job, "from", count=5)
    scene.cluster.reboot("node2", keep_disk=True)
    await_that(lambda: hosts_of(3), lambda: str(scene.show(job)["events"]))
    assert sorted(hosts_of(3) or ()) == ["node1", "node2", "node3"]
    events = {event["code"]: event for event in scene.show(job)["events"]}
    assert events["nodes-missing"]["values"] == {"found": 2, "count": 3}
    assert events["grows-later"]["hosts"] == ["node2"] and events["grows-later"]["values"] == {"found": 2, "count": 3}
    scene.await_line(job, "from", count=8)
    printed = b"".join(scene.on_head(job, "rank-0.out.*").values()).decode(errors="replace")
    begun = sorted(int(step) for step in re.findall(r"from (\d+)", printed))
    saved = {int(step) for step in re.findall(r"saved (\d+)", printed)}
    assert len(begun) == 3 and begun[0] == 0 and set(begun[1:]) <= saved, "each attempt resumes from a checkpoint"
    codes = [event["code"] for event in scene.show(job)["events"]]
    assert codes.count("restarting") == 1, "growth uses no restart"
    scene.ascendrun("stop", job, "--now", code=0)
    check_ended(scene, job, state="STOPPED", but=["node2"])
