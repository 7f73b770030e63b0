"""The head's copy of the ranks' output as LogLines: whole, from its tail, or as it grows.

A file that is missing or still short is no error: the collector may be behind. Files are opened for each read, so
that thousands of ranks need no open file each.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ascendrun.core.loglines import LineSplitter, LogLine
from ascendrun.head.settings import SPOOL_COMPLETE

CHUNK_BYTES = 128 * 1024
TIME_RECORD = struct.Struct(">QQ")
TIMES_PATIENCE_S = 1.0
"""How long bytes wait for their arrival times, which come in a file of their own."""

STREAM_FILE = re.compile(r"^rank-(\d+)\.(out|err)\.(\d+)$")


@dataclass(frozen=True)
class StreamFiles:
    """One stream of one rank in one attempt's spool. `host`, `rank`, `stream` as in LogLine."""

    folder: Path
    host: str
    rank: int
    stream: str
    attempt: int

    def path(self, generation: int) -> Path:
        return self.folder / f"rank-{self.rank}.{self.stream}.{generation}"

    def times_path(self, generation: int) -> Path:
        return self.folder / f"rank-{self.rank}.{self.stream}.times.{generation}"

    def generations(self) -> list[int]:
        """Those that are there, oldest first; rotation may have taken the first ones."""
        found = []
        for name in _names(self.folder):
            match = STREAM_FILE.match(name)
            if match and int(match.group(1)) == self.rank and match.group(2) == self.stream:
                found.append(int(match.group(3)))
        return sorted(found)


def find_streams(
    attempt_dir: Path,
    attempt: int,
    *,
    hosts: Optional[Collection[str]] = None,
    ranks: Optional[Collection[int]] = None,
    streams: Collection[str] = ("out", "err"),
) -> list[StreamFiles]:
    """Every stream in an attempt's spool, by rank; None for hosts or ranks: all of them."""
    found: set[tuple[int, str, str]] = set()
    for host in _names(attempt_dir):
        if hosts is not None and host not in hosts:
            continue
        for name in _names(attempt_dir / host):
            match = STREAM_FILE.match(name)
            if match and match.group(2) in streams and (ranks is None or int(match.group(1)) in ranks):
                found.add((int(match.group(1)), match.group(2), host))
    return [
        StreamFiles(attempt_dir / host, host, rank, stream, attempt)
        for rank, stream, host in sorted(found, key=lambda one: (one[0], one[1] == "err", one[2]))
    ]


def is_complete(attempt_dir: Path) -> bool:
    """True when the collector has brought every byte of the attempt."""
    return (attempt_dir / SPOOL_COMPLETE).exists()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


# ---------------------------------------------------------------- forward


class StreamReader:
    """Reads one stream forward, as far as it is there; call `read` again for what came since."""

    def __init__(self, files: StreamFiles, *, tail: Optional[int] = None) -> None:
        """`tail`: begin with the last so many lines instead of the first."""
        self.files = files
        self._splitter = LineSplitter()
        self._generation: Optional[int] = None
        self._offset = 0
        self._times_offset = 0
        self._times: list[tuple[int, int]] = []
        self._untimed_since_s: Optional[float] = None
        if tail is not None:
            self._generation, self._offset = tail_position(files, tail)

    def read(self, *, final: bool = False) -> list[LogLine]:
        """The lines that became whole, at most one chunk of the file: [] means nothing new now.

        Bytes whose arrival time has not come yet are held back for a second. `final`: take them without.
        """
        while True:
            if not self._settle():
                return []
            assert self._generation is not None
            data = _read_at(self.files.path(self._generation), self._offset, CHUNK_BYTES)
            if data:
                data = self._with_times(data, final=final)
                if not data:
                    return []
                lines = self._split(data)
                if lines:
                    return lines
            elif not self._next_generation():
                return []

    def finish(self) -> list[LogLine]:
        """The last line, when it has no newline."""
        text = self._splitter.finish()
        return [] if text is None else [self._line(text, self._times[0][1] if self._times else None)]

    def _settle(self) -> bool:
        if self._generation is None:
            there = self.files.generations()
            self._generation = there[0] if there else None
        return self._generation is not None

    def _next_generation(self) -> bool:
        """The next file is begun only when the node has ended this one, so nothing more comes here."""
        assert self._generation is not None
        if not self.files.path(self._generation + 1).exists():
            return False
        if _size(self.files.path(self._generation)) > self._offset:
            return True  # the last bytes came between our read and our look
        self._generation += 1
        self._offset = self._times_offset = 0
        self._times = []
        return True

    def _with_times(self, data: bytes, *, final: bool) -> bytes:
        """So much of `data` as has arrival times; all of it when they do not come."""
        assert self._generation is not None
        covered = self._covered()
        if covered < len(data):
            self._read_times()
            covered = self._covered()
        if covered >= len(data):
            self._untimed_since_s = None
            return data
        if covered > 0:
            return data[:covered]
        now_s = time.monotonic()
        if self._untimed_since_s is None:
            self._untimed_since_s = now_s
        if final or now_s - self._untimed_since_s > TIMES_PATIENCE_S:
            return data
        return b""

    def _covered(self) -> int:
        """How many bytes from our offset on have arrival times."""
        return self._times[-1][0] - self._offset if self._times else 0

    def _read_times(self) -> None:
        assert self._generation is not None
        path = self.files.times_path(self._generation)
        if self._times_offset == 0:
            self._times_offset = _first_time_record(path, self._offset)
        raw = _read_at(path, self._times_offset, CHUNK_BYTES)
        raw = raw[: len(raw) - len(raw) % TIME_RECORD.size]
        self._times_offset += len(raw)
        self._times.extend((end, arrival_ns) for end, arrival_ns in TIME_RECORD.iter_unpack(raw) if end > self._offset)

    def _split(self, data: bytes) -> list[LogLine]:
        """A line came when its last byte came: its time is that of the record which covers its newline."""
        lines: list[LogLine] = []
        for arrival_ns, part in _pieces_by_time(data, self._offset, self._times):
            lines.extend(self._line(text, arrival_ns) for text in self._splitter.feed(part))
        self._offset += len(data)
        keep = next((i for i, record in enumerate(self._times) if record[0] >= self._offset), len(self._times))
        del self._times[:keep]
        return lines

    def _line(self, text: str, arrival_ns: Optional[int]) -> LogLine:
        at_s = None if arrival_ns is None else arrival_ns / 1e9
        files = self.files
        return LogLine(at_s, files.host, files.rank, files.stream, text, files.attempt)


def _pieces_by_time(
    data: bytes, offset: int, times: list[tuple[int, int]]
) -> Iterator[tuple[Optional[int], bytes]]:
    """`data`, which begins at `offset` of its file, cut where the arrival time changes."""
    start = 0
    for end, arrival_ns in times:
        stop = min(end - offset, len(data))
        if stop > start:
            yield arrival_ns, data[start:stop]
            start = stop
    if start < len(data):
        yield None, data[start:]


def _first_time_record(path: Path, offset: int) -> int:
    """Where in the file of arrival times the record stands that covers the byte at `offset`."""
    low, high = 0, _size(path) // TIME_RECORD.size
    while low < high:
        middle = (low + high) // 2
        raw = _read_at(path, middle * TIME_RECORD.size, TIME_RECORD.size)
        if len(raw) == TIME_RECORD.size and TIME_RECORD.unpack(raw)[0] <= offset:
            low = middle + 1
        else:
            high = middle
    return low * TIME_RECORD.size


def read_all(files: StreamFiles, *, tail: Optional[int] = None) -> Iterator[LogLine]:
    """Every line of a stream that is there now, a chunk at a time; a last line without newline too."""
    reader = StreamReader(files, tail=tail)
    while True:
        lines = reader.read(final=True)
        if not lines:
            break
        yield from lines
    yield from reader.finish()


def read_bytes(files: StreamFiles) -> Iterator[bytes]:
    """The stream exactly as the rank wrote it."""
    for generation in files.generations():
        offset = 0
        while True:
            data = _read_at(files.path(generation), offset, CHUNK_BYTES)
            if not data:
                break
            offset += len(data)
            yield data


def _read_at(path: Path, offset: int, count: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as opened:
            opened.seek(offset)
            return opened.read(count)
    except FileNotFoundError:
        return b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# ---------------------------------------------------------------- backward


def tail_position(files: StreamFiles, count: int) -> tuple[Optional[int], int]:
    """(generation, offset) where the last `count` lines begin, read from the end; (None, 0) when nothing is there."""
    there = files.generations()
    if not there:
        return None, 0
    if count <= 0:
        return there[-1], _size(files.path(there[-1]))
    wanted = count
    is_last_byte = True
    for generation in reversed(there):
        end = _size(files.path(generation))
        while end > 0:
            start = max(0, end - CHUNK_BYTES)
            block = _read_at(files.path(generation), start, end - start)
            if is_last_byte and block:
                is_last_byte = False
                wanted += block.endswith(b"\n")  # that newline ends the last line, it begins none
            newlines = block.count(b"\n")
            if newlines >= wanted:
                return generation, start + _nth_newline_from_end(block, wanted) + 1
            wanted -= newlines
            end = start
    return there[0], 0


def _nth_newline_from_end(block: bytes, count: int) -> int:
    at = len(block)
    for _ in range(count):
        at = block.rfind(b"\n", 0, at)
    return at
