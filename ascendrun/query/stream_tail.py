"""The last lines of a stream in the spool, and earlier lines around errors, within a byte limit."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ascendrun.core.logs.log_lines import decode_line
from ascendrun.head.spool.spool_files import TIME_RECORD, StreamFiles, read_at, size_of
from ascendrun.health.diagnosis.evidence import Line

LINE_LIMIT_BYTES = 16 * 1024
CHUNK_BYTES = 1 << 20
BEFORE_BYTES, AFTER_BYTES = 2048, 6144
MOST_WINDOWS = 6
TIMES_LIMIT_BYTES = 8 << 20
ERRORS = (
    b"Traceback (most recent call last)",
    b"Error: ",
    b"Exception: ",
    b"[ERROR]",
    b"EI00",
    b"EJ00",
    b"EZ",
    b"EE1",
    b"EL00",
    b"out of memory",
    b"atal ",
    b"FATAL",
    b"error code is",
    b"Segmentation fault",
    b"No space left",
    b"core dumped",
)
"""Texts in lines of errors. A search for bytes is ten times faster than any pattern."""


@dataclass(frozen=True)
class Budget:
    """Limits for each stream. `tail_bytes`: read at its end; `search_bytes`: searched for errors before that."""

    tail_bytes: int = 1 << 20
    search_bytes: int = 32 << 20


def budget_for(streams: int, *, total_bytes: int = 12 << 20) -> Budget:
    """Return the limits for this many streams, so that a thousand ranks need no more memory than eight."""
    share = total_bytes // max(1, streams)
    return Budget(tail_bytes=min(1 << 20, max(16 << 10, share)), search_bytes=min(32 << 20, max(1 << 20, 8 * share)))


def read_tail(files: StreamFiles, root: Path, budget: Budget) -> tuple[Line, ...]:
    """Return lines in order; omitted lines between them are not marked. `root`: the attempt's spool, to which file
    names are relative."""
    found: list[Line] = []
    left = budget.tail_bytes
    searched = budget.search_bytes
    for generation in reversed(files.generations()):
        path = files.path(generation)
        size = size_of(path)
        start = max(0, size - left)
        left -= size - start
        ranges = [(start, size)] if size > start else []
        if start > 0 and searched > 0:
            ranges = [*_windows(path, max(0, start - searched), start), *ranges]
            searched -= min(searched, start)
        times = _Times(files.times_path(generation))
        name = os.path.relpath(path, root)
        found[:0] = [line for begin, end in ranges for line in _lines(path, begin, end, name, files.stream, times)]
        if left <= 0 and searched <= 0:
            break
    return tuple(found)


def read_text_lines(path: Path, root: Path, stream: str, *, limit_bytes: int) -> tuple[Line, ...]:
    """Return a complete small file; of a larger file its start and its end."""
    size = size_of(path)
    name = os.path.relpath(path, root)
    if size <= limit_bytes:
        return tuple(_lines(path, 0, size, name, stream, None))
    half = limit_bytes // 2
    return (*_lines(path, 0, half, name, stream, None), *_lines(path, size - half, size, name, stream, None))


def last_arrival_s(files: StreamFiles) -> float | None:
    """Return when the stream's newest bytes arrived, by its node's clock; None: no bytes, or no times are here."""
    for generation in reversed(files.generations()):
        path = files.times_path(generation)
        size = size_of(path) // TIME_RECORD.size * TIME_RECORD.size
        if size:
            raw = read_at(path, size - TIME_RECORD.size, TIME_RECORD.size)
            if len(raw) == TIME_RECORD.size:
                return float(TIME_RECORD.unpack(raw)[1]) / 1e9
    return None


def _windows(path: Path, begin: int, end: int) -> list[tuple[int, int]]:
    """Return parts of the file around the first lines that look like errors, joined where they touch."""
    found: list[tuple[int, int]] = []
    at = begin
    while at < end and len(found) < MOST_WINDOWS:
        block = read_at(path, at, min(CHUNK_BYTES, end - at))
        if not block:
            break
        for place in _places(block):
            first, last = at + place - BEFORE_BYTES, min(end, at + place + AFTER_BYTES)
            first = max(begin, first)
            if found and first <= found[-1][1]:
                if last - found[-1][0] <= 4 * AFTER_BYTES:
                    found[-1] = (found[-1][0], max(last, found[-1][1]))
                continue
            if len(found) >= MOST_WINDOWS:
                break
            found.append((first, last))
        at += len(block)
    return found


def _places(block: bytes) -> list[int]:
    """Return possible positions of errors, in order; for each text at most as many as windows can be opened."""
    found = []
    for text in ERRORS:
        at, count = block.find(text), 0
        while at >= 0 and count < 2 * MOST_WINDOWS:
            found.append(at)
            count += 1
            at = block.find(text, at + AFTER_BYTES)
    return sorted(found)


def _lines(path: Path, begin: int, end: int, name: str, stream: str, times: _Times | None) -> Iterator[Line]:
    """Yield complete lines between two offsets. A line that crosses an offset is skipped, unless the file ends with it.
    Of a progress bar only its last state."""
    data = read_at(path, begin, end - begin)
    if end < size_of(path):
        data = data[: data.rfind(b"\n") + 1]
    at = 0
    if begin > 0:
        before = read_at(path, begin - 1, 1)
        at = 0 if before == b"\n" else data.find(b"\n") + 1
        if at == 0 and before != b"\n":
            return
    while at < len(data):
        stop = data.find(b"\n", at)
        stop = len(data) if stop < 0 else stop
        raw = data[at:stop].rstrip(b"\r")
        raw = raw[raw.rfind(b"\r") + 1 :][:LINE_LIMIT_BYTES]
        yield Line(decode_line(raw), name, begin + at, None if times is None else times.at_s(begin + stop), stream)
        at = stop + 1


class _Times:
    """Arrival times of one file's bytes."""

    def __init__(self, path: Path) -> None:
        size = size_of(path)
        start = max(0, size - TIMES_LIMIT_BYTES) // TIME_RECORD.size * TIME_RECORD.size
        raw = read_at(path, start, size - start)
        raw = raw[: len(raw) - len(raw) % TIME_RECORD.size]
        records = list(TIME_RECORD.iter_unpack(raw))
        self._ends = [end for end, _ in records]
        self._arrivals = [arrival for _, arrival in records]

    def at_s(self, offset: int) -> float | None:
        """Return when the byte at `offset` arrived; for a last line without newline, the time of the last record."""
        if not self._ends:
            return None
        index = min(bisect_right(self._ends, offset), len(self._ends) - 1)
        return float(self._arrivals[index]) / 1e9
