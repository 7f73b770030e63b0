"""Hosts that are closed to jobs: drained, lost, in quarantine, or passed over."""

import time
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.errors import ConflictError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.draft import PASSED_OVER_S
from ascendrun.core.jobs.job import Phase, Request, State
from ascendrun.core.jobs.reasons import Reason
from ascendrun.core.machines import MachineState
from ascendrun.head.loop.machine.placement import SCARCE_S
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.query.host_views import make_machine_views
from ascendrun.text import Text
from tests.lib.small_world import N1, N2, World, change


def test_a_drained_host_gets_no_job_until_the_drain_ends_also_by_another_name(world: World) -> None:
    world.up(N1, N2)
    change(world, "drain", N1, reason="optics")
    waiting, elsewhere = world.job(N1), world.job(N1, N2, request=Request(1))
    world.turn()
    why = world.now(waiting).reason.why
    assert (why.key, why.values["by"], why.values["reason"]) == ("machine.drained", "wang", "optics")
    assert (world.now(elsewhere).state, world.now(elsewhere).hosts) == (State.CHECKING, ("n2",))
    world.restart()
    world.turn()
    assert world.now(waiting).state is State.QUEUED, "it is stored"
    change(world, "undrain", N1)
    assert world.now(waiting).state is State.CHECKING


@pytest.mark.parametrize("what", ["drain", "undrain", "lost", "deep"])
def test_the_word_of_an_operator_is_stored_before_it_is_acknowledged(world: World, what: str) -> None:
    world.jobs.machines.quarantine(N1, Text("x", "x"))
    change(world, "drain", N1)
    change(world, what, N1, by="li")
    world.restart()
    [record] = world.store.machines.all()
    drain = record.drain
    assert (drain is None) == (what == "undrain") and (record.quarantine is None) == (what in ("undrain", "deep"))
    assert drain is None or (drain.by, drain.is_lost) == ("wang" if what == "deep" else "li", what == "lost")
    said = {"undrain": "host-opened", "deep": "host-opened"}.get(what, "host-closed")
    assert [event.code for event in world.store.events.of("")][2:] == [said]


@pytest.mark.parametrize("what", ["drain", "undrain", "lost", "deep"])
def test_a_word_that_cannot_be_stored_is_an_error_and_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    job = world.running(N1, N2)
    world.up(N1, N2)
    world.get(N2).is_up = False
    world.jobs.machines.quarantine(N2, Text("x", "x"))
    world.turn()
    before = world.store.machines.all()

    def refuse(*_: Any) -> None:
        raise StoreUnusableError("no space left on device")

    with monkeypatch.context() as full:
        full.setattr(world.store.machines, "save", refuse)
        with pytest.raises(StoreUnusableError):
            change(world, what, N2)
    world.turn()
    assert world.store.machines.all() == before and world.now(job).state is State.RUNNING
    assert [event.code for event in world.store.events.of("")] == ["host-closed"]


def test_a_drain_ends_by_its_time_and_a_running_job_continues(world: World) -> None:
    job = world.running(N1)
    world.up(N1)
    change(world, "drain", N1, until_s=time.time() + 3600.0)
    assert world.now(job).state is State.RUNNING
    [view] = make_machine_views(world.store.machines.all(), (), world.store.jobs.live(), now_s=time.time())
    assert (view.state, view.jobs, view.by) == (MachineState.DRAINING, (job.id,), "wang")
    [view] = make_machine_views(world.store.machines.all(), (), world.store.jobs.live(), now_s=time.time() + 3601.0)
    assert view.state is MachineState.HELD


def test_a_lost_host_ends_what_ran_there_and_is_closed(world: World) -> None:
    job = world.running(N1, N2)
    world.up(N1, N2)
    world.get(N2).is_up = False
    change(world, "lost", N2)
    assert (world.now(job).node("n2").lost, world.now(job).node("n2").phase) == ("by-user", Phase.LOST)
    later = world.job(N2)
    world.turn()
    assert world.now(later).reason.why.key == "machine.drained"
    with pytest.raises(ConflictError):
        change(world, "lost", N1)
    assert world.now(job).node("n1").phase is Phase.STARTED


def test_a_host_is_lost_if_it_does_not_answer_now_or_if_the_operator_insists(world: World) -> None:
    job = world.running(N1, N2)
    world.up(N1, N2)
    world.get(N1).node.is_silent = True  # its power has gone, and its connection is still there
    change(world, "lost", N1)
    assert world.now(job).node("n1").lost == "by-user"
    change(world, "lost", N2, force=True)
    assert world.now(job).node("n2").lost == "by-user"


def test_a_stage_leaves_a_lost_host_and_waits_for_a_drained_one(world: World) -> None:
    prepare = world.job(N1, N2, request=Request(1), hosts=("n1",), state=State.SUCCEEDED, ended_at_s=1.0)
    world.up(N2)
    change(world, "drain", N1)
    train = world.job(N1, N2, request=Request(1, same_as=prepare.id))
    world.turn()
    assert world.now(train).reason.code == "too-few-hosts"
    change(world, "lost", N1, reason="fire")
    world.restart()
    world.turn()
    assert world.now(train).hosts == ("n2",)


def test_the_second_strike_of_a_host_is_a_quarantine_and_each_one_is_longer(world: World) -> None:
    world.up(N1)
    job, reason = world.job(N1, N2, request=Request(1)), Text("x", "x")
    for _ in range(2):  # reported by two jobs
        world.jobs.machines.strike(N1, reason)
    [record] = world.jobs.machines.records.at(N1)
    assert not record.closures(time.time()) and len(record.strikes) == 1
    world.jobs.machines.records.keep(replace(record, strikes=(record.strikes[0] - 3600.0,)))
    world.jobs.machines.strike(N1, reason)
    [record] = world.jobs.machines.records.at(N1)
    [first] = record.closures(time.time())
    again = record.quarantined(reason, time.time()).quarantine
    assert first.until_s and again and again.until_s
    assert again.until_s - again.since_s == pytest.approx(2 * (first.until_s - first.since_s))
    world.turn()
    assert world.now(job).hosts == ("n2",)


@pytest.mark.parametrize(("pool", "since_s", "hosts"), [((N1,), 60, ("n1",)), ((N1,), 5, ()), ((N1, N2), 60, ("n2",))])
def test_a_host_that_was_passed_over_is_used_again_soon_where_there_is_no_other(
    world: World, pool: tuple[Host, ...], since_s: float, hosts: tuple[str, ...]
) -> None:
    until_s = time.time() + PASSED_OVER_S - since_s
    job = world.job(*pool, request=Request(1), passed_over={"n1": until_s})
    world.up(*pool)
    assert world.now(job).hosts == hosts
    if not hosts:
        why = world.now(job).reason.why
        assert isinstance(why, Reason) and why.values["until_s"] < time.time() + SCARCE_S
