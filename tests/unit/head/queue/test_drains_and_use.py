"""What the server of the shared queue knows beyond the jobs: hosts that administrators drained, and use before it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.errors import AscendrunError, ConflictError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.fair_share import Account
from ascendrun.core.machines import Closure, MachineRecord, MachineState, QueueDrain, merge_drains, with_drains
from ascendrun.head.protocol.messages import Request
from ascendrun.head.queue.board import GRANT_S, Board
from ascendrun.head.queue.messages import Contend, Decided, DrainHosts
from ascendrun.head.queue.server import DRAINS_NAME, QueueServer
from ascendrun.text import Text
from tests.unit.head.queue.test_server import ALICE, BOB, ROOT, World, job, world

__all__ = ["world"]
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to be several users")


class RawUse(Request[Decided]):
    OP, REPLY = "queue-contend", Decided  # type: ignore[assignment]
    head: str
    entries: tuple[Any, ...] = ()
    used: Any = None


def test_a_new_server_takes_what_accounts_have_used_from_their_controllers(world: World) -> None:
    day_s = 86_400.0
    alice, bob = world.user(ALICE), world.user(BOB)
    half_life_s = alice.report().half_life_s
    assert half_life_s == world.share.usage.half_life_s, "by which the controllers compute it"
    alice.client.call(Contend("h", used={"": 2 * day_s, "llm": day_s}))
    world.user(ALICE, "other").client.call(Contend("other", (), used={"": day_s}))
    used = world.share.usage.at(world.clock.now)
    assert used == {Account("daemon"): 3 * day_s, Account("daemon", "llm"): day_s}, "both controllers of one user"
    alice.client.call(Contend("h", used={"": 2 * day_s}))
    world.user(ALICE, "other").client.call(Contend("other", used={"": 2 * day_s}))
    assert world.share.usage.at(world.clock.now)[Account("daemon")] == 4 * day_s, "not twice, if it knows it"
    world.clock.now += half_life_s
    alice.client.call(Contend("h", used={"": day_s}))
    used = world.share.usage.at(world.clock.now)
    assert used[Account("daemon")] == 2 * day_s, "what it has counted itself stays"
    alice.report(job(1, "a"))
    bob.report(job(2, "a"))
    world.share.usage.add(Account("bin"), 1.0, world.clock.now)
    world.clock.now += GRANT_S + 1
    assert [one.ask(name).hosts for one, name in ((alice, "j-0001"), (bob, "j-0002"))] == [(), ("a",)]


@pytest.mark.parametrize("used", [{"": -1.0}, {"": float("nan")}, {"": float("inf")}, {"": "x"}, [1], {"x" * 256: 1.0}])
def test_a_use_that_cannot_be_is_refused(world: World, used: Any) -> None:
    with pytest.raises(AscendrunError) as caught:
        world.user(ALICE).client.call(RawUse("h", (), used))
    assert caught.value.code == "invalid-input" and not world.share.usage.at(world.clock.now)


def drain_of(host: str, key: str | None = None, **closure: Any) -> QueueDrain:
    return QueueDrain(key, (Host(host),), Closure(MachineState.DRAINED, "optics", "forged", 5.0, **closure))


def test_a_machine_under_several_addresses_is_drained_and_opened_as_one() -> None:
    host, other = Host("npu-2", addr="10.0.0.2"), Host("npu2", user="li")
    admins, users = MachineRecord("key", (host,)), MachineRecord("key", (other,))
    closure = drain_of("x").closure
    [drain] = merge_drains((), [QueueDrain.of(host, (admins,), closure)])
    drained, more, unknown = with_drains((users, MachineRecord("more", (Host("n"),))), (drain, drain_of("m")), 6.0)
    assert (drained.closures(6.0), more.closures(6.0)) == ((closure,), ())
    assert (drained.hosts, unknown.hosts) == ((other,), (Host("m"),)), "and one that the user has not seen is listed"
    opened = replace(closure, since_s=7.0, until_s=0.0)
    [merged] = merge_drains((drain,), [QueueDrain.of(host, (), opened)])
    assert merged.places == drain.places, "what was drained by its key is opened by an address"
    [record] = with_drains((drained,), (merged,), 8.0)
    assert record.closures(8.0) == () and with_drains((), (merged,), 8.0) == ()


def test_only_administrators_drain_hosts_and_no_job_of_anybody_starts_there(world: World) -> None:
    world.restart(admins=("bin",))
    alice, bob = world.user(ALICE), world.user(BOB)
    with pytest.raises(ConflictError):
        alice.client.call(DrainHosts((drain_of("a", "key"),)))
    assert alice.client.call(DrainHosts()).drains == (), "every user may see them"
    nowhere = QueueDrain(None, (), drain_of("a").closure)
    [drain] = bob.client.call(DrainHosts((drain_of("a", "key"), nowhere))).drains
    assert (drain.closure.by, drain.closure.since_s) == ("bin", world.clock.now), "the server knows who and when"
    there = {"places": {"x": "key"}}
    reason = alice.report(job(1, "x", **there)).answers["j-0001"].reason
    assert reason is not None and isinstance(reason.why, Text) and reason.why.values["by"] == "bin"
    assert alice.report(job(1, "x", **there)).drains == (drain,), "its controller gets it"
    assert alice.client.call(Contend("h", drains_s=world.clock.now)).drains == (), "once"
    shown = world.rows()["daemon/j-0001"].reason
    assert shown is not None and shown.why == reason.why, "every user sees why it waits"
    assert alice.hosts(job(1, "x", examines=True, **there)) == (), "nor is it examined by others"
    assert bob.hosts(job(1, "x", examines=True, **there)) == ("x",)
    bob.report()
    world.user(ROOT).client.call(DrainHosts((drain_of("a", until_s=0.0),)))
    assert alice.hosts(job(1, "x", **there)) == ("x",), "another administrator opens it, by its address"


def test_a_new_server_takes_drains_from_controllers_of_administrators(world: World) -> None:
    world.restart(admins=("bin",))
    bob, alice = world.user(BOB), world.user(ALICE)
    drains = (drain_of("a", "key"), drain_of("b", "other", until_s=4.0))
    alice.client.call(Contend("h", (), drains=drains))
    assert alice.client.call(DrainHosts()).drains == ()
    bob.client.call(Contend("h", (), drains=drains))
    assert alice.client.call(DrainHosts()).drains == drains
    world.user(ROOT).client.call(DrainHosts((drain_of("a", until_s=0.0),)))
    bob.client.call(Contend("h", drains=drains))
    opened = {one.key: one.closure.is_open(world.clock.now) for one in alice.client.call(DrainHosts()).drains}
    assert opened == {"key": True, "other": True}, "a newer undrain stays"
    world.restart()
    assert len(world.user(ALICE).client.call(DrainHosts()).drains) == 2


def test_before_a_planned_drain_only_jobs_start_that_end_before(world: World) -> None:
    at_s = world.clock.now + 100.0
    world.user(ROOT).client.call(DrainHosts((drain_of("a", "key", starts_at_s=at_s, until_s=at_s + 100.0),)))
    alice, there = world.user(ALICE), {"places": {"a": "key"}}
    assert alice.hosts(job(1, "a", **there)) == () and alice.hosts(job(2, "a", limit_s=200.0, **there)) == ()
    assert alice.hosts(job(3, "a", limit_s=50.0, **there)) == ("a",)
    world.restart()
    world.clock.now += 100.0
    assert world.user(ALICE).hosts(job(4, "a", limit_s=50.0, **there)) == (), "the plan is known after a restart"
    world.clock.now += 100.0
    assert world.user(ALICE).hosts(job(5, "a", **there)) == ("a",)


def test_a_drain_that_cannot_be_stored_or_read_is_refused(world: World) -> None:
    file = world.folder / DRAINS_NAME
    root = world.user(ROOT)
    root.client.call(DrainHosts((drain_of("a"),)))
    file.unlink()
    file.mkdir()
    with pytest.raises(ConflictError):
        root.client.call(DrainHosts((drain_of("b"),)))
    assert root.hosts(job(1, "a")) == ("a",) and len(root.client.call(DrainHosts()).drains) == 1
    root.client.call(Contend("h", drains=(drain_of("c"),)))
    assert len(root.client.call(DrainHosts()).drains) == 1, "nor one that a controller knows, whose jobs are served"
    file.rmdir()
    for text in ("[", '{"drains": [{"hosts": 7}]}'):
        file.write_text(text)
        with pytest.raises(ConflictError):
            QueueServer(world.folder, Board(world.share))
    file.unlink()
