"""A thousand simulated agents behind one real SSH server: python -m benchmarks.fleet FOLDER NODES

Each node has its own address of 127.0.0.0/8, logins, channels and frames as a host has them. What agents reply is
recorded: the agent's own code makes the first survey, hello and sample, with the simulated tools of eight NPUs, and all
nodes repeat them with their own name and time (`recorder.py`). As in the agent, the frames of one moment are one write.
Orders come as JSON lines on standard input; each has a JSON line as reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncssh

from ascendrun.node import wire
from ascendrun.node.agent.follow import CHUNK_BYTES
from ascendrun.node.supervisor.spool import TIMES
from benchmarks.recorder import Recorder

TURN_S = 0.1
METRICS_S = 10.0
KEPT_BYTES = 1 << 20
"""Of each file, at least; a node has all of it, and a head that is late by minutes follows it again from before."""
ONCE = b"\nASCENDRUN-ONCE\n"
TOOL_TURNS = 5
"""Turns that a tool takes."""


def address(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


class Stream:
    """The end of a growing file."""

    def __init__(self) -> None:
        self.start, self.data = 0, bytearray()

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def append(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > 2 * KEPT_BYTES:
            self.start = self.end - KEPT_BYTES
            del self.data[:-KEPT_BYTES]


class Node:
    """One host: its attempt, the files of it, and the session of its agent."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self._recorder = name, recorder
        self.session: Session | None = None
        self.connection: Any = None
        self.is_lost = False
        self.tag = ""
        self.phase: str | None = None
        self.ranks: list[int] = []
        self.sampling: dict[str, Any] = {}
        self.streams: dict[str, Stream] = {}
        self.is_followed = False
        self.window, self.sampled = (0, 0), 0
        """Of samples: bytes that may be sent beyond an offset; the offset that is sent next."""
        self.step = self.seq = 0
        self.sent_mono, self.next_s, self.beat_s = 0.0, wire.BEAT_S, wire.BEAT_S
        self.outbox: list[bytes] = []
        self.losses = 0
        """Connections that ended."""

    def hello(self) -> dict[str, Any]:
        mine = {
            "hostname": self.name,
            "boot_id": f"boot-{self.name}",
            "machine_id": self.name,
            "machine_key": self.name,
        }
        live = [self.tag] if self.phase in ("prepared", "running") else []
        return {
            **self._recorder.hello,
            **mine,
            "incarnation": self.name,
            "net_ns": None,
            "neighbours": [],
            "live": live,
        }

    async def room(self) -> None:
        """Return when there is a connection that takes more; the head may be about to make another."""
        while self.session is None:
            await asyncio.sleep(TURN_S)
        await self.session.can_write.wait()

    def append(self, file: str, data: bytes) -> None:
        """Append to a file; its followers get it."""
        stream = self.streams.setdefault(file, Stream())
        at = stream.end
        stream.append(data)
        if self.is_followed and file == "samples":
            self.send_samples()
        elif self.is_followed:
            self.send({"event": "data", "tag": self.tag, "file": file, "generation": 0, "offset": at}, data)

    def send_samples(self) -> None:
        """Send as many as the head permits."""
        stream = self.streams.get("samples", Stream())
        self.sampled = max(self.sampled, stream.start)
        end = min(stream.end, sum(self.window))
        for at in range(self.sampled, end, CHUNK_BYTES):
            header = {"event": "data", "tag": self.tag, "file": "samples", "generation": 0, "offset": at}
            self.sampled = min(end, at + CHUNK_BYTES)
            self.send(header, bytes(stream.data[at - stream.start : self.sampled - stream.start]))

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        if self.session is not None and not self.is_lost:
            if not self.outbox:
                asyncio.get_running_loop().call_soon(self._flush)
            self.outbox.append(wire.pack(header, body))

    def _flush(self) -> None:
        frames, self.outbox = b"".join(self.outbox), []
        if self.session is not None and frames:
            self.sent_mono = time.monotonic()
            with contextlib.suppress(OSError):  # the channel has been closed
                self.session.channel.write(frames)

    def record(self, event: str, **fields: Any) -> None:
        self.seq += 1
        line = {"seq": self.seq, "at_ns": time.time_ns(), "event": event, **fields}
        self.append("events", json.dumps(line).encode() + b"\n")

    def out(self, lines: int) -> None:
        """The first rank prints."""
        now, name = time.time_ns(), f"rank-{self.ranks[0]}.out"
        text = b"".join(b"step %d of 100000 loss 2.345 lr 1.5e-05\n" % (self.step + i) for i in range(lines))
        self.append(name, text)
        self.append(name + ".times", TIMES.pack(self.streams[name].end, now))

    def sample_host(self, at_ns: int) -> None:
        """The host and its ranks."""
        line = next(one for one in self._recorder.sample(self.sampling["items"]) if "host" in one)
        ranks = [{"rank": rank, "pid": 1000 + rank, "device": i, "cpu": 99.0, "rss_bytes": 1 << 33, "threads": 90,
                  "state": "R"} for i, rank in enumerate(self.ranks)]  # fmt: skip
        self.append("samples", json.dumps({**line, "at_ns": at_ns, "ranks": ranks}).encode() + b"\n")

    def sample_tools(self, at_ns: int, number: int) -> None:
        """The tools whose turn it is at the sample of this number."""
        every_s = self.sampling["every_s"]
        due = {item["name"] for item in self.sampling["items"] if number * every_s % item["every_s"] < every_s}
        for line in self._recorder.sample(self.sampling["items"]):
            if line.get("tool") in due:
                self.append("samples", json.dumps({**line, "at_ns": at_ns}).encode() + b"\n")

    def report(self) -> None:
        """One interval of a training: metrics of all ranks, one printed line."""
        self.step += 1
        values = {"step": self.step, "timestamp": time.time(), "loss": 2.3, "step_s": METRICS_S, "comm_s": 1.0}
        for rank in self.ranks:
            self.append(f"rank-{rank}.metrics", json.dumps(values).encode() + b"\n")
        self.out(1)

    # Requests

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        handler = getattr(self, "_" + str(request.get("op")), None)
        return (handler(request) if handler is not None else None) or {}

    def _ping(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"at_ns": time.time_ns()}

    _renew = _ping

    def _probe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        routes = dict.fromkeys(request["peers"], {"interface": "eth0", "source": "10.0.0.1"})
        return {"at_ns": time.time_ns(), "free_bytes": 1 << 40, "routes": routes}

    def _survey(self, request: Mapping[str, Any]) -> Any:
        return self._recorder.survey(request)

    def _sample(self, request: Mapping[str, Any]) -> dict[str, Any]:
        now = time.time_ns()
        return {"lines": [{**one, "at_ns": now} for one in self._recorder.sample(request["items"])], "at_ns": now}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.tag, self.phase, self.streams, self.is_followed = request["tag"], "prepared", {}, False
        self.ranks = [int(rank["rank"]) for rank in request["ranks"]]
        self.sampling, self.step, self.seq = request.get("sampling") or {}, 0, 0
        if self.sampling:
            self._recorder.sample(self.sampling["items"])  # now: later all nodes would wait for it
        return {"master_port": (request["ports"] or [None])[0], "hccl": request.get("hccl") or []}

    def _go(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.phase == "prepared":
            self.phase = "running"
            for number, rank in enumerate(self.ranks):
                self.record("rank_started", rank=rank, local_rank=number, pid=1000 + rank, start=1)
        return {"supervisor_pid": 999}

    def _follow(self, request: Mapping[str, Any]) -> None:
        self.is_followed = True
        most, _, offset = request["windows"]["samples"]
        self.window, self.sampled = (most, offset), int(request["offsets"]["samples"].get("0", 0))
        self.send_samples()
        for file, stream in self.streams.items():
            if file == "samples":
                continue
            have = int((request["offsets"].get(file) or {}).get("0", 0))
            for at in range(max(have, stream.start), stream.end, CHUNK_BYTES):
                header = {"event": "data", "tag": self.tag, "file": file, "generation": 0, "offset": at}
                self.send(header, bytes(stream.data[at - stream.start : at - stream.start + CHUNK_BYTES]))

    def _stop(self, request: Mapping[str, Any]) -> None:
        if self.phase == "running":
            for rank in self.ranks:
                self.record("rank_exited", rank=rank, code=None, signal=15, stopped=True)
        if self.phase != "ended" and request["tag"] == self.tag:
            self.record("ended", exits={}, leftovers=[])
            self.phase = "ended"

    def _acknowledge(self, request: Mapping[str, Any]) -> None:
        self.window = self.window[0], request["offset"]
        self.send_samples()

    def _unfollow(self, request: Mapping[str, Any]) -> None:
        self.is_followed = False

    def _files(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"files": {file: {"0": one.end} for file, one in self.streams.items()}, "phase": self.phase}

    def _processes(self, request: Mapping[str, Any]) -> dict[str, Any]:
        is_this, events = request["tag"] == self.tag, self.streams.get("events", Stream())
        phase = self.phase if is_this else None
        return {"processes": [], "supervisor": phase == "running", "phase": phase, "events": {"0": events.end}}

    def _live(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.hello()[name] for name in ("boot_id", "incarnation", "live")}

    def _usage(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"runs": {}, "trees": {}, "total_bytes": 0}

    def _prune(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"removed": {}}

    def _gather(self, request: Mapping[str, Any]) -> dict[str, Any]:
        now = time.time_ns()
        return {"files": [], "problems": [], "start_ns": now, "boot_ns": now, "at_ns": now}

    def _put_tree(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"have": request["size_bytes"], "done": True}


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
