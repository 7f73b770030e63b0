"""Nodes as they report themselves against the records: over a small world of nodes, with the real store and jobs."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

from ascendrun.core.errors import AscendrunError, ConflictError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.job import Exit, Job, State
from ascendrun.core.machines import MachineRecord, MachineState
from ascendrun.head.agents.connections import dialled
from ascendrun.head.loop.machine.reconcile import LOOK_S
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.state.job_files import read_copy
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.query.host_views import make_machine_views
from tests.lib.small_world import N1, N2, OTHER_NAME, PROCESS, STUCK, Node, World, change


def vanish(world: World, job: Job, host: Host, *, alive: bool = False) -> Node:
    """The home of a node is made again, with the same boot id."""
    node = world.get(host).node
    node.live, node.incarnation = set(), "k"
    node.phases.pop(job.run_id)
    if not alive:
        node.processes.clear()
    return node


def test_nodes_are_compared_although_nothing_can_be_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.running(N1)

    def refuse(*_: Any) -> None:
        raise StoreUnusableError("no space left on device")

    monkeypatch.setattr(world.store.machines, "save", refuse)
    world.up(N1)
    vanish(world, job, N1)
    world.look()
    assert world.now(job).node("n1").lost == "directory-gone"


@pytest.mark.parametrize("how", ["look", "up"])
def test_a_recreated_container_ends_the_job_and_its_host_is_free_for_the_next(world: World, how: str) -> None:
    job = world.running(N1, N2)
    world.up(N1, N2)
    assert world.now(job).state is State.RUNNING
    vanish(world, job, N2)
    if how == "look":
        world.look()
    else:
        world.up(N2)
    assert (world.now(job).state, world.now(job).node("n2").lost) == (State.STOPPING, "directory-gone")
    assert world.nodes["n1"].stopped() == [job.run_id]
    world.jobs.steps.feed(job.id, endings.NodeEnded("n1"))
    world.turn()
    assert (world.now(job).state, world.now(job).reason.code) == (State.FAILED, "node-directory-gone")
    later = world.job(N2)
    world.turn()
    assert world.now(later).state is State.CHECKING


def is_complete(world: World, job: Job, attempt: int) -> bool:
    return (world.folder / "jobs" / job.id / f"attempt-{attempt}" / "complete").exists()


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "running"])
def test_the_files_of_a_rebooted_host_are_complete_when_its_end_is_recorded_there(
    world: World, is_stopped: bool
) -> None:
    job = world.running(N1)
    world.up(N1)
    node = world.nodes["n1"]
    node.slow = []
    if is_stopped:
        world.jobs.steps.feed(job.id, inputs.StopRequested(now=True))
        world.turn()
    node.boot_id = "c"
    node.phases[job.run_id] = "lost"
    world.up(N1)
    world.turn()
    assert world.now(job).is_terminal and node.slow and not is_complete(world, job, 1)
    node.slow[-1]()
    world.turn()
    assert is_complete(world, job, 1)


def test_the_files_of_an_earlier_attempt_are_complete_when_its_ranks_have_ended(world: World) -> None:
    job = world.running(N1, N2)
    world.up(N1, N2)
    [runner] = world.jobs
    runner.job = replace(runner.job, attempt=2, hosts=("n1",), nodes=runner.job.nodes[:1])  # n2 was unreachable
    runner.begin_attempt()
    for node in world.nodes.values():
        node.slow = []
    world.up(N1, N2)
    world.turn()
    assert all(node.slow for node in world.nodes.values()) and not is_complete(world, job, 1)
    for node in world.nodes.values():
        node.slow[-1]()
    world.turn()
    assert is_complete(world, job, 1)


def test_ranks_without_their_directory_end_only_at_the_second_look(world: World) -> None:
    job = world.running(N1)
    world.up(N1)
    node = vanish(world, job, N1, alive=True)
    world.look()
    assert node.stopped() == [], "a home that is not mounted for a moment"
    seen = world.jobs.machines.reconciler._strays
    world.jobs.machines.reconciler._strays = {key: at - LOOK_S for key, at in seen.items()}
    world.look()
    assert node.stopped() == [job.run_id]
    assert (world.now(job).state, world.now(job).node("n1").lost) == (State.FAILED, "directory-gone")


def test_what_a_node_cannot_read_proves_nothing(world: World) -> None:
    job = world.running(N1)
    world.up(N1)
    world.nodes["n1"].live, world.nodes["n1"].incarnation = None, None  # type: ignore[assignment]
    world.look()
    world.up(N1)
    assert world.now(job).state is State.RUNNING and world.nodes["n1"].stopped() == []


def test_a_stuck_process_holds_its_machine_under_every_name_until_it_is_gone(world: World) -> None:
    job = world.running(N1, N2)
    world.up(N1, N2)
    world.nodes["n1"].processes.clear()
    world.jobs.steps.feed(job.id, inputs.StopRequested(now=True))
    world.jobs.steps.feed(job.id, endings.NodeEnded("n1"))
    world.jobs.steps.feed(job.id, endings.NodeEnded("n2", (STUCK,)))
    world.nodes["n2"].live = set()
    world.nodes["n2"].processes[job.run_id] = (PROCESS,)
    world.turn()
    assert world.now(job).state is State.STOPPED
    world.nodes["10.0.0.2"] = world.nodes["n2"]
    elsewhere, there, by_name = world.job(N1), world.job(N2), world.job(OTHER_NAME, Host("n3"))
    world.turn()
    assert world.now(elsewhere).state is State.CHECKING
    why = world.now(there).reason
    assert (why.code, why.hosts) == ("too-few-hosts", ("n2",))
    assert (why.why.values["pid"], why.why.values["channel"]) == (50, "fuse_wait_answer")
    assert world.now(by_name).reason.why.code == "host-unidentified"
    world.up(OTHER_NAME, Host("n3"))
    assert world.now(by_name).reason.hosts == ("npu-2",)
    [held] = world.store.machines.held()
    assert (held.state, held.holds[0].processes, set(held.names)) == (MachineState.LEFTOVERS, (STUCK,), {"n2", "npu-2"})
    world.look()
    assert world.now(there).state is State.QUEUED
    world.nodes["n2"].processes.clear()
    world.look()
    world.turn()
    assert world.now(there).state is State.CHECKING and world.store.machines.held() == ()
    assert "leftovers-gone" in [event.code for event in world.store.events.of(job.id)]


def test_a_held_machine_stays_held_when_the_controller_is_started_again(world: World) -> None:
    job = world.running(N1)
    world.up(N1)
    world.jobs.steps.feed(job.id, inputs.StopRequested(now=True))
    world.jobs.steps.feed(job.id, endings.NodeEnded("n1", (STUCK,)))
    world.nodes["n1"].live = set()
    world.turn()
    world.restart()
    later = world.job(N1)
    world.turn()
    assert world.now(later).reason.code == "too-few-hosts"
    world.nodes["n1"].boot_id = "c"
    world.up(N1)
    world.turn()
    assert world.now(later).state is State.CHECKING, "another boot id is a proof"


def release(world: World, host: str) -> AscendrunError | None:
    found: list[AscendrunError | None] = []
    world.jobs.machines.release(host, "wang", found.append)
    world.turn()
    world.turn()
    assert len(found) == 1
    return found[0]


def unconfirmed(world: World) -> Job:
    """A job that was stopped while its second host did not respond."""
    job = world.running(N1, N2, state=State.STOPPED, ended_at_s=1.0, unconfirmed=("n2",))
    world.get(N2).failures = 3
    world.up(N1)
    return job


def test_an_unreachable_host_is_free_by_the_word_of_a_person_and_the_story_says_whose(world: World) -> None:
    job = unconfirmed(world)
    later = world.job(N2, created_at_s=time.time())
    world.turn()
    assert world.now(later).reason.why.key == "machine.unconfirmed"
    assert release(world, "n2") is None
    assert (world.now(job).state, world.now(job).held_hosts, world.now(job).first_failure) == (State.STOPPED, (), None)
    [event] = [event for event in world.store.events.of(job.id) if event.code == "host-released"]
    assert (event.hosts, event.values["by"], event.attempt) == (("n2",), "wang", 1)
    assert world.now(later).state is State.CHECKING


def test_a_release_is_stored_before_it_is_acknowledged(world: World) -> None:
    job = unconfirmed(world)
    stored: list[tuple[str, ...]] = []
    world.jobs.machines.release("n2", "wang", lambda error: stored.append(world.store.jobs.find(job.id).job.held_hosts))
    world.turn()
    assert stored == [()]


def test_a_release_of_a_found_attempt_is_stored_before_it_is_acknowledged(world: World) -> None:
    world.get(N1).node.live = {f"{world.store.head_id}-j-0007.2"}
    world.up(N1)
    world.turn()
    world.get(N1).is_up = False
    world.get(N1).failures = 3
    stored: list[int] = []
    machines = world.store.machines
    world.jobs.machines.release("n1", "wang", lambda error: stored.extend(len(one.found) for one in machines.all()))
    world.turn()
    assert stored == [0]


def test_a_host_that_shows_processes_is_not_released(world: World) -> None:
    job = unconfirmed(world)
    world.links[dialled(N2)].is_up = True
    error = release(world, "n2")
    assert error is not None and (error.exit_code, error.message.key) == (7, "release.processes")  # type: ignore[union-attr]
    assert world.now(job).held_hosts == ("n2",)


def test_a_release_waits_for_the_connection_that_is_being_made(world: World) -> None:
    job = unconfirmed(world)
    world.get(N2).failures = 0
    found: list[AscendrunError | None] = []
    world.jobs.machines.release("n2", "wang", found.append)
    world.turn()
    assert found == []
    world.get(N2).is_up = True
    world.turn()
    assert [type(one) for one in found] == [ConflictError] and world.now(job).held_hosts == ("n2",)


def test_a_host_that_is_free_cannot_be_released(world: World) -> None:
    unconfirmed(world)
    error = release(world, "n1")
    assert error is not None and error.exit_code == 4


def test_processes_of_a_job_whose_host_was_released_are_stopped_when_it_responds_again(world: World) -> None:
    job = unconfirmed(world)
    release(world, "n2")
    assert world.nodes["n2"].stopped() == []
    world.up(N2)
    assert world.nodes["n2"].stopped() == [job.run_id]


def test_an_attempt_that_no_record_explains_holds_its_machine_until_it_is_stopped(world: World) -> None:
    tag, strange = f"{world.store.head_id}-j-0007.2", "ffffffff-j-0007.1"
    node = world.get(N1).node
    node.live, node.processes = {tag, strange, "junk"}, {tag: (PROCESS,), strange: (PROCESS,)}
    job = world.job(N1, N2)
    world.up(N1, N2)
    world.turn()
    [held] = world.store.machines.held()
    assert [(hold.tag, hold.job, hold.is_found) for hold in held.holds] == [(tag, "j-0007", True)]
    assert world.now(world.job(N1)).state is State.QUEUED
    world.restart()
    assert world.store.machines.held()[0].holds[0].tag == tag
    world.up(N1)
    assert node.stopped() == [], "what no record explains is not touched"
    assert not world.jobs.machines.reconciler.stop_found("j-0008", "wang@login1", now=True)
    assert world.jobs.machines.reconciler.stop_found("j-0007", "wang@login1", now=True)
    world.turn()
    world.turn()
    assert node.stopped() == [tag] and world.store.machines.held() == ()
    assert job.id == "j-0001"


def lose_the_store(world: World) -> None:
    """The head node has a new disk, with the identity of the old one."""
    world.store.close()
    for path in world.folder.iterdir():
        if path.name == "jobs":
            shutil.rmtree(path)
        elif path.name.startswith("state.db"):
            path.unlink()
    world.start()


def test_an_attempt_whose_job_the_store_lost_is_adopted_from_the_copy_on_a_node(world: World) -> None:
    lost = world.running(N1, N2, attempt=2)
    copy = read_copy(world.folder, lost.id)
    assert copy is not None
    world.nodes["n1"].copies[lost.run_id] = copy.to_json()
    lose_the_store(world)
    world.up(N1)
    world.turn()
    job = world.now(lost)
    assert (job.id, job.run_id, job.hosts, job.state) == (lost.id, lost.run_id, ("n1", "n2"), State.STARTING)
    assert "adopted" in [event.code for event in world.store.events.of(job.id)]
    world.up(N2)
    for rank, host in enumerate(job.hosts):
        world.jobs.steps.feed(job.id, inputs.RankStarted(host, rank, 100 + rank))
    world.turn()
    assert world.now(lost).state is State.RUNNING and world.store.machines.held() == ()
    world.jobs.steps.feed(job.id, inputs.StopRequested(now=True))
    world.turn()
    assert [world.nodes[host].stopped() for host in job.hosts] == [[lost.run_id]] * 2


def test_a_reboot_after_a_job_was_adopted_is_a_fact(world: World) -> None:
    lost = world.running(N1)
    copy = read_copy(world.folder, lost.id)
    assert copy is not None
    node = world.nodes["n1"]
    node.copies[lost.run_id] = copy.to_json()
    lose_the_store(world)
    world.up(N1)
    world.turn()
    world.up(N1)
    world.turn()
    assert world.now(lost).node("n1").boot_id == node.boot_id
    node.boot_id = "another"
    world.up(N1)
    world.turn()
    failure = world.now(lost).first_failure
    assert failure is not None and (failure.reason.code, failure.reason.hosts) == ("node-rebooted", ("n1",))


@pytest.mark.parametrize("state", [State.QUEUED, State.CHECKING])
def test_a_job_that_is_known_only_as_it_was_submitted_is_adopted_and_not_started_again(
    world: World, state: State
) -> None:
    job = world.job(N1)
    copy = read_copy(world.folder, job.id)
    assert copy is not None
    if state is State.CHECKING:
        world.turn()
    node = world.get(N1).node
    node.live, node.copies[job.run_id] = {job.run_id}, copy.to_json()
    world.up(N1)
    world.turn()
    assert (world.now(job).state, world.now(job).attempt) == (State.STARTING, 1)
    assert not [one for one in node.asked if isinstance(one, agent.Prepare)] and world.store.machines.held() == ()


def test_what_was_prepared_for_a_job_that_is_over_is_removed_and_nothing_recorded(world: World) -> None:
    over = world.job(N1, state=State.FAILED, ended_at_s=1.0)
    world.store.jobs.mark_drained(over.id)
    world.restart()
    node = world.get(N1).node
    node.live = {over.run_id}
    world.up(N1)
    assert [one.tag for one in node.asked if isinstance(one, agent.Abort)] == [over.run_id] and not node.stopped()


def test_an_attempt_of_a_job_that_is_over_and_forgotten_is_stopped(world: World) -> None:
    over = world.job(N1, state=State.FAILED, go_sent_at_s=0.5, ended_at_s=1.0)
    world.store.jobs.mark_drained(over.id)
    world.restart()
    node = world.get(N1).node
    node.live = {over.run_id}
    world.up(N1)
    assert node.stopped() == [over.run_id] and world.store.machines.held() == ()
    assert asdict(world.now(over)) == asdict(over)


def test_a_machine_that_was_drained_before_it_was_reached_has_one_record(world: World) -> None:
    change(world, "drain", N1, N2)
    world.running(N1)
    world.up(N1)
    assert [record.drain is not None for record in world.jobs.machines.records.all()] == [True, True]
    for _ in ("as it was kept", "as it was stored"):
        records = world.store.machines.all()
        assert sorted(record.key for record in records) == ["address n2:22", "key-n1"]
        assert all(record.drain is not None for record in records)
        world.restart()
    change(world, "undrain", N1)
    world.restart()
    by_key = {record.key: record.drain for record in world.store.machines.all()}
    assert by_key["key-n1"] is None and by_key["address n2:22"] is not None


def test_two_records_of_one_machine_from_an_earlier_release_become_one(world: World) -> None:
    change(world, "drain", N1)
    (drained,) = world.store.machines.all()
    world.store.machines.save([MachineRecord("key-n1", (N1, OTHER_NAME))])
    world.restart()
    world.turn()
    (view,) = make_machine_views(world.store.machines.all(), (), (), now_s=time.time())
    assert (view.names, view.state) == (("n1", "npu-2"), MachineState.DRAINED)
    (one,) = world.store.machines.all()
    assert (one.key, one.drain, one.hosts) == ("key-n1", drained.drain, (N1, OTHER_NAME))
    assert [path.name for path in (world.folder / "machines").iterdir()] == ["key-n1"]


def test_a_stop_carries_who_and_why_to_the_node_and_into_the_record(world: World) -> None:
    asked, failed = world.running(N1), world.running(N2)
    world.up(N1, N2)
    world.jobs.steps.feed(asked.id, inputs.StopRequested(now=True, by="wang@login1"))
    world.jobs.steps.feed(failed.id, endings.RankExited("n2", 0, Exit(1, None, 1)))
    world.turn()
    stops = {name: [one for one in world.nodes[name].asked if isinstance(one, agent.Stop)][-1] for name in ("n1", "n2")}
    assert {name: (one.by, one.why) for name, one in stops.items()} == {
        "n1": ("wang@login1", "user"),
        "n2": ("controller", "failure"),
    }
    assert world.now(asked).reason.values["by"] == "wang@login1"
