"""The head's copy of the ranks' output: as LogLines, complete or as it grows; its end and errors as evidence."""

from __future__ import annotations

import os
import struct
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.logs.log_lines import SHOWN_LINE_BYTES, LineSplitter, LogLine, decode_line, make_lines
from ascendrun.head.spool import spool_files
from ascendrun.head.spool.clocks import HostClock

if TYPE_CHECKING:
    from ascendrun.health.diagnosis.evidence import Line

TIMES_PATIENCE_S = 1.0
"""Seconds that bytes wait for their arrival times, which are in a separate file."""
SINCE_SLACK_S = 2.0
"""Clock offsets are not exact, and the reader must not omit a requested line."""
BATCH_LINES = 2048
USUAL_LINE_BYTES = 64
LEAST_CHUNK_BYTES = 4096
HELD_LINES = 1 << 15
"""Lines of all streams together that are in memory at once while they are merged: memory stays bounded."""


class StreamReader:
    """Forward reader of one stream up to its present end; call `read` again for new lines."""

    def __init__(
        self,
        files: spool_files.StreamFiles,
        *,
        tail: int | None = None,
        clock: HostClock | None = None,
        since_s: float | None = None,
        batch_lines: int = BATCH_LINES,
        end: tuple[int, int] | None = None,
    ) -> None:
        """Prepare to read. `tail`: start with this many last lines instead of the first. `since_s`: lines that arrived
        earlier, by the head's clock, may be omitted and need not be read. `clock`: the host's, None: not measured.
        `batch_lines`: approximate maximum of one `read`. `end`: (generation, offset) at which to stop."""
        self.files = files
        self.clock = clock
        self._batch_lines = batch_lines
        self._chunk_bytes = max(LEAST_CHUNK_BYTES, min(spool_files.CHUNK_BYTES, batch_lines * USUAL_LINE_BYTES))
        self._end = end or (1 << 62, 0)
        self._splitter = LineSplitter()
        self._generation: int | None = None
        self._offset = 0
        self._times_offset = 0
        self._times = _Times()
        self._untimed_since_s: float | None = None
        if tail is not None:
            self._generation, self._offset = spool_files.tail_position(files, tail)
        elif since_s is not None and not (clock is not None and clock.was_set):
            node_s = clock.to_node_s(since_s) if clock is not None else since_s
            self._generation, self._offset = spool_files.since_position(files, node_s - SINCE_SLACK_S)

    def read(self, *, final: bool = False) -> list[LogLine]:
        """Return the newly completed lines, at most one chunk of the file: [] means nothing new now.

        Bytes without an arrival time are delayed by one second. `final`: return them without.
        """
        while True:
            if not self._settle():
                return []
            assert self._generation is not None
            data = spool_files.read_at(self.files.path(self._generation), self._offset, self._room())
            if data:
                data = self._with_times(self._cut(data), final=final)
                if not data:
                    return []
                lines = self._split(data)
                if lines:
                    return lines
            elif not self._next_generation():
                return []

    def finish(self) -> list[LogLine]:
        """Return the last line if it has no newline."""
        text = self._splitter.finish()
        return [] if text is None else [self._line(text, self._times.first_s)]

    def batches(self, *, final: bool) -> Iterator[list[LogLine]]:
        """Yield what `read` returns until nothing new is there; `final`: and a last line without newline."""
        while lines := self.read(final=final):
            yield lines
        last = self.finish() if final else []
        if last:
            yield last

    def _room(self) -> int:
        generation, offset = self._end
        if self._generation == generation:
            return max(0, min(self._chunk_bytes, offset - self._offset))
        return self._chunk_bytes if self._generation is not None and self._generation < generation else 0

    def _cut(self, data: bytes) -> bytes:
        """Return a batch of complete lines, if there are any. The rest will be read again, so the next read takes about
        the size of a batch."""
        newlines = data.count(b"\n")
        if newlines == 0:
            self._chunk_bytes = spool_files.CHUNK_BYTES
            return data
        batch_bytes = len(data) * self._batch_lines // newlines
        self._chunk_bytes = max(LEAST_CHUNK_BYTES, min(spool_files.CHUNK_BYTES, batch_bytes - batch_bytes // 16))
        return cut_lines(data, self._batch_lines) if newlines > self._batch_lines else data[: data.rfind(b"\n") + 1]

    def _settle(self) -> bool:
        if self._generation is None:
            there = self.files.generations()
            self._generation = there[0] if there else None
        return self._generation is not None

    def _next_generation(self) -> bool:
        """Switch to the next file only after the node has ended this one, so that nothing more arrives here."""
        assert self._generation is not None
        if not self.files.path(self._generation + 1).exists():
            return False
        if spool_files.size_of(self.files.path(self._generation)) > self._offset:
            return True  # the last bytes came between the read and the check
        self._generation += 1
        self._offset = self._times_offset = 0
        self._times = _Times()
        return True

    def _with_times(self, data: bytes, *, final: bool) -> bytes:
        """Return the part of `data` with arrival times; all of it if they do not arrive."""
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
        """Return how many bytes from the current offset on have arrival times."""
        return self._times.ends[-1] - self._offset if self._times.ends else 0

    def _read_times(self) -> None:
        assert self._generation is not None
        path = self.files.times_path(self._generation)
        if self._times_offset == 0:
            self._times_offset = spool_files.first_time_record(path, self._offset)
        raw = spool_files.read_at(path, self._times_offset, spool_files.TIME_RECORD.size * self._batch_lines)
        raw = raw[: len(raw) - len(raw) % spool_files.TIME_RECORD.size]
        self._times_offset += len(raw)
        self._times.add(raw, self._offset, self.clock)

    def _split(self, data: bytes) -> list[LogLine]:
        """Split into lines. The time of a line is that of its last byte: of the record which covers its newline."""
        if self._splitter.is_empty and data.endswith(b"\n") and b"\r" not in data:
            lines = self._split_plain(data)
        else:
            lines = []
            for at_s, part in self._times.pieces(data, self._offset):
                lines.extend(self._line(text, at_s) for text in self._splitter.feed(part))
        self._offset += len(data)
        self._times.forget_before(self._offset)
        return lines

    def _split_plain(self, data: bytes) -> list[LogLine]:
        """Split complete lines that need no splitter, at a fraction of the cost."""
        files = self.files
        raws = data.splitlines(keepends=True)
        ends = list(accumulate(map(len, raws), initial=self._offset))[1:]
        texts = self._texts(data, raws)
        return make_lines(self._times.at(ends), files.host, files.rank, files.stream, texts, files.attempt)

    def _texts(self, data: bytes, raws: Sequence[bytes]) -> list[str]:
        if max(map(len, raws)) > SHOWN_LINE_BYTES:
            return [
                decode_line(raw[:-1]) if len(raw) <= SHOWN_LINE_BYTES + 1 else self._splitter.feed(raw)[0]
                for raw in raws
            ]
        try:
            return data[:-1].decode("utf-8").split("\n")
        except UnicodeDecodeError:
            return [decode_line(raw[:-1]) for raw in raws]

    def _line(self, text: str, at_s: float | None) -> LogLine:
        files = self.files
        return LogLine(at_s, files.host, files.rank, files.stream, text, files.attempt)


def cut_lines(data: bytes, most: int) -> bytes:
    """Return the first `most` lines of `data`, or all of it if it has fewer."""
    if data.count(b"\n") <= most:
        return data
    return data[: len(data) - len(data.split(b"\n", most)[-1])]


class _Times:
    """Arrival times of unread bytes: the bytes before `ends[i]`, from the previous end on, arrived at `came_s[i]` by
    the head's clock."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.came_s: list[float] = []

    @property
    def first_s(self) -> float | None:
        """Return the first arrival time; None: unknown."""
        return self.came_s[0] if self.came_s else None

    def add(self, raw: bytes, offset: int, clock: HostClock | None) -> None:
        """Add complete records as stored in the file; those of bytes before `offset` are skipped."""
        numbers = struct.unpack(f">{len(raw) // 8}Q", raw)
        known = bisect_right(numbers[::2], offset)
        self.ends += numbers[2 * known :: 2]
        came_s = [arrival_ns / 1e9 for arrival_ns in numbers[2 * known + 1 :: 2]]
        self.came_s += came_s if clock is None else clock.all_to_head_s(came_s)

    def at_s(self, offset: int) -> float | None:
        """Return when the byte at `offset` arrived; beyond the last record, which ends in no newline, its time."""
        return self.came_s[min(bisect_right(self.ends, offset), len(self.ends) - 1)] if self.ends else None

    def forget_before(self, offset: int) -> None:
        """Drop earlier records. The record that ends there is kept: a line without newline may need it."""
        count = bisect_left(self.ends, offset)
        del self.ends[:count], self.came_s[:count]

    def at(self, ends: Sequence[int]) -> Sequence[float | None]:
        """Return when the byte before each of the ends arrived."""
        if ends == self.ends[: len(ends)]:
            return self.came_s[: len(ends)]
        last = len(self.ends)
        places = [bisect_left(self.ends, end) for end in ends]
        return [self.came_s[place] if place < last else None for place in places]

    def pieces(self, data: bytes, offset: int) -> Iterator[tuple[float | None, bytes]]:
        """Split `data`, which starts at `offset` of its file, where the arrival time changes."""
        start = 0
        for end, at_s in zip(self.ends, self.came_s):
            stop = min(end - offset, len(data))
            if stop > start:
                yield at_s, data[start:stop]
                start = stop
        if start < len(data):
            yield None, data[start:]


def batch_lines_for(streams: int) -> int:
    """Return how many lines of each stream to keep in memory when this many are merged."""
    return max(32, min(BATCH_LINES, HELD_LINES // max(1, streams)))


LINE_LIMIT_BYTES = 16 * 1024
SEARCH_CHUNK_BYTES = 1 << 20
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


TOTAL_BYTES = 12 << 20


@dataclass(frozen=True)
class Budget:
    """Limits for each stream. `tail_bytes`: read at its end; `search_bytes`: searched for errors before that."""

    tail_bytes: int = 1 << 20
    search_bytes: int = 32 << 20


def budget_for(streams: int) -> Budget:
    """Return the limits for this many streams, so that a thousand ranks need no more memory than eight."""
    share = TOTAL_BYTES // max(1, streams)
    return Budget(tail_bytes=min(1 << 20, max(16 << 10, share)), search_bytes=min(32 << 20, max(1 << 20, 8 * share)))


def read_tail(files: spool_files.StreamFiles, root: Path, budget: Budget) -> tuple[Line, ...]:
    """Return lines in order; omitted lines between them are not marked. `root`: the attempt's spool, to which file
    names are relative."""
    found: list[Line] = []
    left = budget.tail_bytes
    searched = budget.search_bytes
    for generation in reversed(files.generations()):
        path = files.path(generation)
        size = spool_files.size_of(path)
        start = max(0, size - left)
        left -= size - start
        ranges = [(start, size)] if size > start else []
        if start > 0 and searched > 0:
            ranges = [*_windows(path, max(0, start - searched), start), *ranges]
            searched -= min(searched, start)
        times = _last_times(files.times_path(generation))
        name = os.path.relpath(path, root)
        found[:0] = [line for begin, end in ranges for line in _lines(path, begin, end, name, files.stream, times)]
        if left <= 0 and searched <= 0:
            break
    return tuple(found)


def read_text_lines(path: Path, root: Path, stream: str, *, limit_bytes: int) -> tuple[Line, ...]:
    """Return a complete small file; of a larger file its start and its end."""
    size = spool_files.size_of(path)
    name = os.path.relpath(path, root)
    if size <= limit_bytes:
        return tuple(_lines(path, 0, size, name, stream, None))
    half = limit_bytes // 2
    return (*_lines(path, 0, half, name, stream, None), *_lines(path, size - half, size, name, stream, None))


def last_arrival_s(files: spool_files.StreamFiles) -> float | None:
    """Return when the stream's newest bytes arrived, by its node's clock; None: no bytes, or no times are here."""
    for generation in reversed(files.generations()):
        path = files.times_path(generation)
        size = spool_files.size_of(path) // spool_files.TIME_RECORD.size * spool_files.TIME_RECORD.size
        if size:
            raw = spool_files.read_at(path, size - spool_files.TIME_RECORD.size, spool_files.TIME_RECORD.size)
            if len(raw) == spool_files.TIME_RECORD.size:
                return float(spool_files.TIME_RECORD.unpack(raw)[1]) / 1e9
    return None


def _windows(path: Path, begin: int, end: int) -> list[tuple[int, int]]:
    """Return parts of the file around the first lines that look like errors, joined where they touch."""
    found: list[tuple[int, int]] = []
    at = begin
    while at < end and len(found) < MOST_WINDOWS:
        block = spool_files.read_at(path, at, min(SEARCH_CHUNK_BYTES, end - at))
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
    from ascendrun.health.diagnosis.evidence import Line  # not for those who only follow a job

    data = spool_files.read_at(path, begin, end - begin)
    if end < spool_files.size_of(path):
        data = data[: data.rfind(b"\n") + 1]
    at = 0
    if begin > 0:
        before = spool_files.read_at(path, begin - 1, 1)
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


def _last_times(path: Path) -> _Times:
    """Return the arrival times of the last bytes of a file, by the clock of its node."""
    size, times = spool_files.size_of(path), _Times()
    start = max(0, size - TIMES_LIMIT_BYTES) // spool_files.TIME_RECORD.size * spool_files.TIME_RECORD.size
    raw = spool_files.read_at(path, start, size - start)
    times.add(raw[: len(raw) - len(raw) % spool_files.TIME_RECORD.size], -1, None)
    return times
