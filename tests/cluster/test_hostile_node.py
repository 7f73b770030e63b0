"""A host that turns hostile after GO: its sshd changes what the agent sends. What it claims concerns itself only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Callable

import pytest
from conftest import Ascendrun
from hostile import MODES
from scenes import Scene, await_that

from tests.lib.vcluster.cluster import VirtualCluster

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]
ACCUSE = ("rank-exited", "node-lost", "host-closed", "host-strike")


class Hostile(Scene):
    """`shared`: a job on node1 and the hostile node2; `other`: one on node1 alone, another user's facts."""

    shared = other = ""

    def begin_shared(self) -> None:
        if not self.shared or self.state(self.shared) != "RUNNING":
            if self.shared:
                self.ascendrun("stop", self.shared, "--now")
            path = self.job("shared", "print", "ready", "beat", 6000, per_node=1, slots=4)
            self.shared = self.begin_one(path, 2)

    def begin_one(self, path: Path, ranks: int) -> str:
        job = self.start(path)
        self.await_line(job, "ready", count=ranks)
        return job

    def turn(self, mode: str | None) -> None:
        folder = self.cluster.path("node2", "/root")
        if mode is None:
            (folder / "mode").unlink()
            return
        (folder / "changed").unlink(missing_ok=True)
        wish = {"mode": mode, "other": f"{self.run(self.other)}.1"}
        (folder / "new").write_text(json.dumps(wish))
        (folder / "new").rename(folder / "mode")

    def changes(self) -> int:
        path = self.cluster.path("node2", "/root") / "changed"
        return path.stat().st_size if path.exists() else 0

    def outputs(self, job: str) -> dict[str, bytes]:
        """What the head has of the job's ranks on node1."""
        return {name: data for name, data in self.on_head(job, "rank-*.out.*").items() if name.startswith("node1/")}

    def check_node1(self, job: str) -> None:
        """The head's copy of node1 is a start of what node1 has, and nobody else's file lies next to it."""
        copied = self.outputs(job)
        there = {name: data for name, data in self.on_node(job, "rank-*.out.*").items() if name.startswith("node1/")}
        assert set(copied) <= set(there) and all(there[name].startswith(data) for name, data in copied.items())


@pytest.fixture
def scene(ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster]) -> Hostile:
    cluster = cluster_of(2, disk="512M")
    shutil.copy(Path(__file__).with_name("hostile.py"), cluster.path("node2", "/root"))
    cluster.sshd_options("node2", ["ForceCommand exec python3 /root/hostile.py"])
    return Hostile(ascendrun.on(cluster), cluster)


def facts(scene: Hostile, job: str) -> list[Any]:
    """What is known of the ranks of node1."""
    rows = [rank for rank in scene.show(job)["ranks"] if rank["host"] == "node1"]
    return [(row["rank"], row["pid"], row["exit_code"], row["signal"]) for row in rows]


def copied_bytes(scene: Hostile) -> int:
    return sum(map(len, scene.outputs(scene.other).values()))


def play(scene: Hostile, mode: str) -> None:
    scene.begin_shared()
    before, ours, theirs = copied_bytes(scene), facts(scene, scene.shared), facts(scene, scene.other)
    scene.turn(mode)
    if mode == "wrong-hash":
        scene.cluster.path("node2", "/root/data").write_text("data")
        done = scene.ascendrun("cp", "node2:/root/data", "copied", "--hostfile", "shared.hosts")
        assert done.returncode and not [path for path in (scene.folder / "copied").rglob("*") if path.is_file()]
    await_that(lambda: scene.changes() > 0, f"{mode} changes something")
    await_that(lambda: copied_bytes(scene) > before + 400, f"{mode}: output of the other job")
    scene.ascendrun("exec", "--hostfile", "other.hosts", "--", "true", code=0)
    assert scene.state(scene.other) == "RUNNING" and facts(scene, scene.other) == theirs
    shown = scene.show(scene.shared)
    if shown["job"]["state"] == "RUNNING":
        assert facts(scene, scene.shared) == ours
    assert all(event["hosts"] != ["node1"] for event in shown["events"] if event["code"] in ACCUSE), shown["events"]
    for job in (scene.other, scene.shared):
        scene.check_node1(job)
    for verb in ("logs", "show", "explain"):
        assert "\x1b]" not in scene.ascendrun(verb, scene.shared).stdout
    scene.turn(None)
    assert not list(Path("/tmp").glob("pwned*"))


def test_a_hostile_host_harms_nobody_else(scene: Hostile) -> None:
    alone = scene.job("other", "print", "ready", "beat", 6000, hosts=["node1"], per_node=1, slots=4)
    scene.other = scene.begin_one(alone, 1)
    for mode in MODES:
        try:
            play(scene, mode)
        except AssertionError as error:
            raise AssertionError(f"{mode}: {error}") from error
    spool = scene.ascendrun.state_dir / "jobs" / scene.other
    assert not [path for path in spool.glob("attempt-*/*") if path.is_dir() and path.name != "node1"]
    for job in (scene.shared, scene.other):
        scene.ascendrun("stop", job, "--now")
        scene.await_nobody(job)
