"""Connections that share threads: a bad one holds up no other, and each ends as if it had a thread of its own."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from sshd import Ear, known_name, record_host_keys

from ascendrun.core.errors import DeadlineExceededError
from ascendrun.head.ssh.hub import HUBS
from ascendrun.head.ssh.transport import Connection, Receiver, StreamClosedError
from tests.lib.vcluster.processes import await_that

MIB = 1 << 20
OTHERS = 20
CIPHERS = {
    "gcm": (),
    "ctr, length in clear": ("Ciphers aes128-ctr", "MACs hmac-sha2-256-etm@openssh.com"),
    "ctr, length encrypted": ("Ciphers aes128-ctr", "MACs hmac-sha2-256"),
}


class Cable:
    """A relay to a server that can hold back what the server sends, and be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.may_pass: int | None = None
        """Bytes of the server that still pass; None: all."""
        self.can_send, self.is_held = threading.Event(), threading.Event()
        self.can_send.set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._ours, _ = self._server.accept()
        self._theirs = socket.create_connection(("127.0.0.1", self._to))
        for one in (self._up, self._down):
            self._threads.append(threading.Thread(target=one, daemon=True))
            self._threads[-1].start()

    def _up(self) -> None:
        with suppress(OSError):  # closed
            while self.can_send.wait() and (data := self._ours.recv(65536)):
                self._theirs.sendall(data)

    def _down(self) -> None:
        with suppress(OSError):  # closed
            while data := self._theirs.recv(65536):
                if self.may_pass is not None:
                    data, self.may_pass = data[: self.may_pass], max(0, self.may_pass - len(data))
                self._ours.sendall(data)
                if self.may_pass == 0:
                    self.is_held.set()

    def inject(self, data: bytes) -> None:
        """Pass on bytes that the server did not send."""
        self._ours.sendall(data)

    def cut(self, *, abruptly: bool) -> None:
        """End it. `abruptly`: with a reset."""
        if not abruptly:
            self._ours.shutdown(socket.SHUT_WR)
            return
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._ours.shutdown(socket.SHUT_RD)  # wakes the thread that reads
        self._ours.close()

    def close(self) -> None:
        self.can_send.set()
        for one in (self._ours, self._theirs):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._server.close()
        for thread in self._threads:
            thread.join()


class World:
    """A server, connections to it, and one behind a cable."""

    def __init__(self, lab: Any, stack: ExitStack, options: tuple[str, ...] = ()) -> None:
        self.server = lab.server(options=options)
        self._backends, self._lab, self._stack = lab.backends("paramiko"), lab, stack

    def connect(self, port: int | None = None) -> Connection:
        host = self.server.host()
        host = host if port is None else type(host)(host.name, addr=host.addr, port=port, user=host.user)
        connection: Connection = self._backends.connect(host)
        self._stack.callback(connection.close)
        return connection

    def behind_cable(self) -> tuple[Connection, Cable]:
        cable = Cable(self.server.port)
        self._stack.callback(cable.close)
        record_host_keys(self._lab.own_known_hosts, [(known_name("127.0.0.1", cable.port), self.server.host_key)])
        return self.connect(cable.port), cable

    def serves(self, connections: list[Connection]) -> None:
        ears = [Ear() for _ in connections]
        for connection, ear in zip(connections, ears):
            connection.open("echo fine", ear.receiver(), deadline_s=60.0)
        for ear in ears:
            assert ear.wait()[1] == 0 and ear.output == b"fine\n"


@pytest.fixture
def world(lab: Any) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(lab, stack)


def running(connection: Connection, command: str = "echo on; exec sleep 60") -> Ear:
    """A command that has begun, and now rests."""
    ear = Ear()
    connection.open(command, ear.receiver(), deadline_s=60.0)
    await_that(lambda: ear.output, "it runs")
    return ear


def test_half_a_packet_and_then_silence_holds_up_no_other_connection(world: World) -> None:
    connection, cable = world.behind_cable()
    others = [world.connect() for _ in range(OTHERS)]
    ear = Ear()
    stream = connection.open("echo on; exec cat", ear.receiver(), deadline_s=60.0)
    await_that(lambda: ear.output == b"on\n", "it runs")
    cable.may_pass = 1000
    stream.send(os.urandom(MIB // 4), deadline_s=60.0)
    assert cable.is_held.wait(60)
    world.serves(others)
    connection.close()
    assert ear.wait()[1] is None


def test_a_receiver_that_waits_for_a_disk_holds_up_no_other_connection(world: World) -> None:
    stuck, others = [world.connect() for _ in range(3)], [world.connect() for _ in range(OTHERS)]
    is_written, are_stuck = threading.Event(), threading.Barrier(len(stuck) + 1)
    closed = [threading.Event() for _ in stuck]

    def wait(data: bytes) -> None:
        are_stuck.wait(60)
        is_written.wait(60)

    for connection, event in zip(stuck, closed):
        end = event.set
        receiver = Receiver(wait, wait, lambda reason, status, end=end: end())  # type: ignore[misc]
        connection.open("echo one", receiver, deadline_s=60.0)
    are_stuck.wait(60)
    world.serves(others)
    is_written.set()
    assert all(event.wait(60) for event in closed)


def test_a_host_that_does_not_read_holds_up_no_other_connection(world: World) -> None:
    connection, cable = world.behind_cable()
    others = [world.connect() for _ in range(OTHERS)]
    ear = Ear()
    stream = connection.open("while :; do echo more; done & exec cat >/dev/null", ear.receiver(), deadline_s=60.0)
    await_that(lambda: len(ear.output) > 1000, "it runs")
    cable.can_send.clear()
    with pytest.raises((DeadlineExceededError, StreamClosedError)):
        for _ in range(1000):
            stream.send(bytes(MIB), deadline_s=0.5)
    world.serves(others)
    connection.close()
    ear.wait()


@pytest.mark.parametrize("abruptly", [False, True])
def test_a_connection_that_is_cut_while_it_rests_ends_and_no_other_does(world: World, abruptly: bool) -> None:
    connection, cable = world.behind_cable()
    others = [world.connect() for _ in range(3)]
    ear = running(connection)
    cable.cut(abruptly=abruptly)
    reason, status = ear.wait()
    assert status is None and ("reset" in str(reason)) == abruptly
    with pytest.raises(StreamClosedError):
        connection.open("true", Ear().receiver(), deadline_s=60.0)
    world.serves(others)


@pytest.mark.parametrize("data", [b"\xff" * 64, bytes(64), b"\0\0\0\x20" + bytes(64)], ids=["long", "empty", "forged"])
def test_a_connection_with_damaged_packets_ends_and_no_other_does(world: World, data: bytes) -> None:
    connection, cable = world.behind_cable()
    others = [world.connect() for _ in range(3)]
    ear = running(connection)
    cable.inject(data)
    reason, status = ear.wait()
    assert status is None and "failed" in str(reason)
    world.serves(others)


def test_a_connection_closed_by_another_thread_while_it_rests_ends_at_once(world: World) -> None:
    connection, other = world.connect(), world.connect()
    ear = running(connection)
    connection.close()
    reason, status = ear.wait()
    assert str(reason) == "closed by this side" and status is None
    world.serves([other])


def test_connections_closed_together_report_their_ends_once_each(world: World) -> None:
    connections = [world.connect() for _ in range(OTHERS)]
    ears = [running(connection) for connection in connections]
    for connection in connections:
        connection.close()
    for ear in ears:
        assert ear.wait()[1] is None


def test_resting_connections_share_a_few_threads(world: World) -> None:
    before = threading.active_count()
    connections = [world.connect() for _ in range(OTHERS)]
    world.serves(connections)
    await_that(lambda: threading.active_count() - before == 2 * HUBS, "the threads of the logins end")


@pytest.mark.parametrize("options", list(CIPHERS.values()), ids=list(CIPHERS))
def test_every_byte_arrives_with_each_kind_of_cipher(lab: Any, options: tuple[str, ...]) -> None:
    with ExitStack() as stack:
        world = World(lab, stack, options)
        connections = [world.connect() for _ in range(3)]
        payloads, ears = [os.urandom(2 * MIB) for _ in connections], [Ear() for _ in connections]

        def send(number: int) -> None:
            stream = connections[number].open("exec cat", ears[number].receiver(), deadline_s=60.0)
            stream.send(payloads[number], deadline_s=60.0)
            stream.close_input()

        senders = [threading.Thread(target=send, args=(number,)) for number in range(len(connections))]
        for one in senders:
            one.start()
        for one in senders:
            one.join()
        for ear, payload in zip(ears, payloads):
            assert ear.wait()[1] == 0 and ear.output == payload
