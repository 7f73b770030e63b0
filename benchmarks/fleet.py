"""A thousand simulated agents behind one real SSH server: python -m benchmarks.fleet FOLDER NODES

Each node has its own address of 127.0.0.0/8, logins, channels and frames as a host has them. What agents reply is
recorded: the agent's own code makes the first survey, hello and sample, with the simulated tools of eight NPUs, and all
nodes repeat them with their own name and time (`recorder.py`). As in the agent, the frames of one moment are one write.
Orders come as JSON lines on standard input; each has a JSON line as reply.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import asyncssh

from ascendrun.node import wire
from benchmarks.recorder import Recorder
from benchmarks.simulated_node import METRICS_S, TURN_S, Node

ONCE = b"\nASCENDRUN-ONCE\n"
TOOL_TURNS = 5
"""Turns that a tool takes."""


def address(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


class Session(asyncssh.SSHServerSession[bytes]):
    """One command of a login: the agent, or one that the login runs by itself."""

    def __init__(self, node: Node) -> None:
        self._node, self._reader = node, wire.FrameReader()
        self.channel: Any = None
        self.can_write = asyncio.Event()
        self.can_write.set()

    def connection_made(self, chan: Any) -> None:
        self.channel = chan

    def exec_requested(self, command: str) -> bool:
        self._is_agent = "ASCENDRUN-ONCE" not in command
        return True

    def session_started(self) -> None:
        self.channel.set_encoding(None)
        if self._is_agent:
            self._node.session, self._node.is_followed, self._node.outbox = self, False, []
            self._node.beat_s = wire.BEAT_S
            self.channel.write(wire.MAGIC + wire.pack(self._node.hello()))

    def data_received(self, data: Any, datatype: Any) -> None:
        if not self._is_agent or self._node.is_lost:
            return
        for header, _ in self._reader.feed(data):
            if header.get("op") == "bye":
                self.channel.close()
                return
            self._node.beat_s = header.get("beat_s", self._node.beat_s)
            self._node.send({"re": header["id"], "ok": True, **self._node.reply(header)})

    def eof_received(self) -> bool:
        if not self._is_agent:
            self.channel.write(ONCE)
            self.channel.exit(0)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.can_write.set()
        if self._node.session is self:
            self._node.session = None
            self._node.losses += 1

    def pause_writing(self) -> None:
        self.can_write.clear()

    def resume_writing(self) -> None:
        self.can_write.set()


class Server(asyncssh.SSHServer):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def connection_made(self, conn: Any) -> None:
        third, fourth = conn.get_extra_info("sockname")[0].split(".")[2:]
        self._node = self._fleet.nodes[int(third) * 250 + int(fourth) - 1]
        self._node.connection = conn
        if self._node.is_lost:
            conn.abort()

    def session_requested(self) -> Session:
        return Session(self._node)


class Fleet:
    """All nodes, and their work in slices of TURN_S."""

    def __init__(self, folder: Path, count: int) -> None:
        self.recorder = Recorder(folder)
        self.nodes = [Node(f"n{number:04d}", self.recorder) for number in range(count)]

    async def work(self) -> None:
        turn = 0
        while True:
            began = time.monotonic()
            for number, node in enumerate(self.nodes):
                try:
                    self._work(node, turn + number, began)
                except Exception:
                    traceback.print_exc()
            turn += 1
            await asyncio.sleep(max(0.001, TURN_S - (time.monotonic() - began)))

    def _work(self, node: Node, turn: int, now: float) -> None:
        if node.session is None or node.is_lost:
            return
        if node.phase == "running" and node.is_followed:
            number, place = divmod(turn, round((node.sampling.get("every_s") or 5.0) / TURN_S))
            if place == 0:
                node.sample_host(time.time_ns())
            elif place == TOOL_TURNS:
                node.sample_tools(time.time_ns(), number)
            if turn % round(METRICS_S / TURN_S) == 0:
                node.report()
        beat_s = node.beat_s if node.is_followed else wire.RESTING_BEAT_S
        if now - node.sent_mono >= min(node.next_s, beat_s):
            node.next_s = beat_s
            node.send({"event": "beat", "rests": node.next_s > wire.MOST_BEAT_S})

    def ready(self) -> list[Node]:
        return [node for node in self.nodes if node.phase == "running" and node.is_followed]

    # Orders

    async def lose(self, count: int) -> None:
        """These nodes are silent from now on; who connects again is refused."""
        for node in self.ready()[-count:]:
            node.is_lost = True

    async def find(self) -> None:
        for node in self.nodes:
            if node.is_lost:
                node.is_lost = False
                node.connection.abort()

    async def lines(self, hosts: int, per_s: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            for node in self.ready()[:hosts]:
                node.out(round(per_s * TURN_S))
                node.step += round(per_s * TURN_S)
            await asyncio.sleep(max(0.001, TURN_S - (time.monotonic() - began)))

    async def bulk(self, hosts: int, mb: int) -> int:
        """Return how many bytes were sent."""
        piece = (b"x" * 99 + b"\n") * 655
        count, nodes = mb * 1_000_000 // len(piece), self.ready()[:hosts]

        async def send(node: Node) -> None:
            for _ in range(count):
                await node.room()
                node.append(f"rank-{node.ranks[0]}.out", piece)

        await asyncio.gather(*map(send, nodes))
        return len(nodes) * count * len(piece)

    async def past(self, since_s: float, length_s: float, seconds: float) -> dict[str, int]:
        """All nodes of jobs send in these seconds, or later where the head takes no more, what they report in
        `length_s`, from another time on; return how many samples of hosts that were, and connections lost so far."""
        pace, at_s, sent = length_s / seconds, 0.0, 0
        while at_s < length_s:
            began = time.monotonic()
            for number, node in enumerate(self.nodes):
                if node.phase == "running" and node.is_followed and node.session is not None:
                    await node.session.can_write.wait()
                    sent += self._report_past(node, since_s + at_s + number * TURN_S, pace * TURN_S, number * TURN_S)
            at_s += pace * TURN_S
            await asyncio.sleep(max(0.001, TURN_S - (time.monotonic() - began)))
        return {"samples": sent, "lost": sum(node.losses for node in self.nodes)}

    def _report_past(self, node: Node, phase_s: float, step_s: float, ahead_s: float) -> int:
        """Send what is due until `step_s` later; return the samples of the host. `ahead_s`: of the node's own turn."""

        def is_due(every_s: float) -> bool:
            return phase_s // every_s != (phase_s + step_s) // every_s

        every_s, at_ns = node.sampling.get("every_s") or 5.0, int((phase_s - ahead_s) * 1e9)
        is_sample = is_due(every_s)
        if is_sample:
            node.sample_host(at_ns)
            node.sample_tools(at_ns, int(phase_s // every_s))
        if is_due(METRICS_S):
            node.report()
        if is_due(node.beat_s):
            node.send({"event": "beat", "rests": False})
        return int(is_sample)


async def main(folder: Path, count: int) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    fleet = Fleet(Path(tempfile.mkdtemp(dir=folder)), count)
    listener = await asyncssh.listen(
        "0.0.0.0",
        0,
        server_factory=lambda: Server(fleet),
        server_host_keys=[key],
        authorized_client_keys=str(folder / ".ssh" / "id_ed25519.pub"),
        encoding=None,
        line_editor=False,
        backlog=1000,
        login_timeout=300,
    )
    public = key.export_public_key().decode().strip()
    print(json.dumps({"port": listener.get_port(), "key": public}), flush=True)
    worker = asyncio.ensure_future(fleet.work())
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        result = await getattr(fleet, order.pop("do"))(**order)
        lost = [node.name for node in fleet.nodes if node.is_lost]
        print(json.dumps({"result": result, "lost": lost}), flush=True)
    worker.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
