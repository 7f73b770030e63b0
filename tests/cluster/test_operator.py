"""An operator's cluster of 64 hosts: one dead, two drained, one in quarantine; jobs of five users queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Callable

import pytest
from scenes import BEAT_ON, Scene, await_that

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
