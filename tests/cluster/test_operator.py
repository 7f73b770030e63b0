"""An operator's cluster of 64 hosts: one dead, two drained, one in quarantine; jobs of five users queue. Two heads use
its NPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest
from scenes import BEAT_ON, Scene, await_that
from test_leases import USE, install, npu_job, second_head, used_twice

from ascendrun.core.jobs.job import Job
from ascendrun.core.jobs.reasons import Reason
from ascendrun.head.state.store import Store
from ascendrun.text import Text

DEAD, DRAINED, SICK = "node61", ("node62", "node63"), "node64"
WAIT_S = 600.0
SKIP = "checks: {skip: [peer-ports, clock, system]}\nsampling: {interval_s: 30}\n"
"""Checks that have a time limit: two processors are 64 hosts here."""


class Cluster(Scene):
    def user(self, name: str, nodes: int, priority: int, *words: object) -> str:
        path = self.job(name, *words, per_node=1, slots=1, more=f"nodes: {nodes}\n{SKIP}")
        (self.folder / f"{name}.hosts").write_text(self.cluster.hostfile(slots=1, user="root"))
        return self.start(path, "--priority", priority, env={"LOGNAME": name})

    def stored(self, job: str) -> Job:
        with Store.open_for_reading(self.ascendrun.state_dir) as store:
            return store.jobs.find(job).job


def reasons_of(why: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """The hosts of a wait and what is true of each."""
    if isinstance(why, Reason) and why.code in ("host-why", "host-and-others"):
        inner = why.values.get("why") or why.why
        yield why.hosts, inner.key if isinstance(inner, Text) else inner.code
        if "others" in why.values:
            yield from reasons_of(why.values["others"])


@pytest.mark.thorough
@pytest.mark.timeout(2400)
def test_nothing_starves_and_every_wait_has_a_true_reason(scene_of: Callable[..., Scene]) -> None:
    made = scene_of(64)
    scene = Cluster(made.ascendrun, made.cluster)
    scene.await_state(scene.user("known", 64, 0, "print", "done"), "SUCCEEDED", deadline_s=WAIT_S)
    scene.ascendrun("drain", ",".join((*DRAINED, SICK)), "--reason", "optics", code=0)
    scene.ascendrun.end_controller(scene.cluster)
    with Store.open(scene.ascendrun.state_dir) as store:
        [sick] = [one for one in store.machines.all() if SICK in {host.name for host in one.hosts}]
        store.machines.save([replace(sick, drain=None).quarantined(Text("x", "two faults"), time.time())])
    scene.cluster.crash(DEAD)
    blocking = scene.user("ann", 60, 0, *BEAT_ON)
    scene.await_state(blocking, "RUNNING", "FAILED", deadline_s=WAIT_S)
    assert scene.state(blocking) == "RUNNING", scene.reason(blocking)
    jobs = {"cy": scene.user("cy", 62, 0, "print", "done")}
    await_that(lambda: DEAD in scene.stored(jobs["cy"]).reason.hosts, "the silence of the dead host is known")
    assert scene.stored(jobs["cy"]).reason.code == "too-few-hosts"
    assert dict(reasons_of(scene.stored(jobs["cy"]).reason.why)) == {
        (DEAD,): "host-away",
        DRAINED: "machine.drained",
        (SICK,): "machine.quarantined",
    }
    for name, nodes, priority in (("bo", 40, 5), ("di", 2, 3), ("ed", 60, 9), ("flo", 1, 0)):
        jobs[name] = scene.user(name, nodes, priority, "print", "done")
    for name in ("bo", "di", "ed", "flo"):
        await_that(lambda name=name: scene.stored(jobs[name]).reason.code == "nodes-in-use", f"{name} waits")
        reason = scene.stored(jobs[name]).reason
        assert reason.values["job"] == blocking, (name, str(reason))
        assert not {DEAD, *DRAINED, SICK} & set(reason.hosts)
    scene.enough()
    for name in ("bo", "di", "ed", "flo"):
        scene.await_state(jobs[name], "SUCCEEDED", deadline_s=WAIT_S)
        assert not {DEAD, *DRAINED, SICK} & set(scene.stored(jobs[name]).hosts)
    assert min(("bo", "di", "ed", "flo"), key=lambda name: scene.stored(jobs[name]).go_sent_at_s or 0) == "ed"
    assert scene.state(jobs["cy"]) == "QUEUED"
    scene.ascendrun("undrain", ",".join(DRAINED), "--no-check", code=0)
    scene.await_state(jobs["cy"], "SUCCEEDED", deadline_s=WAIT_S)


RACES, AT_ONCE, CARDS = 30, 5, 2
LIGHT = "[hccn-tool, peer-ports, clock, system]}\nsampling: {interval_s: 30}"


@pytest.mark.thorough
@pytest.mark.timeout(2400)
def test_two_heads_and_thirty_races_hold_no_npu_twice(
    scene_of: Callable[..., Scene], no_leftovers: Any, tmp_path: Path
) -> None:
    one = scene_of(64)
    two = second_head(one, tmp_path, no_leftovers)
    hosts = one.cluster.hosts[: 2 * RACES]
    install(one, hosts, CARDS)
    (two.folder / "code" / "use.py").write_text(USE)

    def submit(number: int, scene: Scene) -> str:
        pair = hosts[2 * number : 2 * number + 2]
        path = npu_job(scene, f"race-{number}", list(range(CARDS)), 0, "go", hosts=pair)
        path.write_text(path.read_text().replace("[hccn-tool]}", LIGHT))
        return scene.start(path)

    def stored(scene: Scene, job: str) -> tuple[Job, list[str]]:
        with Store.open_for_reading(scene.ascendrun.state_dir) as store:
            held = [str(event.values["by"]) for event in store.events.of(job) if event.code == "held"]
            return store.jobs.find(job).job, held

    def is_decided(jobs: tuple[str, str]) -> bool:
        """Whether one of the two runs, and the other waits for it and has its name."""
        (first, of_first), (second, of_second) = (stored(scene, job) for scene, job in zip((one, two), jobs))
        runs = first.state.value == "RUNNING"
        assert not (runs and second.state.value == "RUNNING"), f"{jobs}: both run"
        winner, held = (first, of_second) if runs else (second, of_first)
        return winner.state.value == "RUNNING" and winner.run_id in held

    def race(begin: int) -> None:
        numbers = range(begin, begin + AT_ONCE)
        with ThreadPoolExecutor(2) as pool:
            of_heads = pool.map(lambda scene: [submit(number, scene) for number in numbers], (one, two))
        races = list(zip(*of_heads))
        for jobs in races:
            await_that(lambda jobs=jobs: is_decided(jobs), f"{jobs}: one runs, one waits for it", deadline_s=WAIT_S)
        for host in hosts[2 * begin : 2 * (begin + AT_ONCE)]:
            one.cluster.path(host, "/tmp/use/go").touch()
        for jobs in races:
            for scene, job in zip((one, two), jobs):
                scene.await_state(job, "SUCCEEDED", deadline_s=WAIT_S)

    for begin in range(0, RACES, AT_ONCE):
        race(begin)
    assert not used_twice(one, hosts)
