"""Light checks in the background: idle hosts and spares, what they do to machines, and what ends a quarantine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.job import Job, NodeProgress, Phase, Request, State
from ascendrun.core.machines import STRIKE_S, TAKEN_S, MachineState
from ascendrun.core.node_messages import Failure
from ascendrun.head.agents.node_query import CONNECT_TRIES
from ascendrun.head.loop.early_look import look_early
from ascendrun.head.loop.examiner import LOOK_S, SPARES_S, UNREACHED_S, Examiner
from ascendrun.head.loop.operations import Operations
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import SurveyReply
from ascendrun.text import Text
from tests.lib.small_world import N1, N2, World, change

N3 = Host("n3")
NO_SPACE = {"at": "/r", "free_bytes": 5, "total_bytes": 1 << 40, "free_inodes": 9, "total_inodes": 9}
FULL = {"disk": {"disks": {"/r": NO_SPACE}}}


class Health(World):
    """A world with examinations. `later` lets their time pass: nothing here waits."""

    def examine(self, *, idle_every_s: float | None = None) -> Examiner:
        operations = Operations(self.context.links)
        self.examiner = Examiner(self.context, self.jobs, operations, idle_every_s=idle_every_s)
        self.tick()
        return self.examiner

    def tick(self) -> None:
        self.examiner._due_mono = 0.0
        self.examiner.tick()
        self.turn()

    def later(self, seconds: float) -> None:
        """Let the time between two examinations pass, and a strike be another one."""
        self.examiner._tried = {key: at - seconds for key, at in self.examiner._tried.items()}
        for record in tuple(self.jobs.machines.records.all()):
            strikes = tuple(at_s - STRIKE_S for at_s in record.strikes)
            self.jobs.machines.records.keep(replace(record, strikes=strikes))
        self.tick()

    def surveys(self, host: Host) -> int:
        return sum(isinstance(one, agent.Survey) for one in self.get(host).node.asked)

    def known(self, *hosts: Host) -> None:
        """Machines that jobs have used, and that answer surveys."""
        for host in hosts:
            node = self.get(host).node
            node.survey = {}
            if not node.live:
                node.boot_id = f"b-{host.name}"
        self.up(*hosts)
        change(self, "undrain", *hosts)

    def codes(self, job_id: str = "") -> list[str]:
        return [event.code for event in self.store.events.of(job_id)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Health]:
    made = Health(tmp_path)
    yield made
    made.store.close()


def with_spare(world: Health, *, state: State = State.RUNNING) -> Job:
    node = NodeProgress("n1", 0, Phase.STARTED, (0,), "b", machine_key="key-n1", incarnation="i")
    job = world.job(
        N1, N2, hosts=("n1",), spares=("n2",), nodes=(node,), state=state, world_size=1, go_sent_at_s=time.time()
    )
    live = world.get(N1).node.live
    assert live is not None
    live.add(job.run_id)
    return job


def test_an_idle_host_is_quarantined_by_the_second_failed_examination(world: Health) -> None:
    world.known(N1, N2)
    world.nodes["n1"].survey = FULL
    world.examine(idle_every_s=60.0)
    [record] = world.jobs.machines.records.at(N1)
    assert (record.finding and record.finding.key, len(record.strikes)) == ("finding.disk-full.message", 1)
    world.tick()
    assert world.surveys(N1) == 1, "its time has not come"
    world.later(61.0)
    [record] = world.store.machines.all() and [one for one in world.store.machines.all() if one.hosts == (N1,)]
    assert record.quarantine and record.quarantine.state is MachineState.QUARANTINED
    assert world.codes() == ["host-strike", "host-strike", "host-closed"]
    [other] = world.jobs.machines.records.at(N2)
    assert other.examined_at_s and other.finding is None and not other.strikes
    surveys = world.surveys(N1)
    world.later(61.0)
    assert (world.surveys(N1), world.surveys(N2)) == (surveys, 3), "a closed host is left alone"


def test_a_fault_of_most_hosts_is_no_strike(world: Health) -> None:
    world.known(N1, N2)
    for host in (N1, N2):
        world.get(host).node.survey = FULL
    world.examine(idle_every_s=60.0)
    records = [one for host in (N1, N2) for one in world.jobs.machines.records.at(host)]
    assert all(one.finding is not None and not one.strikes for one in records)


def test_a_host_with_a_job_is_never_examined_and_nothing_is_without_the_setting(world: Health) -> None:
    job = world.running(N1)
    world.known(N1, N2)
    world.examine()
    assert world.surveys(N2) == 0
    world.examine(idle_every_s=60.0)
    assert (world.surveys(N1), world.surveys(N2)) == (0, 1) and world.now(job).state is State.RUNNING


def test_the_result_of_a_host_that_a_job_took_meanwhile_counts_nothing(world: Health) -> None:
    world.known(N1)
    world.nodes["n1"].survey = None
    world.examine(idle_every_s=60.0)
    world.running(N1)
    world.examiner._take([N1], None, None, [SurveyReply("n1", Failure("unreachable", "x"))])
    [record] = world.jobs.machines.records.at(N1)
    assert record.examined_at_s is None


def test_a_spare_is_examined_staged_and_reported_once_each_time_that_it_changes(world: Health) -> None:
    job = with_spare(world)
    world.known(N1, N2)
    world.examine()
    assert world.codes(job.id)[-1:] == ["spare-ready"] and world.surveys(N1) == 0
    world.later(SPARES_S + 1)
    assert world.codes(job.id).count("spare-ready") == 1 and world.surveys(N2) >= 2
    world.nodes["n2"].survey = FULL
    world.later(SPARES_S + 1)
    event = world.store.events.of(job.id)[-1]
    assert (event.code, event.hosts, event.values["finding"].key) == (
        "spare-not-ready",
        ("n2",),
        "finding.disk-full.message",
    )
    world.later(SPARES_S + 1)
    [record] = world.jobs.machines.records.at(N2)
    assert record.quarantine is not None and world.codes(job.id).count("spare-not-ready") == 1
    world.nodes["n2"].survey = {}
    world.later(SPARES_S + 1)
    assert world.codes(job.id)[-1] == "spare-ready" and record.quarantine.until_s
    assert LOOK_S < SPARES_S


def test_a_spare_that_did_not_respond_is_examined_again_soon(world: Health) -> None:
    job = with_spare(world)
    world.known(N1, N2)
    link: Any = world.get(N2)
    link.is_up, link.failures = False, CONNECT_TRIES
    world.nodes["n2"].survey = None
    examiner = world.examine()
    examiner._operations.on_down(link, AscendrunError("no route to host"))
    assert world.codes(job.id)[-1] == "spare-not-ready"
    link.is_up, world.nodes["n2"].survey = True, {}
    world.later(UNREACHED_S + 1)
    assert world.codes(job.id)[-1] == "spare-ready" and UNREACHED_S < SPARES_S


def test_a_deep_examination_ends_a_quarantine_and_no_drain(world: Health) -> None:
    world.known(N1, N2)
    for host in (N1, N2):
        world.jobs.machines.quarantine(host, Text("x", "x"))
    change(world, "drain", N2, reason="optics")
    change(world, "deep", N1, N2)
    records = [one for host in (N1, N2) for one in world.jobs.machines.records.at(host)]
    assert [(one.quarantine, one.drain is not None, one.quarantines) for one in records] == [
        (None, False, 0),
        (None, True, 0),
    ]
    change(world, "undrain", N2)
    opened = [event.values["how"] for event in world.store.events.of("") if event.code == "host-opened"]
    assert opened == ["deep", "deep", "undrain"]


def test_only_a_job_that_measures_its_hosts_is_placed_on_closed_ones(world: Health) -> None:
    world.known(N1, N2)
    world.jobs.machines.quarantine(N1, Text("x", "x"))
    change(world, "drain", N2)
    for node in world.nodes.values():
        node.survey = None
    usual, measure = world.job(N1, N2, request=Request(1)), world.job(N1, N2, request=Request(2, examines=True))
    world.turn()
    assert (world.now(usual).state, world.now(measure).state) == (State.QUEUED, State.CHECKING)


def test_a_strike_without_any_job_is_stored(world: Health) -> None:
    world.up(N3)
    world.jobs.machines.strike(N3, Text("x", "x"))
    assert world.jobs, "there is something to store"
    world.turn()
    assert not world.jobs and [len(one.strikes) for one in world.store.machines.all()] == [1]
    assert world.codes() == ["host-strike"]


def test_memory_that_stays_in_use_is_noted_and_closes_its_machine_after_a_minute(world: Health) -> None:
    world.known(N1)
    machines, taken = world.jobs.machines, Text("x", "x")
    machines.note_memory(N1, {0: 3400, 1: 3300}, None)
    machines.note_memory(N1, {0: 3350}, None)
    assert machines.idle_memory(N1) == {0: 3350, 1: 3300}
    machines.note_memory(N1, {0: 9000}, taken)
    [record] = machines.records.at(N1)
    assert machines.idle_memory(N1)[0] == 3350 and record.taken_since_s and record.quarantine is None
    machines.records.keep(replace(record, taken_since_s=record.taken_since_s - TAKEN_S - 1))
    machines.note_memory(N1, {0: 9000}, taken)
    world.turn()
    [record] = world.store.machines.all()
    assert record.quarantine and record.quarantine.reason == taken
    machines.note_memory(N1, {0: 3350}, None)
    [record] = machines.records.at(N1)
    assert record.taken_since_s is None and record.quarantine is not None
    change(world, "undrain", N1)
    assert machines.idle_memory(N1) == {} and world.codes()[-2:] == ["host-closed", "host-opened"]


NOT_WRITABLE = {"at": "/ckpt", "error": {"key": "write-in", "values": {"path": "/ckpt"}}, "code": "bad-directory"}
LASTING = {
    "directory": {"write": {"folders": {"/ckpt": {**NOT_WRITABLE, "uid": 0, "late": False}}}},
    "interpreter": {"python": {"out": "", "err": "not found", "code": 127, "setup": "no-command"}},
    "script": {"paths": {"sizes": {"/code/train.py": {"missing": True}}}},
}


def queued(world: Health, *, nodes: int = 2) -> Job:
    """A job that waits for two busy hosts, a while after its submission."""
    world.running(N1, N2)
    spec = JobSpec(name="demo", command=("python", "/code/train.py"), python="/opt/py/bin/python")
    job = world.job(N1, N2, spec=spec, request=Request(nodes), pool=("n1", "n2"))
    world.turn()
    [runner] = [one for one in world.jobs if one.job.id == job.id]
    look_early(runner, Operations(world.context.links), world.jobs.steps)
    world.turn()
    return world.now(job)


@pytest.mark.parametrize("fault", LASTING)
def test_what_cannot_heal_refuses_a_job_that_waits_for_busy_hosts(world: Health, fault: str) -> None:
    world.known(N1, N2)
    world.nodes["n2"].survey = LASTING[fault]
    job = queued(world)
    assert (job.state, job.reason.code) == (State.FAILED, "preflight-failed") and "n2" in str(job.reason)
    asked = {
        item["name"]: item for one in world.nodes["n1"].asked if isinstance(one, agent.Survey) for item in one.items
    }
    assert asked.keys() == {"write", "python", "paths"}, "the devices and ports are in use"
    assert asked["paths"]["paths"] == ["/code/train.py"]


def test_what_can_heal_and_what_other_hosts_have_lets_a_queued_job_wait(world: Health) -> None:
    world.known(N1, N2)
    world.nodes["n1"].survey, world.nodes["n2"].survey = FULL, LASTING["interpreter"]
    assert queued(world, nodes=1).state is State.QUEUED, "another host is enough"
    world.nodes["n2"].survey = FULL
    assert queued(world).state is State.QUEUED, "a full disk may have space at its turn"
    world.nodes["n2"].survey = {}
    world.get(N1).is_up = False
    assert queued(world).state is State.QUEUED, "a host that is away may answer at its turn"
