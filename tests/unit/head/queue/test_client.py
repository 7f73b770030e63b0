"""Controllers of two state directories and one shared queue: small worlds whose nodes have no processes."""

from __future__ import annotations

import os
import pwd
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.core.errors import UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import Devices, JobSpec, Timeouts
from ascendrun.core.jobs.fair_share import Account, FairShare, SharePolicy, Usage
from ascendrun.core.jobs.inputs import StopRequested
from ascendrun.core.jobs.job import Job, Request, State
from ascendrun.core.jobs.restart import RestartPolicy
from ascendrun.core.machines import Closure, MachineState, QueueDrain
from ascendrun.head.loop.machine.share_use import known_here
from ascendrun.head.queue import client as clients
from ascendrun.head.queue.board import SETTLE_S, Board
from ascendrun.head.queue.client import QueueClient, SharedQueue
from ascendrun.head.queue.messages import QUEUE_NAME, DrainHosts, ListQueue
from ascendrun.head.queue.server import DRAINS_NAME, QueueServer
from ascendrun.query.host_views import MachineView, make_machine_views
from tests.lib.small_world import N1, N2, OTHER_NAME, World

ME = pwd.getpwuid(os.getuid()).pw_name


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Head(World):
    """A controller of this user that asks the queue. Nothing happens here but by `turn` and what its thread posts."""

    def __init__(self, folder: Path, shared: Path) -> None:
        folder.mkdir(mode=0o700)
        self.shared = shared
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        super().__init__(folder)

    def start(self) -> None:
        super().start()
        self.context.queue = SharedQueue(
            self.shared, self.store.head_id, self.calls.put, partial(known_here, self.folder)
        )

    def restart(self) -> None:
        self.context.close()
        super().restart()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Those answers that came before, each second while another head had its turn, do not count."""
        self.turn()
        for _ in range(20 + self.calls.qsize()):
            if is_so():
                return
            self.calls.get(timeout=60.0)()
            self.turn()
        raise AssertionError("not after 20 answers")

    def await_state(self, job: Job, state: State) -> None:
        self.until(lambda: self.now(job).state is state)

    def await_reason(self, job: Job, code: str) -> dict[str, Any]:
        self.until(lambda: self.now(job).reason.code == code)
        return dict(self.now(job).reason.values)


class Ending(QueueServer):
    """A server whose `close` is that of its process: no connection is served by it after that."""

    def __init__(self, *args: Any) -> None:
        self._peers: list[socket.socket] | None = []
        self._peers_lock = threading.Lock()
        super().__init__(*args)

    def take(self, peer: socket.socket, uid: int) -> None:
        with self._peers_lock:
            if self._peers is None:
                peer.close()
                return
            self._peers.append(peer)
        super().take(peer, uid)

    def close(self) -> None:
        super().close()
        with self._peers_lock:
            peers, self._peers = self._peers or [], None
        for peer in peers:
            with suppress(OSError):  # it has ended
                peer.shutdown(socket.SHUT_RDWR)


class Shared:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o755)
        self.start()

    def start(self) -> None:
        """Start a server that knows no job and awaits no other controllers."""
        self.start_to_settle()
        self.settle()

    def start_to_settle(self) -> None:
        """Start a server that grants nothing until all have reported: until `settle`."""
        self.clock = Clock()
        self.board = Board(FairShare(SharePolicy(), Usage()), self.clock, self.clock)
        self.board.report("first", "h", ())
        self.server = Ending(self.folder, self.board)
        self.server.start()

    def settle(self) -> None:
        self.clock.now += SETTLE_S

    def has_granted(self) -> bool:
        with self.server._lock:
            return any(one.hosts for session in self.board._sessions.values() for one in session.answers.values())


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    made = Shared(tmp_path / "queue")
    yield made
    made.server.close()


@pytest.fixture
def heads(shared: Shared, tmp_path: Path) -> Iterator[tuple[Head, Head]]:
    made = Head(tmp_path / "one", shared.folder), Head(tmp_path / "two", shared.folder)
    for head in made:
        head.up(N1, N2)
    yield made
    for head in made:
        head.context.close()
        head.store.close()


def test_no_connection_stays_with_a_server_that_was_closed(shared: Shared) -> None:
    with QueueClient(shared.folder) as client:
        client.call(ListQueue())
        shared.server.close()
        with pytest.raises(UnreachableError):
            client.call(ListQueue())


def test_two_controllers_use_a_host_one_after_the_other(heads: tuple[Head, Head]) -> None:
    one, two = heads
    first = one.job(N1)
    one.await_state(first, State.CHECKING)
    two.job(N2, held_by="me")  # else both have this id
    second = two.job(N1)
    reason = two.await_reason(second, "nodes-in-use")
    assert reason == {"job": f"{ME}/{first.id}", "name": "demo"} and two.now(second).hosts == ()
    one.jobs.steps.feed(first.id, StopRequested(now=True))
    one.await_state(first, State.STOPPED)
    two.await_state(second, State.CHECKING)
    assert two.now(second).hosts == ("n1",)


def test_jobs_that_wait_for_their_user_alone_are_not_in_the_queue(heads: tuple[Head, Head]) -> None:
    one, _ = heads
    held, large = one.job(N1, held_by="me"), one.job(N1, request=Request(2))
    behind = one.job(N1, needs=large.id, user="me")
    assert one.await_reason(held, "held-by-user") == {"user": "me"}
    assert one.await_reason(large, "too-few-hosts")["usable"] == 1, "decided here, and shown to all"
    one.await_reason(behind, "waiting-for-job")
    one.until(lambda: [row.job for row in QueueClient(one.shared).call(ListQueue()).rows] == [large.id])
    [row] = QueueClient(one.shared).call(ListQueue()).rows
    assert (row.user, row.state, row.nodes, row.reason and row.reason.code) == (ME, "QUEUED", 2, "too-few-hosts")
    assert not {"command", "env", "file", "run"} & set(vars(row))


def test_without_its_server_jobs_wait_with_the_fix_and_running_ones_continue(
    heads: tuple[Head, Head], shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = heads
    running = one.running(N1)
    one.until(lambda: bool(QueueClient(one.shared).call(ListQueue()).rows))
    shared.server.close()
    monkeypatch.setattr(clients, "FRESH_S", 0.0)
    waiting = two.job(N1)
    assert two.await_reason(waiting, "queue-away")["path"] == str(shared.folder)
    assert one.now(running).state is State.RUNNING
    monkeypatch.undo()
    shared.start_to_settle()
    one.until(lambda: running.id in [row.job for row in QueueClient(one.shared).call(ListQueue()).rows])
    shared.settle()
    assert two.await_reason(waiting, "nodes-in-use")["job"] == f"{ME}/{running.id}"


def test_a_job_that_waits_for_a_host_in_use_looks_at_the_others_of_its_pool(heads: tuple[Head, Head]) -> None:
    one, two = heads
    one.await_state(one.job(N1), State.CHECKING)
    new = Host("n3")
    second = two.job(N1, new, request=Request(1))
    two.until(lambda: two.find(new) is not None)  # it connects
    two.up(new)
    two.await_state(second, State.CHECKING)
    assert two.now(second).hosts == ("n3",)


def test_a_server_that_sends_what_is_no_frame_is_left_and_found_again(
    heads: tuple[Head, Head], shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = heads
    shared.server.close()
    monkeypatch.setattr(clients, "FRESH_S", 0.0)
    with socket.socket(socket.AF_UNIX) as broken:
        broken.bind(str(shared.folder / QUEUE_NAME))
        broken.listen()
        job = one.job(N1)
        one.turn()
        peer, _ = broken.accept()
        peer.sendall(b"\xff" * 64)
        one.await_reason(job, "queue-away")
        peer.close()
    monkeypatch.undo()
    shared.start()
    one.await_state(job, State.CHECKING)


def test_more_jobs_than_a_user_may_have_wait_here(heads: tuple[Head, Head], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = heads
    monkeypatch.setattr(clients, "JOBS", 1)
    first, second = one.job(N1, priority=1), one.job(N2)
    assert one.await_reason(second, "queue-full") == {"limit": 1}
    one.await_state(first, State.CHECKING)


def test_a_new_server_gets_what_ended_jobs_have_used(heads: tuple[Head, Head], shared: Shared) -> None:
    one, _ = heads
    life_s, now_s = shared.board.share.usage.half_life_s, time.time()
    times = {"started_at_s": now_s - life_s - 100.0, "ended_at_s": now_s - life_s}
    for project, devices in (("llm", Devices(type="cpu", per_node=4)), ("all", Devices(type="npu"))):
        spec = JobSpec(name="demo", command=("true",), devices=devices, labels={"project": project})
        host = Host("n1", slots=8)
        one.job(host, spec=spec, attempt=1, hosts=("n1",), world_size=1, state=State.SUCCEEDED, **times)
    waits = one.job(N1, request=Request(2))
    one.until(lambda: bool(shared.board.share.usage.at(0.0)))
    assert one.now(waits).state is State.QUEUED
    used = {account: round(seconds, 1) for account, seconds in shared.board.share.usage.at(0.0).items()}
    assert used == {Account(ME, "llm"): 4 * 100.0 / 2, Account(ME, "all"): 8 * 100.0 / 2}, "as it counts itself"


def drain(shared: Path, *hosts: Host, until_s: float | None = None, at_s: float | None = None, **more: Any) -> None:
    """An administrator drains hosts for all users; `until_s` 0: opens them. The server runs as this user."""
    closure = Closure(MachineState.DRAINED, "optics", "me", 0.0, until_s, starts_at_s=at_s, **more)
    with QueueClient(shared) as client:
        client.call(DrainHosts(tuple(QueueDrain.of(host, (), closure) for host in hosts)))


def why_of(head: Head, job: Job) -> Any:
    head.until(lambda: head.now(job).reason.code == "too-few-hosts" and head.now(job).reason.why is not None)
    return head.now(job).reason.why


def test_a_drain_of_an_administrator_closes_the_host_to_all_until_undrain(
    heads: tuple[Head, Head], shared: Shared
) -> None:
    one, two = heads
    running = one.job(N1)
    one.await_state(running, State.CHECKING)
    drain(shared.folder, N1, OTHER_NAME)
    waits = two.job(N1)
    why = why_of(two, waits)
    assert (why.key, why.values["by"], why.values["reason"]) == ("machine.drained", ME, "optics")
    assert one.now(running).state is State.CHECKING, "what has started continues"
    one.jobs.steps.feed(running.id, StopRequested(now=True))
    one.await_state(running, State.STOPPED)
    two.until(lambda: queued(shared.folder) == ["too-few-hosts"])
    two.turn()  # it stores what it learned
    shared.server.close()
    shared.start()
    two.restart()
    [machine] = views(two)
    assert (machine.names, machine.state, machine.by) == (("n1",), MachineState.DRAINED, ME)
    two.up(N1)
    two.until(lambda: len(drains_of(two)) == 2)
    assert two.now(waits).state is State.QUEUED
    drain(shared.folder, N1, until_s=0.0)
    two.await_state(waits, State.CHECKING)
    two.turn()
    assert views(two)[0].state is not MachineState.DRAINED


def queued(shared: Path) -> list[str | None]:
    """Why the jobs wait, as every user sees it."""
    rows = QueueClient(shared).call(ListQueue()).rows
    return [row.reason and row.reason.code for row in rows if row.state == "QUEUED"]


def drains_of(head: Head) -> tuple[QueueDrain, ...]:
    """What the server sent since the controller started."""
    return () if head.context.queue is None else head.context.queue.drains


def test_a_controller_without_jobs_learns_of_drains_and_hands_them_to_a_new_server(
    heads: tuple[Head, Head], shared: Shared
) -> None:
    one, _ = heads
    drain(shared.folder, N1)
    one.until(lambda: bool(drains_of(one)))
    one.turn()
    one.turn()
    shared.server.close()
    (shared.folder / DRAINS_NAME).unlink()
    shared.start()
    one.restart()  # a controller of the machine that took over
    assert views(one)[0].state is MachineState.DRAINED
    one.up(N1)
    one.until(lambda: bool(shared.board.drains))
    [found] = shared.board.drains
    assert (found.closure.by, found.closure.reason) == (ME, "optics") and "key-n1" in found.places


def test_only_a_head_with_a_standby_talks_to_the_queue_without_jobs(heads: tuple[Head, Head]) -> None:
    one, _ = heads
    one.until(lambda: not one.jobs)
    one.context.lease = HeldLease()  # type: ignore[assignment]
    assert one.jobs, "it learns of drains for its standby, whatever else it has to do"


class HeldLease:
    is_held = True


def views(head: Head) -> tuple[MachineView, ...]:
    return make_machine_views(head.store.machines.all(), (), (), now_s=time.time())


def test_a_grant_of_a_host_that_was_drained_since_is_not_used(heads: tuple[Head, Head], shared: Shared) -> None:
    one, _ = heads
    job, queue = one.job(N1), one.context.queue
    assert queue is not None
    one.turn()
    while not shared.has_granted():
        time.sleep(0.01)
    drain(shared.folder, N1)
    while not queue.drains:  # the reply repeats the grant
        one.calls.get(timeout=60.0)()
    assert why_of(one, job).key == "machine.drained" and one.now(job).hosts == ()


def test_a_planned_drain_of_an_administrator_survives_restarts_and_lets_short_jobs_start(
    heads: tuple[Head, Head], shared: Shared
) -> None:
    one, two = heads
    drain(shared.folder, N1, at_s=time.time() + 3600.0)
    long = two.job(N1)
    assert why_of(two, long).key == "machine.drain-planned"
    two.turn()
    shared.server.close()
    shared.start()
    two.restart()
    [machine] = views(two)
    assert machine.reason is not None and machine.reason.key == "machine.drain-planned"
    two.up(N1)
    two.until(lambda: bool(drains_of(two)))
    assert two.now(long).state is State.QUEUED
    reported = shared.board._sessions
    two.until(lambda: any(entry.unusable for session in reported.values() for entry in session.entries.values()))
    short = JobSpec(name="short", command=("true",), timeouts=Timeouts(run_s=60.0))
    one.await_state(one.job(N1, spec=short), State.CHECKING)


def test_jobs_that_may_restart_leave_a_host_that_an_administrator_drains_now(
    heads: tuple[Head, Head], shared: Shared
) -> None:
    one, _ = heads
    moves = one.running(N1, policy=RestartPolicy(max_restarts=1))
    stays = one.running(N2, policy=RestartPolicy(max_restarts=0))
    one.until(lambda: len(QueueClient(shared.folder).call(ListQueue()).rows) == 2)
    drain(shared.folder, N1, N2, moves=True)
    one.await_state(moves, State.STOPPING)
    assert one.now(stays).state is State.RUNNING
