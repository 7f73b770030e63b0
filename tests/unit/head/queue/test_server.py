"""The shared queue over its real socket, with controllers of several users under their real uids."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.errors import AscendrunError, ConflictError, UnreachableError
from ascendrun.core.jobs.fair_share import Account, FairShare, SharePolicy, Usage
from ascendrun.core.jobs.reasons import Reason
from ascendrun.head.protocol.messages import Request
from ascendrun.head.queue import board as boards
from ascendrun.head.queue.board import FRESH_S, GRANT_S, KEPT_S, SETTLE_S, Board
from ascendrun.head.queue.client import QueueClient
from ascendrun.head.queue.entries import JOBS, load_entries
from ascendrun.head.queue.messages import Answer, Contend, Decided, ListQueue, QueryAdmin, QueueRow
from ascendrun.head.queue.server import LOCK_NAME, QueueServer
from ascendrun.node import wire

ROOT, ALICE, BOB = 0, 1, 2  # root, daemon, bin: everywhere
NAMES = {ROOT: "root", ALICE: "daemon", BOB: "bin"}
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to be several users")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Raw(Request[Decided]):
    """A report whose entries are not checked before they are sent."""

    OP, REPLY = "queue-contend", Decided  # type: ignore[assignment]
    head: str
    entries: tuple[Any, ...] = ()
    user: str = "root"


class User:
    """A controller of one user, as far as the queue sees it."""

    def __init__(self, folder: Path, uid: int, head: str = "h") -> None:
        self.name, self.head = NAMES[uid], head
        os.setegid(uid)
        os.seteuid(uid)  # the kernel takes it when the socket connects
        try:
            self.client = QueueClient(folder)
        finally:
            os.seteuid(0)
            os.setegid(0)

    def report(self, *entries: dict[str, Any]) -> Decided:
        return self.client.call(Raw(self.head, entries))

    def ask(self, job: str) -> Answer:
        """What is decided now, with nothing changed."""
        return self.client.call(Contend(self.head)).answers[job]

    def hosts(self, *entries: dict[str, Any]) -> tuple[str, ...]:
        """The hosts on which the first of the jobs starts, when this is reported."""
        return self.report(*entries).answers[entries[0]["id"]].hosts


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.share = folder, Clock(), FairShare(SharePolicy(), Usage())
        self.start()

    def start(self, **options: Any) -> None:
        self.server = QueueServer(self.folder, Board(self.share, self.clock, self.clock), **options)
        self.server.start()
        self.user(ROOT, "first").report()

    def restart(self, **options: Any) -> None:
        self.server.close()
        self.start(**options)
        self.clock.now += SETTLE_S

    def user(self, uid: int, head: str = "h") -> User:
        return User(self.folder, uid, head)

    def rows(self) -> dict[str, QueueRow]:
        return {f"{row.user}/{row.job}": row for row in self.user(BOB).client.call(ListQueue()).rows}


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        made = World(Path(name))
        made.clock.now += SETTLE_S
        yield made
        made.server.close()


def job(number: int, *pool: str, nodes: int = 1, state: str = "QUEUED", **values: Any) -> dict[str, Any]:
    hosts = pool[:nodes] if state not in ("QUEUED", "BACKOFF") else ()
    entry = {"id": f"j-{number:04d}", "name": f"job{number}", "state": state, "nodes": nodes, "hosts": hosts}
    entry.update(since_s=float(number), created_at_s=float(number), claims=dict.fromkeys(pool, (8, None, None)))
    return {**entry, **values}


def test_a_job_waits_for_another_users_and_starts_when_that_has_ended(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    assert alice.hosts(job(1, "a")) == ("a",)
    reason = bob.report(job(1, "a")).answers["j-0001"].reason
    assert reason is not None and (reason.code, reason.values["job"]) == ("nodes-in-use", "daemon/j-0001")
    alice.report(job(1, "a", state="RUNNING", since_s=9.0), job(2, "a"))
    assert bob.ask("j-0001").reason == reason
    own = alice.ask("j-0002").reason
    assert own is not None and own.values["job"] == "j-0001", "own jobs have their ids"
    alice.report()
    assert bob.ask("j-0001").hosts == ("a",)


def test_one_machine_under_two_names_and_what_its_claims_leave(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    assert alice.hosts(job(1, "a", places={"a": "key"})) == ("a",)
    assert bob.hosts(job(1, "x", places={"x": "key"})) == ()
    assert bob.hosts(job(1, "x", "y", places={"x": "key", "y": "other"})) == ("y",)
    alice.report(job(2, "c", state="RUNNING", claims={"c": (4, None, [0, 1, 2, 3])}))
    assert bob.hosts(job(3, "c", claims={"c": (4, None, [3, 4])})) == ()
    assert bob.hosts(job(3, "c", claims={"c": (4, None, [4, 5])})) == ("c",)


def test_users_take_turns_and_who_has_used_less_is_first(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    new = {"since_s": world.clock.now}
    alice.report(*(job(number, "a", priority=99, **new) for number in range(1, 5)))
    bob.report(*(job(number, "a", **new) for number in range(7, 9)))
    turns = []
    for _ in range(4):
        [(user, granted)] = [
            (user, name)
            for user in (alice, bob)
            for name, one in user.client.call(Contend("h")).answers.items()
            if one.hosts
        ]
        turns.append(user.name)
        waiting = [name for name in user.client.call(Contend("h")).answers if name != granted]
        numbers = [int(name[2:]) for name in waiting]
        user.report(job(100, "a", state="RUNNING"), *(job(number, "a", **new) for number in numbers))
        for _ in range(6):
            world.clock.now += 10.0
            alice.client.call(Contend("h"))
            bob.client.call(Contend("h"))
        user.report(*(job(number, "a", **new) for number in numbers))
    assert turns == ["daemon", "bin", "daemon", "bin"]
    used = world.share.usage.at(world.clock.now)
    assert used[Account("bin")] == pytest.approx(used[Account("daemon")], rel=0.3) and used[Account("bin")] > 500.0


def test_hosts_that_a_job_does_not_come_for_go_to_the_next_one(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    alice.report(job(1, "a"))
    assert bob.hosts(job(2, "a")) == ()
    world.clock.now += GRANT_S - 1
    assert alice.ask("j-0001").hosts == ("a",) and bob.ask("j-0002").hosts == ()
    world.clock.now += 2
    assert alice.ask("j-0001").reason == Reason("queue-passed-over") and bob.ask("j-0002").hosts == ("a",)


def test_a_grant_ends_when_its_job_gives_it_back_or_cannot_use_it(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    assert alice.hosts(job(1, "a", "b")) == ("a",)
    assert alice.hosts(job(1, "a", "b", unusable=["a"])) == ("b",), "the host was drained since"
    assert alice.hosts(job(1, "a", "b", since_s=50.0, unusable=["a", "b"])) == ()
    assert bob.hosts(job(1, "b")) == ("b",)
    board = Board(FairShare(SharePolicy(), Usage()), world.clock, world.clock)
    board.report("me", "h", load_entries([job(1, "a")]))
    world.clock.now += SETTLE_S
    board.decide()
    board.report("me", "h", load_entries([job(1, "a", unusable=["a"])]))
    assert board.answers("me", "h") == {}, "nor is it repeated before the next decision"


def test_a_controller_that_dies_keeps_what_it_uses_and_loses_what_it_was_granted(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    alice.report(job(1, "a", state="RUNNING"), job(2, "b"))
    alice.client.close()
    bob.report(job(3, "b"), job(4, "a"))
    world.clock.now += FRESH_S + 1
    bob.report(job(3, "b"), job(4, "a"))
    assert bob.ask("j-0003").hosts == (), "it may come for them yet"
    assert world.rows()["daemon/j-0001"].age_s == FRESH_S + 1
    world.clock.now += GRANT_S - FRESH_S
    assert bob.ask("j-0003").hosts == ("b",) and bob.ask("j-0004").hosts == ()
    world.clock.now += KEPT_S
    assert bob.report(job(4, "a")).answers["j-0004"].hosts == ("a",)


def test_a_new_server_grants_nothing_until_the_others_have_reported(world: World) -> None:
    world.server.close()
    world.start()
    alice, bob = world.user(ALICE), world.user(BOB)
    reason = bob.report(job(1, "a"), job(2, "b")).answers["j-0001"].reason
    assert reason is not None and reason.code == "queue-opens"
    alice.report(job(1, "a", state="RUNNING"))
    world.clock.now += SETTLE_S
    assert bob.ask("j-0002").hosts == ("b",) and bob.ask("j-0001").hosts == ()


def test_a_server_that_waited_on_a_standby_grants_nothing_until_the_others_have_reported(world: World) -> None:
    board = Board(world.share, world.clock, world.clock)
    world.clock.now += 86_400.0
    board.report("bin", "h", load_entries([job(1, "a"), job(2, "b")]))
    board.decide()
    assert {one.reason and one.reason.code for one in board.answers("bin", "h").values()} == {"queue-opens"}
    board.report("daemon", "h", load_entries([job(1, "a", state="RUNNING")]))
    world.clock.now += SETTLE_S
    board.decide()
    found = board.answers("bin", "h")
    assert (found["j-0001"].hosts, found["j-0002"].hosts) == ((), ("b",))


def test_one_who_floods_is_refused_and_the_others_are_served(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    with pytest.raises(ConflictError):
        alice.report(*(job(number, "a") for number in range(10_000)))
    assert len(world.rows()) == 0 and bob.hosts(job(1, "a")) == ("a",)
    assert len(alice.report(*(job(number, "b") for number in range(JOBS))).answers) == JOBS
    with pytest.raises(ConflictError):
        world.user(ALICE, "h1").report(job(1, "b"))
    for head in range(1, boards.HEADS):
        world.user(ALICE, f"h{head}").report()
    with pytest.raises(ConflictError):
        world.user(ALICE, "more").report()
    for _ in range(20):
        try:
            world.user(ALICE, "h1")
        except UnreachableError:  # the kernel has closed it at once
            break
    assert bob.ask("j-0001").hosts == ("a",)


@pytest.mark.parametrize(
    "values",
    [
        {"user": "bin"},
        {"id": "../../etc"},
        {"id": 7},
        {"since_s": float("nan")},
        {"state": "WON"},
        {"claims": ["a"]},
        {"claims": {"a": ["many", None, None]}},
        {"hosts": [{}]},
        {"nodes": -1},
        {"places": {"a": []}},
        {"claims": {f"h{number}": (1, None, None) for number in range(250_000)}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_report_that_is_no_job_is_refused_as_a_whole(world: World, values: dict[str, Any]) -> None:
    alice = world.user(ALICE)
    with pytest.raises(AscendrunError) as caught:
        alice.report(job(1, "a"), {**job(2, "a"), **values})
    assert caught.value.code == "invalid-input" and not world.rows()


def test_the_name_of_a_controller_cannot_break_the_reasons_of_others(world: World) -> None:
    with pytest.raises(AscendrunError) as caught:
        world.user(ALICE, "a/b").report(job(1, "a"))
    assert caught.value.code == "invalid-input"


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, wire.pack({"op": []}), wire.pack({"op": "queue-contend"}), b"GET /\r\n"]
)
def test_what_is_no_frame_or_no_request_harms_nobody(world: World, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(world.folder / QueueClient.NAME))
        raw.sendall(data)
    assert world.user(BOB).hosts(job(1, "a")) == ("a",)


def test_nobody_can_be_somebody_else(world: World) -> None:
    world.user(ALICE).report(job(1, "a", project="llm"))  # its header has the user root
    row = world.rows()["daemon/j-0001"]
    assert (row.project, row.state, row.nodes, row.name) == ("llm", "QUEUED", 1, "job1")
    world.user(BOB).report(job(1, "b"))
    assert set(world.rows()) == {"daemon/j-0001", "bin/j-0001"}, "equal ids and heads of two users"


@pytest.mark.parametrize(("admins", "is_admin"), [((), False), (("bin",), True), (("@bin",), True), (("@sys",), False)])
def test_the_server_decides_who_is_an_administrator(world: World, admins: tuple[str, ...], is_admin: bool) -> None:
    world.restart(admins=admins)
    alice = world.user(ALICE)
    found = {uid: alice.client.call(QueryAdmin(uid)) for uid in (ROOT, BOB, ALICE, 4_000_000)}
    assert [one.is_admin for one in found.values()] == [True, is_admin, False, False]
    assert {one.names for one in found.values()} == {("root", *admins)}


def test_a_group_keeps_the_others_out_and_a_directory_of_others_is_not_trusted(world: World) -> None:
    world.restart(group="daemon")
    with pytest.raises(UnreachableError):
        world.user(BOB)
    assert world.user(ALICE).hosts(job(1, "a")) == ("a",)
    with pytest.raises(ConflictError):
        QueueServer(world.folder, Board(world.share), group="no-such-group")
    world.folder.chmod(0o777)
    with pytest.raises(ConflictError):
        world.user(ALICE)


def test_the_command_serves_once_and_keeps_what_was_used(world: World) -> None:
    world.server.close()
    folder = world.folder / "new"
    argv = [sys.executable, "-m", "ascendrun", "controller", "run", "--shared", str(folder)]
    environ = {**os.environ, "ASCENDRUN_STATE_DIR": str(world.folder / "state")}
    with subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE) as first:
        deadline = time.monotonic() + 60.0
        while not (folder / QueueClient.NAME).exists():
            assert time.monotonic() < deadline and first.poll() is None
        assert subprocess.run(argv, env=environ, capture_output=True, check=False).returncode == ConflictError.exit_code
        assert (folder.stat().st_mode & 0o777, (folder / QueueClient.NAME).stat().st_mode & 0o777) == (0o755, 0o666)
        assert (folder / LOCK_NAME).stat().st_mode & 0o777 == 0o600, "who may open it may lock it"
        first.terminate()
    assert json.loads((folder / "usage.json").read_bytes())["accounts"] == []
    folder.chmod(0o775)
    assert subprocess.run(argv, env=environ, capture_output=True, check=False).returncode == ConflictError.exit_code


def test_a_job_of_another_user_is_preempted_where_it_allows_that(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    low = job(1, "a", state="RUNNING", started_s=world.clock.now, preemptible_after_s=20.0)
    high = job(2, "a", priority=9)

    def later(seconds: float) -> tuple[Answer | None, Answer | None]:
        for _ in range(int(seconds / 10)):
            world.clock.now += 10.0
            alice.client.call(Contend("h"))
            bob.client.call(Contend("h"))
        return alice.client.call(Contend("h")).answers.get("j-0001"), bob.client.call(Contend("h")).answers.get(
            "j-0002"
        )

    alice.report(low)
    bob.report(high)
    assert later(10.0)[0] is None, "it has just started"
    preempted, waits = later(10.0)
    assert preempted is not None and preempted.reason is not None and preempted.since_s == low["since_s"]
    assert (preempted.reason.code, preempted.reason.values["job"]) == ("preempted-by", "bin/j-0002")
    assert waits is not None and waits.reason is not None and waits.reason.values["job"] == "daemon/j-0001"
    bob.report()
    assert alice.client.call(Contend("h")).answers == {}, "the job that needed it is gone"
    bob.report(high)
    assert alice.report({**low, "state": "STOPPING"}).answers == {}
    alice.report(job(1, "a", since_s=99.0, preemptible_after_s=20.0))
    assert bob.ask("j-0002").hosts == ("a",)


def test_a_job_that_lacks_hosts_gets_each_once(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    short = job(1, "a", "b", nodes=2, state="RUNNING", hosts=("a",), min_nodes=1)
    assert alice.report(short).answers["j-0001"].spares == ("b",)
    other = job(2, "b", "c", nodes=2, state="RUNNING", hosts=("c",), min_nodes=1)
    assert bob.report(other).answers == {}
    assert alice.ask("j-0001").spares == ("b",)
    alice.report({**short, "spares": ("b",)})
    world.clock.now += GRANT_S + 1
    assert bob.report(other).answers == {}


def test_a_job_does_not_grow_with_a_host_that_another_users_job_waits_for(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    short = job(1, "a", "b", "c", nodes=3, state="RUNNING", hosts=("a",), spares=("b", "c"), min_nodes=1)
    assert "j-0001" not in alice.report(short).answers, "it keeps what it has claimed"
    assert bob.hosts(job(2, "b")) == ("b",)
    assert alice.ask("j-0001").spares == ("c",)
    wide = job(3, "a", "c", nodes=2)
    reason = bob.report(job(2, "b", state="RUNNING"), wide).answers["j-0003"].reason
    assert reason is not None and reason.values["job"] == "daemon/j-0001"
    kept = alice.ask("j-0001")
    assert (kept.reason, kept.spares) == (None, ()), "what waits for one of its hosts as well"
    assert "j-0001" not in alice.report({**short, "spares": ()}).answers
    bob.report(job(2, "b", state="RUNNING"))
    assert alice.ask("j-0001").spares == ("c",)


def test_a_job_that_waits_does_not_starve_behind_one_that_grows(world: World) -> None:
    alice, bob = world.user(ALICE), world.user(BOB)
    short = job(1, "a", "b", nodes=2, state="RUNNING", hosts=("a",), min_nodes=1)
    bob.report(job(2, "b", state="RUNNING"), job(3, "b"))
    assert "j-0001" not in alice.report(short).answers
    assert bob.hosts(job(3, "b")) == ("b",), "it waited for the host"
    assert "j-0001" not in alice.report(short).answers
    bob.report()
    assert alice.ask("j-0001").spares == ("b",)
    world.clock.now += 10
    alice.report({**short, "state": "STOPPING", "spares": ("b",)})
    late = job(4, "b", since_s=world.clock.now, created_at_s=world.clock.now)
    assert bob.hosts(late) == (), "while the job restarts to grow"
    alice.report(job(1, "a", "b", nodes=2, min_nodes=1, since_s=world.clock.now, before=("a",), has_run=True))
    found = alice.ask("j-0001").hosts, bob.ask("j-0004").hosts
    assert found == (("a",), ("b",)), "who has used less is first, and the other keeps its host"
