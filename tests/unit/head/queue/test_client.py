"""Controllers of two state directories and one shared queue: small worlds whose nodes have no processes."""

from __future__ import annotations

import os
import pwd
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobs.fair_share import FairShare, SharePolicy, Usage
from ascendrun.core.jobs.job import Job, Request, State
from ascendrun.head.loop.operations import Operations
from ascendrun.head.loop.requests import Requests
from ascendrun.head.queue import client as clients
from ascendrun.head.queue.board import SETTLE_S, Board
from ascendrun.head.queue.client import QueueClient, SharedQueue
from ascendrun.head.queue.messages import QUEUE_NAME, ListQueue, StopOther
from ascendrun.head.queue.server import QueueServer
from tests.lib.small_world import N1, N2, World

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
        links: Any = self
        requests = Requests(self.context, self.jobs, Operations(links), heal=lambda: None)
        self.context.queue = SharedQueue(self.shared, self.store.head_id, self.calls.put, requests.stop_ordered)

    def until(self, is_so: Callable[[], bool]) -> None:
        self.turn()
        for _ in range(20):
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


class Shared:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o755)
        self.start()

    def start(self) -> None:
        clock = Clock()
        self.server = QueueServer(self.folder, Board(FairShare(SharePolicy(), Usage()), clock, clock))
        clock.now += SETTLE_S
        self.server.start()


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


def test_two_controllers_use_a_host_one_after_the_other(heads: tuple[Head, Head]) -> None:
    one, two = heads
    first = one.job(N1)
    one.await_state(first, State.CHECKING)
    two.job(N2, held_by="me")  # else two controllers of one user have a job of this id
    second = two.job(N1)
    reason = two.await_reason(second, "nodes-in-use")
    assert reason == {"job": f"{ME}/{first.id}", "name": "demo"} and two.now(second).hosts == ()
    with ThreadPoolExecutor(1) as pool:
        stop = pool.submit(QueueClient(one.shared).call, StopOther(ME, first.id, now=True))
        one.await_state(first, State.STOPPED)
        stop.result()
    assert one.now(first).reason.values["by"].partition("@")[0] == ME
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
    for head in heads:
        head.context.close()  # the kernel does not end what was accepted
        head.context.queue = SharedQueue(shared.folder, head.store.head_id, head.calls.put, lambda order: None)
        vars(head.jobs).pop("placement", None)
    monkeypatch.setattr(clients, "FRESH_S", 0.0)
    waiting = two.job(N1)
    assert two.await_reason(waiting, "queue-away")["path"] == str(shared.folder)
    assert one.now(running).state is State.RUNNING
    monkeypatch.undo()
    shared.start()
    one.until(lambda: bool(QueueClient(one.shared).call(ListQueue()).rows))
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
