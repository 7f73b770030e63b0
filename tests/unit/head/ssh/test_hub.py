"""Connections that share threads: one that blocks holds up no other, and each is served by one thread at a time."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Callable

import pytest

from ascendrun.head.ssh import hub as hub_module
from ascendrun.head.ssh.hub import Hub, next_hub
from tests.lib.vcluster.processes import await_that

PATIENCE_S = 60.0


class Connection:
    """One end in a hub, which calls `handle` with what it got; the other end here."""

    def __init__(self, hub: Hub, handle: Callable[[Connection], None] = lambda one: None) -> None:
        self._theirs, self._ours = socket.socketpair()
        self._ours.setblocking(False)
        self._handle, self._is_busy = handle, threading.Lock()
        self.got, self.faults, self.ends = bytearray(), 0, 0
        self.has_ended = threading.Event()
        hub.add(self)

    def fileno(self) -> int:
        return self._ours.fileno()

    def serve(self) -> bool:
        if not self._is_busy.acquire(blocking=False):
            self.faults += 1
            return True
        try:
            data = self._ours.recv(1000)
        except BlockingIOError:
            return True
        else:
            self.got += data
            self._handle(self)
            return bool(data)
        finally:
            self._is_busy.release()

    def end(self) -> None:
        self.ends += 1
        self._ours.close()
        self.has_ended.set()

    def get(self, data: bytes) -> None:
        self._theirs.sendall(data)

    def close(self) -> None:
        self._theirs.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    before = set(threading.enumerate())
    yield Hub()
    await_that(lambda: set(threading.enumerate()) <= before, "its threads end")


@pytest.fixture
def hasty() -> Iterator[None]:
    was, stuck_s = sys.getswitchinterval(), hub_module.STUCK_S
    sys.setswitchinterval(1e-6)
    hub_module.STUCK_S = 0.001
    yield
    sys.setswitchinterval(was)
    hub_module.STUCK_S = stuck_s


def close(*connections: Connection) -> None:
    for one in connections:
        one.close()
    for one in connections:
        assert one.has_ended.wait(PATIENCE_S)
        assert one.ends == 1 and not one.faults


def answers(*connections: Connection) -> None:
    """Each connection is served now."""
    for one in connections:
        one.get(b"x")
    await_that(lambda: all(one.got for one in connections), "all are served")


def test_many_resting_connections_have_two_threads(hub: Hub) -> None:
    before = set(threading.enumerate())
    connections = [Connection(hub) for _ in range(200)]
    answers(*connections)
    await_that(lambda: len(set(threading.enumerate()) - before) == 2, "a thread that was late has ended")
    close(*connections)


def test_a_receiver_that_waits_for_a_disk_holds_up_no_other(hub: Hub) -> None:
    are_stuck, is_written = threading.Barrier(4), threading.Event()

    def wait(one: Connection) -> None:
        if one.got == b"x":
            are_stuck.wait(PATIENCE_S)
            is_written.wait(PATIENCE_S)

    stuck = [Connection(hub, wait) for _ in range(3)]
    for one in stuck:
        one.get(b"x")
    are_stuck.wait(PATIENCE_S)
    others = [Connection(hub) for _ in range(50)]
    answers(*others)
    for one in stuck:
        one.get(b"y")
    is_written.set()
    await_that(lambda: all(one.got == b"xy" for one in stuck), "what came meanwhile is served too")
    close(*stuck, *others)


def test_a_thread_that_has_to_wait_steps_aside_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "STUCK_S", 3600.0)
    is_there = threading.Event()

    def wait(one: Connection) -> None:
        if one.got == b"x":
            hub.step_aside()
            hub.step_aside()
            is_there.wait(PATIENCE_S)

    waiting = Connection(hub, wait)
    waiting.get(b"x")
    others = [Connection(hub) for _ in range(50)]
    answers(*others)
    hub.step_aside()  # not in a thread that serves: nothing happens
    waiting.get(b"y")
    is_there.set()
    await_that(lambda: waiting.got == b"xy", "it is served again")
    close(waiting, *others)


def test_connections_that_end_together_end_once_each(hub: Hub) -> None:
    connections = [Connection(hub) for _ in range(300)]
    stays = Connection(hub)
    close(*connections)
    answers(stays)
    close(stays)


def test_the_end_of_a_connection_may_wait_too(hub: Hub) -> None:
    may_end, others = threading.Event(), [Connection(hub) for _ in range(3)]
    late = Connection(hub)
    ended = late.end

    def end() -> None:
        ended()
        may_end.wait(PATIENCE_S)

    late.end = end  # type: ignore[method-assign]
    late.close()
    assert late.has_ended.wait(PATIENCE_S)
    others.append(Connection(hub))  # has its number
    answers(*others)
    may_end.set()
    close(late, *others)


def test_a_hub_without_connections_has_no_thread_and_serves_the_next_one(hub: Hub) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        one = Connection(hub)
        answers(one)
        close(one)
    await_that(lambda: set(threading.enumerate()) <= before, "its threads end")
    one = Connection(hub)
    answers(one)
    close(one)


@pytest.mark.usefixtures("hasty")
def test_every_byte_is_served_once_and_in_order_while_threads_change(hub: Hub) -> None:
    chance = random.Random(1)

    def handle(one: Connection) -> None:
        if chance.random() < 0.1:
            hub.step_aside()
        elif chance.random() < 0.05:
            threading.Event().wait(0.005)  # the thread in reserve takes over

    connections = [Connection(hub, handle) for _ in range(20)]
    for number in range(100):
        for one in connections:
            one.get(b"%d " % number)
    expected = b"".join(b"%d " % number for number in range(100))
    await_that(lambda: all(one.got == expected for one in connections), "all bytes are served")
    close(*connections)


def test_a_child_after_a_fork_serves_its_connections_with_threads_of_its_own(hub: Hub) -> None:
    ours = Connection(next_hub())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            theirs = Connection(next_hub())
            theirs.get(b"x")
            theirs.close()
            code = 0 if theirs.has_ended.wait(PATIENCE_S) and theirs.got == b"x" else 1
        finally:
            os._exit(code)  # else the child would run the tests that follow
    assert os.waitpid(child, 0)[1] == 0
    answers(ours)
    close(ours)
