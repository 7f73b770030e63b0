"""A simulated node: what its agent replies and sends, without its connection (`fleet.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from ascendrun.node import wire
from ascendrun.node.agent.follow import CHUNK_BYTES
from ascendrun.node.supervisor.spool import TIMES
from benchmarks.recorder import Recorder

TURN_S = 0.1
METRICS_S = 10.0
KEPT_BYTES = 1 << 20
"""Of each file, at least; a node has all of it, and a head that is late by minutes follows it again from before."""


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
        self.session: Any = None
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
