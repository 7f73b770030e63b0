"""The head's copy of the nodes' files: exact bytes, stored once, by (file, generation, offset); its limits.

Copying pauses while a job occupies its share of this machine's disk, or the disk is nearly full.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from ascendrun.core.retention import Retention, kind_of
from ascendrun.head.state.state_dir import open_to_append
from ascendrun.head.waiting import in_background
from ascendrun.node.layout import PULLED_FILE
from ascendrun.node.records import EVENTS, parse_events

KEEP_BYTES = 16 << 30
"""Bytes that a node may keep of one attempt's logs; below that nothing is deleted there."""
PRUNE_EVERY_S = 60.0
REMEMBERED_BYTES = 1 << 16
"""Bytes of events above which those not read yet are read from the file."""
HOLE_BYTES = 4096
"""Zeros that are worth a hole: a block of most file systems."""
LOOK_S = 15.0
WALK_RESTS = 4.0
"""LOOK_S between two walks over a job's files, for each second that the last one took."""
SMALL_DISK = 20
"""No more than this part of the disk is kept free, one twentieth."""
PAUSED_KINDS = ("out", "err", "times", "metrics", "error", "samples")
"""All kinds of followed files but events, which tell how the job ends."""
LOG_FILE = re.compile(r"^(?:rank|node)-\d+\.(?:out|err)$")


class SpoolGapError(Exception):
    """The data starts after the end of the copy: follow again from `offsets()`."""


class NodeSpool:
    """Copy of one node's files of one attempt, of which this object is the only writer. The sizes of the files are the
    only record of its progress. They are read once: each system call costs a turn of the interpreter, and hundreds of
    nodes have thousands of files."""

    def __init__(self, folder: Path, limits: Mapping[str, int] | None = None) -> None:
        """`limits`: bytes of one file that are kept here, by its kind; None: the defaults."""
        self.folder = folder
        self._limits = Retention().file_limits() if limits is None else limits
        self._events_read: dict[int, int] = {}
        self._unread: dict[int, tuple[int, bytes]] = {}
        self._sizes: dict[tuple[str, str], int] | None = None
        self._synced: dict[tuple[str, str], int] = {}
        self._writing = threading.Lock()  # a connection that is given up may still send while the next one does

    def offsets(self) -> dict[str, dict[str, int]]:
        """Return {file: {generation: bytes that are here}}, as the agent's `follow` expects it. Raises OSError."""
        if self._sizes is None:
            self._sizes = {}  # a connection's thread may write meanwhile: what it notes is newer
            for key, size in self._read_sizes().items():
                self._sizes.setdefault(key, size)
        return _by_file(list(self._sizes.items()))

    def _read_sizes(self) -> dict[tuple[str, str], int]:
        try:
            found = [(PULLED_FILE.match(entry.name), entry) for entry in os.scandir(self.folder)]
        except FileNotFoundError:
            return {}
        return {(match[1], match[2]): entry.stat().st_size for match, entry in found if match}

    def write(self, file: str, generation: int, offset: int, data: bytes) -> None:
        """Append the new part of `data`, which is at `offset` of the node's file.

        Bytes that are here already, or beyond the file's limit, are not written. Raises SpoolGapError if bytes before
        it are missing, ValueError if `file` is not a name that a node may use, OSError if the head's disk is full.
        """
        name = f"{file}.{generation}"
        if not PULLED_FILE.match(name):
            raise ValueError(f"a node sent a file named {name!r}")
        with self._writing:
            self._append((file, str(generation)), offset, data, self._limits.get(kind_of(file)))

    def _append(self, key: tuple[str, str], offset: int, data: bytes, limit: int | None) -> None:
        name = ".".join(key)
        fd = open_to_append(self.folder, name)
        size = 0
        try:
            size = os.fstat(fd).st_size
            if limit is not None and size >= limit:
                return
            if offset > size:
                raise SpoolGapError(f"{name}: have {size} bytes, got {offset}")
            rest = memoryview(data)[size - offset : None if limit is None else max(0, limit - offset)]
            if len(rest) >= HOLE_BYTES and data.count(0) == len(data):
                os.ftruncate(fd, size + len(rest))  # a hole of a sparse file stays one
                size += len(rest)
                return
            while rest:
                written = os.write(fd, rest)
                if key[0] == EVENTS:
                    self._remember(int(key[1]), size, bytes(rest[:written]))
                size, rest = size + written, rest[written:]
        finally:
            os.close(fd)
            if self._sizes is not None:
                self._sizes[key] = size

    def new_events(self) -> Sequence[Mapping[str, Any]]:
        """Return the complete lines of the node's `events` that were not returned before, in order.

        A torn line (a power failure, a full disk) is skipped, as on the node itself. A new generation repeats records.
        """
        found: list[dict[str, Any]] = []
        for generation, size in sorted((int(one), size) for one, size in self.offsets().get(EVENTS, {}).items()):
            if size <= self._events_read.get(generation, 0):
                continue
            data = self._unread_events(generation)
            end = data.rfind(b"\n") + 1
            self._events_read[generation] = self._events_read.get(generation, 0) + end
            found += parse_events(data[:end])
        return found

    def _remember(self, generation: int, offset: int, data: bytes) -> None:
        """Keep what is written for `new_events`, which mostly follows: it need not read the file."""
        start, before = self._unread.get(generation, (offset, b""))
        is_next = start + len(before) == offset and len(before) < REMEMBERED_BYTES
        self._unread[generation] = (start, before + data) if is_next else (offset, data)

    def _unread_events(self, generation: int) -> bytes:
        read = self._events_read.get(generation, 0)
        with self._writing:
            start, data = self._unread.pop(generation, (-1, b""))
        if start <= read < start + len(data):
            return data[read - start :]
        with open(self.folder / f"{EVENTS}.{generation}", "rb", buffering=0) as file:
            file.seek(read)
            return file.readall()

    def has_closed_logs(self) -> bool:
        """Return whether a log of a rank is here in more than one generation."""
        return any(LOG_FILE.match(file) and len(generations) > 1 for file, generations in self.offsets().items())

    def safe_logs(self) -> dict[str, dict[str, int]]:
        """Return {file: {generation: bytes}} of the ranks' logs and their times, as far as they are synced to disk.

        The newest generation here of a file may still grow and is omitted. Raises OSError.
        """
        safe: dict[str, dict[str, int]] = {}
        here = _by_file(self._read_sizes().items())  # as the disk has it: what is safe, the node deletes
        for file, generations in here.items():
            if not LOG_FILE.match(file[: -len(".times")] if file.endswith(".times") else file):
                continue
            newest = max(int(generation) for generation in generations)
            for generation, size in generations.items():
                if int(generation) < newest:
                    if self._synced.get((file, generation)) != size:
                        sync_file(self.folder / f"{file}.{generation}")
                        self._synced[(file, generation)] = size
                    safe.setdefault(file, {})[generation] = size
        return safe

    def differs_from(self, sizes: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
        """Return the files of the node that are incomplete here, given their sizes on the node and the limits."""
        have = self.offsets()
        return tuple(
            f"{file}.{generation}"
            for file, generations in sizes.items()
            for generation, size in generations.items()
            if have.get(file, {}).get(generation, 0) < min(size, self._limits.get(kind_of(file), size))
        )


def _by_file(sizes: Iterable[tuple[tuple[str, str], int]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (file, generation), size in sizes:
        found.setdefault(file, {})[generation] = size
    return found


class LogPruner:
    """Requests the deletion of closed log files of one attempt that are stored here, so that node disks do not fill up.

    `prune(host, have)` gets how much of which file is stored (see NodeSpool.safe_logs); called in a thread, since only
    data on this disk is safe and syncing may take long.
    """

    def __init__(self, prune: Callable[[str, Mapping[str, Mapping[str, int]]], None]) -> None:
        self._prune = prune
        self._due_mono = time.monotonic() + PRUNE_EVERY_S
        self._working = threading.Lock()

    def tick(self, spools: Iterable[tuple[str, NodeSpool]]) -> None:
        """Call periodically with the spools of the hosts that are connected."""
        now = time.monotonic()
        if now < self._due_mono:
            return
        self._due_mono = now + PRUNE_EVERY_S
        with_more = [(host, spool) for host, spool in spools if spool.has_closed_logs()]
        if with_more:
            in_background(partial(self._work, with_more), "prune")

    def _work(self, spools: list[tuple[str, NodeSpool]]) -> None:
        if not self._working.acquire(blocking=False):
            return
        try:
            for host, spool in spools:
                try:
                    have = spool.safe_logs()
                except OSError:  # the disk is full or failing: then nothing is safe here
                    continue
                self._prune(host, have)
        finally:
            self._working.release()


def sync_file(path: Path) -> None:
    """Sync a file to the disk; a missing file is not an error. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Pause(str, Enum):
    """JOB: the job's files reached its limit; what is not here stays on the nodes. DISK: until there is space."""

    JOB = "job-limit"
    DISK = "disk-space"


class PullLimits:
    """The limits of one job, whose files are in `folder`."""

    def __init__(self, folder: Path, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self._due_mono = self._walk_mono = 0.0
        self._used_bytes = 0
        self.pause: Pause | None = None

    def look(self) -> bool:
        """Look at the disk when it is time; return whether the pause changed. A limit of the job stays."""
        now, before = time.monotonic(), self.pause
        if now < self._due_mono or before is Pause.JOB:
            return False
        self._due_mono = now + LOOK_S
        if now >= self._walk_mono:
            self._walk_mono = float("inf")
            in_background(self._walk, "disk-use")
        if self._used_bytes >= self._retention.pull_job_bytes:
            self.pause = Pause.JOB
        else:
            least = self._retention.min_free_bytes
            self.pause = Pause.DISK if free_bytes_beyond(self._folder, least, times=2 if before else 1) < 0 else None
        return self.pause is not before

    def _walk(self) -> None:
        """In a thread of its own: with a thousand nodes the files take longer than the controller may stand still."""
        began_mono = time.monotonic()
        self._used_bytes = allocated_bytes(self._folder)
        self._walk_mono = began_mono + LOOK_S * WALK_RESTS * (time.monotonic() - began_mono)

    def of_files(self) -> Mapping[str, int]:
        """Return the limits that nodes must keep, by kind of file."""
        limits = dict(self._retention.file_limits())
        return limits if self.pause is None else {**limits, **dict.fromkeys(PAUSED_KINDS, 0)}

    def expected(self, sizes: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
        """Return the sizes of a node's files without those that stay on the node for good."""
        return {file: of for file, of in sizes.items() if file == "events"} if self.pause is Pause.JOB else sizes


def allocated_bytes(folder: Path) -> int:
    """Return the bytes that a directory's files occupy; a file that goes away meanwhile counts as none."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
            except OSError:
                continue
    return total


def free_bytes_beyond(folder: Path, least: int, *, times: int = 1) -> int:
    """Return the bytes that may be written to a directory, which may not exist yet, while `least` stay free.

    Negative: less is free. Of a small disk a part is kept free, `times` that.
    """
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    least = min(least, found.f_blocks * found.f_frsize // SMALL_DISK)
    return found.f_bavail * found.f_frsize - least * times
