"""Shares, quotas and expected starts in a controller: from the jobs of its store and the settings of its user."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ascendrun.core.jobfile.model import JobSpec, Timeouts
from ascendrun.core.jobs.inputs import StopRequested
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.restart import PastAttempt
from ascendrun.core.pulse import JobSight
from ascendrun.query.host_views import make_machine_views
from ascendrun.query.views import make_job_view
from tests.lib.small_world import N1, N2, World, change

HOUR_S = 3600.0
SPEC = JobSpec(name="demo", command=("true",), devices={"type": "npu", "per_node": 8})


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ascendrun").mkdir()
    return tmp_path / "ascendrun" / "config.yaml"


def used(world: World, user: str, hours: float, **changes: object) -> str:
    """A job of a user that has ended just now."""
    ended_s = time.time()
    times = {"started_at_s": ended_s - hours * HOUR_S, "ended_at_s": ended_s}
    job = world.job(N2, spec=SPEC, user=user, hosts=("n2",), state=State.SUCCEEDED, **times, **changes)
    return job.id


def test_who_used_more_of_his_share_is_placed_later_also_after_a_new_start(world: World, settings: Path) -> None:
    settings.write_text("fair_share: {shares: {ann: 2}}")
    world.up(N1)
    used(world, "ann", 3.0)
    used(world, "bob", 2.0)
    world.restart()
    world.up(N1)
    bob, ann = world.job(N1, spec=SPEC, user="bob"), world.job(N1, spec=SPEC, user="ann")
    world.turn()
    assert (world.now(ann).state, world.now(bob).state) == (State.CHECKING, State.QUEUED), "3/2 is less than 2"
    world.jobs.steps.feed(ann.id, StopRequested(now=True))
    used(world, "ann", 2.0)
    ann = world.job(N1, spec=SPEC, user="ann")
    world.turn()
    assert (world.now(ann).state, world.now(bob).state) == (State.QUEUED, State.CHECKING)


def test_a_quota_counts_running_devices_and_hours_of_all_attempts(world: World, settings: Path) -> None:
    settings.write_text('fair_share: {quotas: {ann: {devices: 8}, "project:llm": {device_hours: 20}}}')
    world.up(N1, N2)
    world.running(N2, spec=SPEC, user="ann", started_at_s=time.time())
    past = (PastAttempt(1, ("n2",), time.time() - 3 * HOUR_S, time.time()),)
    llm = SPEC.model_copy(update={"labels": {"project": "llm"}})
    ann, bob = world.job(N1, spec=SPEC, user="ann"), world.job(N1, spec=llm, user="bob")
    world.turn()
    assert world.now(ann).reason.code == "above-quota" and world.now(bob).state is State.CHECKING
    world.jobs.steps.feed(bob.id, StopRequested(now=True))
    world.job(
        N2, spec=llm, user="cy", hosts=("n2",), state=State.SUCCEEDED, started_at_s=0.0, ended_at_s=0.0, past=past
    )
    late = world.job(N1, spec=llm, user="bob")
    world.turn()
    assert world.now(late).reason.code == "above-hours"
    assert world.now(late).reason.values["used"] == 24


def test_a_waiting_job_has_an_expected_start_while_it_is_queued(world: World) -> None:
    world.up(N1)
    limited = SPEC.model_copy(update={"timeouts": Timeouts(run_s=500.0)})
    busy = world.running(N1, spec=limited, started_at_s=1000.0 + time.time())
    waiting, behind = world.job(N1, spec=SPEC), world.job(N1, spec=SPEC)
    world.turn()
    expected_s = world.now(busy).started_at_s + 500.0 + busy.grace_s
    assert world.now(waiting).start_expected_at_s == expected_s
    assert world.now(behind).start_expected_at_s is None, "the job before it has no limit"
    stored = world.store.jobs.find(waiting.id)
    assert make_job_view(stored, None, JobSight(True)).start_expected_at_s == expected_s
    assert make_job_view(stored, None, None).start_expected_at_s is None, "no controller confirms it"


def test_before_a_planned_drain_only_jobs_start_that_end_in_time(world: World) -> None:
    world.up(N1)
    at_s = time.time() + HOUR_S
    change(world, "drain", N1, reason="rack", at_s=at_s)
    short = SPEC.model_copy(update={"timeouts": Timeouts(run_s=HOUR_S / 2)})
    unlimited, fits = world.job(N1, spec=SPEC), world.job(N1, spec=short)
    world.turn()
    assert world.now(fits).state is State.CHECKING
    why = world.now(unlimited).reason.why
    assert (why.key, why.values["at_s"], why.values["reason"]) == ("machine.drain-planned", at_s, "rack")
    [machine] = make_machine_views(world.store.machines.all(), (), (), now_s=time.time())
    assert (machine.state.value, machine.reason.key) == ("free", "machine.drain-planned")
    [machine] = make_machine_views(world.store.machines.all(), (), (), now_s=at_s)
    assert (machine.state.value, machine.reason.key) == ("drained", "machine.drained")
    change(world, "undrain", N1)
    world.jobs.steps.feed(fits.id, StopRequested(now=True))
    world.turn()
    assert world.now(unlimited).state is State.CHECKING
