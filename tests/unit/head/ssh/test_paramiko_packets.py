"""A thread that serves many connections sends what there is room for, and steps aside before it waits."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from ascendrun.head.ssh.paramiko_packets import Packetizer, QuickAckSocket

BIG = bytes(16 << 20)


@pytest.fixture
def ends() -> Iterator[tuple[Packetizer, socket.socket]]:
    """Packets of one end of a connection, and the other end."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            yield Packetizer(QuickAckSocket(ours)), theirs


def test_what_there_is_room_for_is_sent_without_stepping_aside(ends: tuple[Packetizer, socket.socket]) -> None:
    packets, theirs = ends
    waits: list[str] = []
    packets.on_wait = lambda: waits.append("wait")
    packets.write_all(b"reply")
    assert theirs.recv(100) == b"reply" and not waits


def test_a_thread_steps_aside_while_its_host_does_not_read(ends: tuple[Packetizer, socket.socket]) -> None:
    packets, theirs = ends
    must_wait = threading.Event()
    packets.on_wait = must_wait.set
    sender = threading.Thread(target=packets.write_all, args=(BIG,), daemon=True)
    sender.start()
    assert must_wait.wait(60)
    got = 0
    while got < len(BIG):
        got += len(theirs.recv(1 << 20))
    sender.join(60)
    assert not sender.is_alive()


def test_what_has_not_arrived_is_not_awaited(ends: tuple[Packetizer, socket.socket]) -> None:
    packets, theirs = ends
    assert not packets.read_now() and not packets.has_packet()
    theirs.close()
    with pytest.raises(EOFError):
        while not packets.read_now():
            pass


def test_bytes_that_were_handed_out_are_not_kept(ends: tuple[Packetizer, socket.socket]) -> None:
    packetizer, theirs = ends
    tracemalloc.start()
    try:
        for sizes in ([8, 50_000, 49_992], [100_000]):
            theirs.sendall(b"x" * 100_000)
            assert [len(packetizer.read_all(size)) for size in sizes] == sizes
        traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/paramiko_packets.py")])
    finally:
        tracemalloc.stop()
    assert sum(one.size for one in traces.statistics("filename")) < 10_000
