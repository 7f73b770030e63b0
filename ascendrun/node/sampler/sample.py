"""The sampler: a child of a supervisor that records the state of host, ranks and devices, and ends with it.

On standard output, as JSON lines {rank, pid, start}, the supervisor gets the ranks that a script starts itself.

`prepare` has its configuration (`sampling`: {every_s, items: [{name, argv, every_s, timeout_s}], devices}) and
does not interpret the output. JSON lines, each complete in itself, in `samples.<generation>`:

    {at_ns, host: {...}, ranks: [{rank, pid, device, ...}], own_world?, is_alone?}     see rank_metrics.py
    {at_ns, tool, code, wall_s, timed_out?, truncated?, text | z}   z: the text, zlib, base64

On a full disk samples are lost, never the space of the attempt's records. Excess old generations are deleted.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import sys
import threading
import time
import zlib

from ascendrun.node import layout, procs
from ascendrun.node.files import free_bytes, read_json, write_all
from ascendrun.node.records import read_events
from ascendrun.node.sampler import sample_tools
from ascendrun.node.sampler.rank_metrics import Leader, RankFigures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Sequence

FILE = "samples"
ROTATE_BYTES = 4 << 20
GENERATIONS = 16
SPARE_BYTES = 32 << 20
"""Bytes; with less free space nothing is written: logs and records have priority."""
SPACE_CHECK_S = 10.0
PACKED_FROM = 300
"""Bytes; a shorter text is not compressed."""
FIRST_RATE_S = 0.5


class SampleFile:
    """The lines on disk, in bounded generations."""

    def __init__(self, folder: str, *, limit: int = ROTATE_BYTES, keep: int = GENERATIONS) -> None:
        self._folder = folder
        self._limit = limit
        self._keep = keep
        self._generation = 0
        self._fd: int | None = None
        self._looked_s = -SPACE_CHECK_S
        self._has_room = True

    def write(self, line: dict[str, Any], now_s: float) -> None:
        """Write the complete line or nothing; never raises for a disk that is full or broken."""
        try:
            if now_s - self._looked_s >= SPACE_CHECK_S:
                self._looked_s = now_s
                self._has_room = free_bytes(self._folder) >= SPARE_BYTES
            if self._has_room:
                self._append(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
        except OSError:
            self._has_room = False

    def _append(self, data: bytes) -> None:
        if self._fd is None:
            path = os.path.join(self._folder, "%s.%d" % (FILE, self._generation))
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, data)
        except OSError:
            os.ftruncate(self._fd, size)
            raise
        if size + len(data) >= self._limit:
            full, self._fd = self._fd, None
            os.close(full)
            self._generation += 1
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, "%s.%d" % (FILE, self._generation - self._keep)))


class Sampler:
    """The loop. `out(line, now_s)` takes each line, `tell` each rank that a script started itself;
    `until_fd`: the loop ends when it has data or ends."""

    def __init__(
        self,
        sampling: dict[str, Any],
        *,
        root: str,
        leaders: Callable[[], Sequence[Leader]],
        group: str | None,
        out: Callable[[dict[str, Any], float], None],
        tell: Callable[[dict[str, Any]], None],
        until_fd: int,
    ) -> None:
        self._every_s = max(0.1, float(sampling["every_s"]))
        self._out = out
        self._until_fd = until_fd
        self._host = HostFigures(root)
        self._ranks = RankFigures(leaders, group=group, devices=sampling.get("devices"))
        self._tell = tell
        self._told: dict[int, tuple[int, int]] = {}
        self._tools = sample_tools.Tools(
            sampling.get("items") or [],
            env=os.environb,
            emit=lambda line, text: self._out(dict(line, **pack_text(text)), time.monotonic()),
        )
        self._due_s = time.monotonic()

    def run(self) -> None:
        """Run until the supervisor is gone."""
        try:
            while True:
                now_s = time.monotonic()
                if now_s >= self._due_s:
                    self._poll(now_s)
                    self._due_s = max(self._due_s + self._every_s, now_s)
                self._tools.turn(now_s)
                wait_s = min(self._due_s - now_s, self._tools.wait_s(now_s))
                if self._until_fd in sample_tools.wait([self._until_fd] + self._tools.fds(), max(0.0, wait_s)):
                    return
        finally:
            self._tools.end()

    def _poll(self, now_s: float) -> None:
        at_ns = time.time_ns()
        line = {
            "at_ns": at_ns,
            "host": _known(self._host.take(now_s)),
            "ranks": [_known(rank) for rank in self._ranks.take(now_s)],
            "own_world": self._ranks.own_world,
            "is_alone": self._ranks.is_alone,
        }
        self._out(_known(line), now_s)
        for rank, (pid, start) in self._ranks.forked.items():
            if self._told.get(rank) != (pid, start):
                self._told[rank] = pid, start
                self._tell({"rank": rank, "pid": pid, "start": start})


def pack_text(text: bytes) -> dict[str, str]:
    if len(text) < PACKED_FROM:
        return {"text": text.decode("utf-8", "replace")}
    return {"z": base64.b64encode(zlib.compress(text, 6)).decode("ascii")}


def _known(figures: dict[str, Any]) -> dict[str, Any]:
    """Remove unknown values: a missing value means unknown."""
    return {name: value for name, value in figures.items() if value is not None}


def sample_once(
    root: str, items: Sequence[dict[str, Any]], survey: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Return this host's current state, without a job: {lines: as above, at_ns}. `survey` runs tools with deadlines."""
    figures = HostFigures(root)
    started_s = time.monotonic()
    figures.take(started_s)
    at_ns = time.time_ns()
    results = survey([dict(item, kind="argv", max_bytes=sample_tools.MAX_BYTES) for item in items])
    # Not time.sleep: it fails where a test shifts this host's clock.
    select.select([], [], [], max(0.0, FIRST_RATE_S - (time.monotonic() - started_s)))
    lines: list[dict[str, Any]] = [{"at_ns": time.time_ns(), "host": _known(figures.take(time.monotonic()))}]
    for item in items:
        raw = results[item["name"]]
        text = raw.get("out", "") + raw.get("err", "") if "error" not in raw else raw["error"]
        lines.append(
            {
                "at_ns": at_ns,
                "tool": item["name"],
                "code": raw.get("code"),
                "timed_out": bool(raw.get("timed_out") or raw.get("late")),
                "text": text,
            }
        )
    return {"lines": lines, "at_ns": time.time_ns()}


class Leaders:
    """The processes that were started according to the attempt's events, which are read until all ranks have started:
    a launcher starts them late."""

    def __init__(self, folder: str, prepared: dict[str, Any]) -> None:
        self._folder, self._prepared = folder, prepared
        self._found: list[Leader] = []

    def __call__(self) -> list[Leader]:
        if len(self._found) < len(self._prepared["ranks"]):
            with contextlib.suppress(OSError):
                self._found = leaders_of(self._folder, self._prepared)
        return self._found


def leaders_of(folder: str, prepared: dict[str, Any]) -> list[Leader]:
    plans = {int(rank["rank"]): rank for rank in prepared["ranks"]}
    found = []
    for event in read_events(layout.streams_dir(folder)):
        if event.get("event") == "rank_started":
            plan = plans.get(int(event["rank"]))
            if plan is None:  # a launcher, whose ranks are here too
                continue
            env = plan["env"]
            found.append(
                Leader(
                    int(event["pid"]),
                    int(event.get("start") or -1),
                    int(event["rank"]),
                    int(plan["local_rank"]),
                    forks=layout.forks_ranks(plan),
                    may_launch=env.get("LOCAL_WORLD_SIZE") == "1" and env.get("GROUP_WORLD_SIZE", "1") != "1",
                )
            )
    return found


def main(folder: str) -> int:
    """Run `sample FOLDER`: standard input is a pipe that the supervisor keeps open while it lives."""
    os.umask(0o077)
    procs.raise_oom_score(500)
    prepared = read_json(os.path.join(folder, layout.PREPARED)) or {}
    sampling = prepared.get("sampling")
    if not sampling:
        return 0
    identity = read_json(os.path.join(folder, layout.IDENTITY)) or {}
    file = SampleFile(layout.streams_dir(folder), limit=int(sampling.get("rotate_bytes") or ROTATE_BYTES))
    Sampler(
        sampling,
        root=layout.root_of(folder),
        leaders=Leaders(folder, prepared),
        group=identity.get("cgroup"),
        out=file.write,
        tell=lambda record: write_all(sys.stdout.fileno(), json.dumps(record).encode("ascii") + b"\n"),
        until_fd=sys.stdin.fileno(),
    ).run()
    return 0


SECTOR_BYTES = 512
DISK_EVERY_S = 30.0
DISK_STALE_S = 120.0
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
"""Not disks, or virtual disks on top of others: their bytes count there."""


class HostFigures:
    """Load of this host, from /proc. Rates are over the time since the previous sample; None: not known.

    Use from one thread. `root`: the directory whose file system's free space is sampled."""

    def __init__(self, root: str) -> None:
        self._space = _Space(root)
        self._disks = _real_disks()
        self._cpu: tuple[int, int] | None = None
        self._io: tuple[int, ...] | None = None
        self._at_s: float | None = None

    def take(self, now_s: float) -> dict[str, Any]:
        """Take a sample. `now_s`: monotonic. The first sample has no rates."""
        passed_s = None if self._at_s is None or now_s <= self._at_s else now_s - self._at_s
        self._at_s = now_s
        load = procs.read_text("/proc/loadavg").split()
        memory = parse_memory(procs.read_text("/proc/meminfo"))
        figures: dict[str, Any] = {
            "cpu": self._cpu_percent(),
            "load1": float(load[0]) if load else None,
            "memory_used_bytes": memory[0],
            "memory_total_bytes": memory[1],
            "disk_free_bytes": self._space.probe(now_s),
        }
        before = self._io
        self._io = parse_disks(procs.read_text("/proc/diskstats"), self._disks) + parse_net(
            procs.read_text("/proc/net/dev")
        )
        names = ("disk_read_bytes_s", "disk_write_bytes_s", "net_rx_bytes_s", "net_tx_bytes_s")
        for place, name in enumerate(names):
            figures[name] = _rate(before, self._io, place, passed_s)
        return figures

    def _cpu_percent(self) -> float | None:
        before, self._cpu = self._cpu, parse_cpu(procs.read_text("/proc/stat", 4096))
        if before is None or self._cpu is None or self._cpu[1] <= before[1]:
            return None
        busy = (self._cpu[0] - before[0]) / (self._cpu[1] - before[1])
        return round(max(0.0, min(1.0, busy)) * 100, 1)


class _Space:
    """Free bytes, read in a separate thread: a dead network file system must not block the rest."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._queried_s = -DISK_EVERY_S
        self._probe_result: tuple[float, int] | None = None
        self._thread: threading.Thread | None = None

    def probe(self, now_s: float) -> int | None:
        if now_s - self._queried_s >= DISK_EVERY_S and (self._thread is None or not self._thread.is_alive()):
            self._queried_s = now_s
            self._thread = threading.Thread(target=self._query, args=(now_s,), daemon=True)
            self._thread.start()
            self._thread.join(0.05)
        answer = self._probe_result
        return answer[1] if answer is not None and now_s - answer[0] < DISK_STALE_S else None

    def _query(self, now_s: float) -> None:
        try:
            found = os.statvfs(self._path)
        except OSError:
            return
        self._probe_result = now_s, found.f_bavail * found.f_frsize


def parse_cpu(text: str) -> tuple[int, int] | None:
    """Return (busy, all) ticks of all CPUs since boot, from /proc/stat."""
    words = text.split("\n", 1)[0].split()
    if len(words) < 6 or words[0] != "cpu":
        return None
    ticks = [int(word) for word in words[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def parse_memory(text: str) -> tuple[int | None, int | None]:
    """Return (used, total) bytes; memory available without swapping is not used."""
    found = {}
    for line in text.split("\n"):
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(value.split()[0]) * 1024
    total, free = found.get("MemTotal"), found.get("MemAvailable")
    return None if total is None or free is None else total - free, total


def parse_disks(text: str, disks: frozenset[str] | None) -> tuple[int, ...]:
    """Return (read, written) bytes of these disks since boot; -1 where the disks are not known."""
    if disks is None:
        return (-1, -1)
    sectors = [0, 0]
    for line in text.split("\n"):
        words = line.split()
        if len(words) >= 10 and words[2] in disks:
            sectors[0] += int(words[5])
            sectors[1] += int(words[9])
    return sectors[0] * SECTOR_BYTES, sectors[1] * SECTOR_BYTES


def parse_net(text: str) -> tuple[int, ...]:
    """Return (received, sent) bytes of hardware interfaces or, without any (a container), of all but lo."""
    counted: dict[str, tuple[int, int]] = {}
    for line in text.split("\n")[2:]:
        name, separator, rest = line.partition(":")
        words = rest.split()
        if separator and name.strip() != "lo" and len(words) >= 9:
            counted[name.strip()] = int(words[0]), int(words[8])
    hardware = [name for name in counted if os.path.exists(f"/sys/class/net/{name}/device")]
    chosen = [counted[name] for name in hardware or counted]
    return sum(one[0] for one in chosen), sum(one[1] for one in chosen)


def _real_disks() -> frozenset[str] | None:
    try:
        return frozenset(name for name in os.listdir("/sys/block") if not name.startswith(_NO_DISKS))
    except OSError:
        return None


def _rate(before: tuple[int, ...] | None, now: tuple[int, ...], place: int, passed_s: float | None) -> float | None:
    """Return the rate per second; None at the first sample, without a counter, and where a counter decreased."""
    if before is None or passed_s is None or now[place] < 0 or now[place] < before[place]:
        return None
    return round((now[place] - before[place]) / passed_s, 1)
