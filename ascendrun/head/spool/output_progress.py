"""Progress in the stored output of ranks: for programs that write no metrics file.

Standard output and standard error are read as one text, in the order of arrival. Of long output only the start, which
says what the bars mean, and the end are read.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendrun.core.logs.log_lines import process_number
from ascendrun.core.logs.progress import ProgressReader, merge_rows
from ascendrun.core.logs.progress_lines import START_BYTES, find_lines, find_world_size
from ascendrun.head.spool.spool_files import STREAM_FILE, TIME_RECORD, find_files, first_time_record, read_at, size_of

HEAD_BYTES = 256 * 1024
"""Bytes from the start that are read before the end of long output."""
TAIL_BYTES = (256 * 1024, 4 << 20)
"""Bytes of the end in which the newest values are looked for; the second if the first has none and the start has."""
MOST_BYTES = 128 << 20
"""Bytes of the end of one stream that are read at most."""
BLOCK_BYTES = 4 << 20
PACE_STEPS = 20
"""Reports of which the time of a step is the mean."""
OUTPUT_FIRST_S = 0.002
"""A dictionary on standard output precedes the bar on standard error that is drawn again after it. The node may read
the two pipes in the other order."""


def is_output(path: Path) -> bool:
    """Whether a path is stored output, not a metrics file."""
    return STREAM_FILE.match(path.name) is not None


def find_outputs(attempt_dir: Path) -> dict[int, tuple[Path, ...]]:
    """Return the stored output of the first and the last rank, oldest generation first. Megatron prints on the last.
    Processes that start ranks count only where no rank has an output of its own."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for path, match in find_files(attempt_dir, STREAM_FILE):
        found.setdefault(process_number(match["process"]), []).append((int(match["generation"]), path))
    numbers = [number for number in found if number >= 0] or list(found)
    ranks = sorted({min(numbers), max(numbers)}) if numbers else []
    return {rank: tuple(path for _, path in sorted(found[rank])) for rank in ranks}


def newest_of_outputs(attempt_dir: Path, *, pattern: str | None) -> Mapping[str, Any] | None:
    """Return the newest value of each metric that the first or else the last rank printed; None: no step. Of a counter
    that begins again in each epoch there is no step."""
    for paths in find_outputs(attempt_dir).values():
        for last_bytes in TAIL_BYTES:
            values: dict[str, Any] = {}
            steps: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)
            for row in read_rows(paths, pattern=pattern, last_bytes=last_bytes):
                values.update(row)
                if row.get("step") is not None and "timestamp" in row:
                    steps.append((row["timestamp"], row["step"]))
            if "step" not in values:
                pass
            elif values["step"] is None:
                return {name: one for name, one in values.items() if "step" not in name}
            else:
                passed_s, done = (steps[-1][i] - steps[0][i] for i in (0, 1)) if steps else (0.0, 0)
                return {**({"step_s": passed_s / done} if done > 0 else {}), **values}
            if not _has_steps(paths, pattern):
                break
    return None


def read_world_size(attempt_dir: Path) -> tuple[str, int] | None:
    """Return (host, world size that the first rank there states at the start of its output); None: none yet."""
    for path in next(iter(find_outputs(attempt_dir).values()), ()):
        size = min(size_of(path), HEAD_BYTES)
        found = find_world_size(read_at(path, 0, size)) if size and not path.name.endswith(".times") else None
        if found is not None:
            return path.parent.name, found
    return None


def _has_steps(paths: Sequence[Path], pattern: str | None) -> bool:
    """Whether the start of a long output has steps; a short one was read as a whole."""
    if all(size_of(path) <= TAIL_BYTES[0] for path in paths):
        return False
    starts = [_Span(path, 0, min(size_of(path), HEAD_BYTES)) for path in paths]
    return any("step" in row for row in _rows([starts], ProgressReader(pattern)))


def read_rows(
    paths: Sequence[Path], *, pattern: str | None = None, last_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one rank's output under the names of a metrics file, in order, with their times of arrival.

    `last_bytes`: only rows of this many newest bytes of each stream, or somewhat more; what the bars mean is read from
    the start.
    """
    streams: dict[str, list[Path]] = {}
    for path in paths:
        streams.setdefault(path.name.split(".")[1], []).append(path)
    heads: list[list[_Span]] = []
    tails: list[list[_Span]] = []
    for stream in streams.values():
        head, tail = _spans(stream, MOST_BYTES if last_bytes is None else max(last_bytes, TAIL_BYTES[0]))
        heads.append(head)
        tails.append(tail)
    reader = ProgressReader(pattern)
    rows = _rows(heads, reader)
    if last_bytes is None:
        yield from rows
    else:
        for _ in rows:  # what the bars mean
            pass
        if any(heads):
            reader.omit()
    yield from _rows(tails, reader)


def read_log(path: Path, *, pattern: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of any log file, one for each step in succession, without times. Raises OSError."""
    size = path.stat().st_size
    return merge_rows(_rows([[_Span(path, 0, size)]], ProgressReader(pattern)))


class _Span:
    """Bytes `start` to `end` of one stored file."""

    def __init__(self, path: Path, start: int, end: int) -> None:
        self.path, self.start, self.end = path, start, end


def _spans(paths: Sequence[Path], last_bytes: int) -> tuple[list[_Span], list[_Span]]:
    """Return (the start, the end) of a stream; of one that is not longer than both the start is empty."""
    tail: list[_Span] = []
    rest = last_bytes
    for path in reversed(paths):
        size = size_of(path)
        if rest > 0:
            tail.insert(0, _Span(path, max(0, size - rest), size))
        rest -= size
    if not tail or (len(tail) == len(paths) and tail[0].start <= HEAD_BYTES):
        for span in tail[:1]:
            span.start = 0
        return [], tail
    return [_Span(paths[0], 0, min(size_of(paths[0]), HEAD_BYTES))], tail


def _rows(streams: Sequence[Sequence[_Span]], reader: ProgressReader) -> Iterator[dict[str, Any]]:
    """Yield the rows of spans of several streams, merged by time."""
    newest_s: float | None = None
    for _, _, _, at_s, line in heapq.merge(
        *(_lines(spans, order, is_any=reader.reads_any_line) for order, spans in enumerate(streams))
    ):
        newest_s = at_s if at_s else newest_s
        for row in reader.read(line):
            yield row if newest_s is None else {"timestamp": newest_s, **row}
    for row in reader.flush():
        yield row if newest_s is None else {"timestamp": newest_s, **row}


def _lines(spans: Sequence[_Span], order: int, *, is_any: bool) -> Iterator[tuple[float, int, int, float, bytes]]:
    """Yield (sort key: about the arrival, stream, number; arrival, line) of the lines that may hold progress."""
    newest_s, number = 0.0, 0
    for span in spans:
        times = _Times(span)
        earlier_s = OUTPUT_FIRST_S if ".out." in span.path.name else 0.0
        for end, line in _lines_of(span, is_any=is_any):
            at_s = times.at(end)
            newest_s = max(newest_s, at_s - earlier_s)
            number += 1
            yield newest_s, order, number, at_s, line


def _lines_of(span: _Span, *, is_any: bool) -> Iterator[tuple[int, bytes]]:
    """Yield (offset of its end, line) of a span. A line that is cut at the start or the end is none, but for a bar:
    it waits for the next without an end."""
    offset, is_cut = span.start, span.start > 0
    while offset < span.end:
        data = read_at(span.path, offset, min(BLOCK_BYTES, span.end - offset))
        if not data:
            return
        is_last = offset + len(data) >= span.end
        stop = len(data) if is_last else max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 or len(data)
        start = 0
        if is_cut:
            ends = [at for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0]
            start, is_cut = (min(ends) + 1 if ends else stop), False
        for end, line in find_lines(data[start:stop], at_start=offset < START_BYTES, is_any=is_any):
            if end < stop - start or b"%" in line:
                yield offset + start + end, line
        offset += stop


class _Times:
    """Times of arrival of a span's bytes by the node's clock."""

    def __init__(self, span: _Span) -> None:
        self._ends: array[int] = array("Q")
        self._at_ns: array[int] = array("Q")
        if not is_output(span.path):
            return
        host_path = span.path.with_name(span.path.name.replace(".out.", ".out.times.").replace(".err.", ".err.times."))
        position = first_time_record(host_path, span.start)
        raw = read_at(host_path, position, size_of(host_path) - position)
        numbers = array("Q", raw[: len(raw) - len(raw) % TIME_RECORD.size])
        numbers.byteswap()
        self._ends, self._at_ns = numbers[0::2], numbers[1::2]

    def at(self, end: int) -> float:
        """Return when the byte before `end` arrived, in UTC seconds; 0: unknown."""
        index = bisect_left(self._ends, end)
        return self._at_ns[min(index, len(self._at_ns) - 1)] / 1e9 if self._at_ns else 0.0
