"""Load of this host, from /proc. Rates are over the time since the previous sample; None: not known."""

from __future__ import annotations

import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SECTOR_BYTES = 512
DISK_EVERY_S = 30.0
DISK_STALE_S = 120.0
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
"""Not disks, or virtual disks on top of others: their bytes count there."""


class HostFigures:
    """Use from one thread. `root`: the directory whose file system's free space is sampled."""

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
        memory = parse_memory(read("/proc/meminfo"))
        figures: dict[str, Any] = {
            "cpu": self._cpu_percent(),
            "load1": parse_load(read("/proc/loadavg")),
            "memory_used_bytes": memory[0],
            "memory_total_bytes": memory[1],
            "disk_free_bytes": self._space.probe(now_s),
        }
        before = self._io
        self._io = parse_disks(read("/proc/diskstats"), self._disks) + parse_net(read("/proc/net/dev"))
        names = ("disk_read_bytes_s", "disk_write_bytes_s", "net_rx_bytes_s", "net_tx_bytes_s")
        for place, name in enumerate(names):
            figures[name] = _rate(before, self._io, place, passed_s)
        return figures

    def _cpu_percent(self) -> float | None:
        before, self._cpu = self._cpu, parse_cpu(read("/proc/stat", 4096))
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


def parse_load(text: str) -> float | None:
    words = text.split()
    return float(words[0]) if words else None


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


def read(path: str, limit: int = 1 << 20) -> str:
    """Return a kernel file's text; "" if missing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        pieces = []
        while limit > 0:
            piece = os.read(fd, min(limit, 1 << 16))
            if not piece:
                break
            pieces.append(piece)
            limit -= len(piece)
        return b"".join(pieces).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
