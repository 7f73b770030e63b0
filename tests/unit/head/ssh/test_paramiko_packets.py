"""Turns of the connections' threads: few handle data at a time, and a blocked one holds up no other."""

import itertools
import socket
import threading
import time

import pytest

from ascendrun.head.ssh import paramiko_packets
from ascendrun.head.ssh.paramiko_packets import Packetizer

CONNECTIONS, BYTES = 12, 50


class Connection:
    """A connection that calls `handle` in its own thread for every byte that it gets."""

    def __init__(self, handle):
        self._theirs, ours = socket.socketpair()
        ours.settimeout(1.0)
        self._packets, self._handle = Packetizer(ours), handle
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def get(self, data):
        self._theirs.sendall(data)

    def end(self):
        self._theirs.close()
        self.thread.join()

    def _run(self):
        try:
            while True:
                self._packets.read_all(1)
                self._handle()
        except EOFError:
            self._packets.end_turn()


@pytest.fixture(autouse=True)
def turns(monkeypatch):
    monkeypatch.setattr(paramiko_packets, "TURNS", itertools.cycle((threading.Lock(), threading.Lock())))


def test_two_connections_at_most_handle_what_they_got_at_a_time():
    busy, most, handled = set(), [], itertools.count(1)

    def handle():
        busy.add(threading.get_ident())
        most.append(len(busy))
        time.sleep(0.0005)  # lets another thread in, if it may
        busy.discard(threading.get_ident())
        next(handled)

    connections = [Connection(handle) for _ in range(CONNECTIONS)]
    for _, one in itertools.product(range(BYTES), connections):
        one.get(b"x")
    for one in connections:
        one.end()
    assert next(handled) == CONNECTIONS * BYTES + 1 and max(most) <= 2


def test_a_connection_that_waits_for_a_disk_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr(paramiko_packets, "PATIENCE_S", 0.01)
    is_written, are_stuck, is_there = threading.Event(), threading.Barrier(3), threading.Event()

    def wait_for_disk():
        are_stuck.wait(60)
        is_written.wait(60)

    stuck = [Connection(wait_for_disk) for _ in range(2)]
    for one in stuck:
        one.get(b"x")
    are_stuck.wait(60)  # both turns are taken
    other = Connection(is_there.set)
    other.get(b"x")
    assert is_there.wait(60)
    is_written.set()
    for one in (*stuck, other):
        one.end()
