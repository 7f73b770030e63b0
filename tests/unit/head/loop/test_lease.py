"""A head with a standby that has no lease: it changes nothing on nodes, and disturbs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobs.inputs import StopRequested
from ascendrun.core.jobs.job import State
from ascendrun.core.standby_settings import Standby
from ascendrun.head.agents.lease import HeadLease
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import HeadFile, LostLeaseError, give_up, superseded_by
from tests.lib.small_world import N1, N2, World

VOTERS = (N1, N2, Host("n3"))


@pytest.fixture
def lease(world: World) -> HeadLease:
    head = HeadFile(world.store.head_id, 1, term=1, instance="a")
    made = HeadLease(Standby(("a", "b"), VOTERS, 20.0), head, "a", lambda vote: give_up(world.store, vote.host))
    world.context.lease, world.jobs.steps.may_act = made, lambda: made.is_held
    made.begin(world)  # type: ignore[arg-type]
    return made


def grant(world: World, lease: HeadLease, *hosts: Host) -> list[str]:
    """These voters grant it from now on; what was noted by most of them."""
    noted: list[str] = []
    for host in hosts:
        world.get(host).node.votes = True
    lease.set_in_sync(False, lambda: noted.append("out of sync"))
    return noted


def test_without_its_lease_a_head_starts_and_stops_nothing(world: World, lease: HeadLease) -> None:
    running, queued = world.running(N1), world.job(N2)
    world.up(*VOTERS)
    world.jobs.steps.feed(running.id, StopRequested(now=False))
    world.turn()
    assert (world.now(running).state, world.get(N1).node.stopped()) == (State.RUNNING, [])
    reason = world.now(queued).reason
    assert (reason.code, reason.hosts) == ("head-without-lease", ("n1", "n2", "n3"))
    assert grant(world, lease, N1) == [] and not lease.is_held  # one of three is no majority
    assert grant(world, lease, N2) == ["out of sync"] and lease.is_held
    world.turn()
    assert world.now(running).state is State.STOPPING and world.get(N1).node.stopped() == [running.run_id]
    assert world.now(queued).state is State.CHECKING


def test_a_head_without_its_lease_lets_no_time_pass_for_jobs(
    world: World, lease: HeadLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(world, lease)
    world.up(*VOTERS)
    grant(world, lease, N1, N2)
    job = world.running(N1, state=State.STARTING)
    monkeypatch.setattr("ascendrun.head.agents.lease.boot_s", lambda: 1e9)  # no voter replies for long
    monkeypatch.setattr("time.time", lambda: job.since_s + 1e6)
    world.turn()
    assert world.now(job).state is State.STARTING and not lease.is_held
    assert not any(isinstance(one, agent.Stop) for one in world.get(N1).node.asked)


def test_a_superseded_head_writes_nothing_more(world: World, tmp_path: Path) -> None:
    job, other = world.job(N1), world.store.reopened()
    with pytest.raises(LostLeaseError):
        give_up(world.store, "head2")
    assert superseded_by(tmp_path) == "head2"
    for store in (world.store, other):
        with pytest.raises((LostLeaseError, StoreUnusableError)):
            store.jobs.save(job, [], now_s=1.0)
    other.close()
    world.store.close()
    assert superseded_by(tmp_path) == "head2" and HeadFile.load(tmp_path).head_id  # type: ignore[union-attr]
    with Store.open_for_reading(tmp_path) as reading:
        assert reading.jobs.find(job.id).job == job
