"""A faulty cable: a process between a host's cable and the bridge, and delays, drops or slows frames.

    host eth0 ── vcK ══ this process ══ vrK ── vsK ── bridge

In user space because many kernels lack netem. Packet sockets with virtio headers, so that the kernel's offloads
(64 KiB frames, checksums left open) pass through as they are. Started as `python -I -S relay.py INDEX DELAY_S
LOSS RATE`: seconds, a share from 0 to 1, bytes a second (0: no limit). Standard library only.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import socket
import sys
import time

SOL_PACKET, PACKET_IGNORE_OUTGOING, PACKET_VNET_HDR = 263, 23, 15
_EVERY_PROTOCOL = 3
_LARGEST = 70000
_QUEUE_BYTES = 4 << 20
"""What a slow cable holds before it drops, as a switch port does."""


def open_end(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _QUEUE_BYTES)
    end.bind((interface, _EVERY_PROTOCOL))
    end.setblocking(False)
    return end


class Direction:
    """Frames that travel one way: when each may leave, by rate first and delay after."""

    def __init__(self, target: socket.socket, delay_s: float, loss: float, rate: float) -> None:
        self._target = target
        self._delay_s, self._loss, self._rate = delay_s, loss, rate
        self._wire_free_at = 0.0
        self._waiting: list[tuple[float, int, bytes]] = []
        self._count = 0
        self._chance = random.Random()

    def take(self, frame: bytes, now: float) -> None:
        if self._chance.random() < self._loss:
            return
        at = now
        if self._rate:
            if (self._wire_free_at - now) * self._rate > _QUEUE_BYTES / 16:
                return
            self._wire_free_at = at = max(now, self._wire_free_at) + len(frame) / self._rate
        self._count += 1
        heapq.heappush(self._waiting, (at + self._delay_s, self._count, frame))

    def send_due(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            try:
                self._target.send(heapq.heappop(self._waiting)[2])
            except OSError:
                continue  # the cable is down or its buffer full: a frame is lost, as on a real one

    def next_at(self) -> float:
        return self._waiting[0][0] if self._waiting else float("inf")


def relay(host_end: socket.socket, bridge_end: socket.socket, quality: tuple[float, float, float]) -> None:
    ways = {host_end: Direction(bridge_end, *quality), bridge_end: Direction(host_end, *quality)}
    while True:
        now = time.monotonic()
        for way in ways.values():
            way.send_due(now)
        next_at = min(way.next_at() for way in ways.values())
        wait_s = None if next_at == float("inf") else max(0.0, next_at - time.monotonic())
        readable, _, _ = select.select(list(ways), [], [], wait_s)
        for end in readable:
            _take_all(end, ways[end])


def _take_all(end: socket.socket, way: Direction) -> None:
    while True:
        try:
            frame = end.recv(_LARGEST)
        except BlockingIOError:
            return
        except OSError:
            time.sleep(0.01)  # the interface is down for now
            return
        way.take(frame, time.monotonic())


def main(argv: list[str]) -> None:
    index = int(argv[0])
    delay_s, loss, rate = (float(text) for text in argv[1:4])
    ends = open_end(f"vc{index}"), open_end(f"vr{index}")
    os.write(1, b"!")
    os.close(1)
    relay(*ends, (delay_s, loss, rate))


if __name__ == "__main__":
    main(sys.argv[1:])
