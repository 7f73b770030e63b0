"""Bytes of many ranks as lines in one order: split and merge by time. core/logs/folding.py folds equal lines."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import NamedTuple

from ascendrun.text import Text
from ascendrun.text.format import format_bytes, label_ranks

SHOWN_LINE_BYTES = 64 * 1024
"""A longer line is truncated on screen; `logs --raw` has every byte."""

RANKS_LIMIT = 1_000_000
_BROKEN_END = re.compile(rb"(?:[\xc0-\xff]|[\xe0-\xff][\x80-\xbf]|[\xf0-\xff][\x80-\xbf]{2})\Z")


class LogLine(NamedTuple):
    """One line of one rank, without its newline. `at_s`: arrival on the node in UTC seconds, None: not recorded.

    `rank` below 0: the line is not of a rank, but of the process of node `-1 - rank` that starts the ranks itself.
    """

    at_s: float | None
    host: str
    rank: int
    stream: str
    text: str
    attempt: int = 1


def process_name(number: int) -> str:
    """Return the name of a process in names of files: rank-3, or node-1 for the number -2. See LogLine.rank."""
    return f"rank-{number}" if number >= 0 else f"node-{-1 - number}"


def process_number(name: str) -> int:
    """Return the number of a process's name, the inverse of `process_name`."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "rank" else -1 - int(number)


def process_label(number: int) -> str:
    """Return how a line shows its process: 3, or node-1 for the number -2."""
    return str(number) if number >= 0 else process_name(number)


def label_processes(numbers: Sequence[int], labels: Mapping[int, str]) -> str:
    """Return the processes of a line as ranges: 0-3,7, or node-0 for a process that is not a rank. `labels`: of the
    ranks of roles."""
    nodes = [process_label(number) for number in sorted(numbers, reverse=True) if number < 0]
    ranks = [number for number in numbers if number >= 0]
    return ",".join([*([label_ranks(ranks, labels)] if ranks else []), *nodes])


def make_lines(
    times: Iterable[float | None], host: str, rank: int, stream: str, texts: Iterable[str], attempt: int
) -> list[LogLine]:
    """Return the lines of one stream, without a call for each: there may be millions."""
    rows = zip(times, repeat(host), repeat(rank), repeat(stream), texts, repeat(attempt))
    return list(map(tuple.__new__, repeat(LogLine), rows))


# ---------------------------------------------------------------- split


class LineSplitter:
    """Splits chunks of bytes into lines; keeps at most one line of `limit_bytes`.

    A carriage return restarts the line, as on a terminal: only the last state of a progress bar remains.
    """

    def __init__(self, *, limit_bytes: int = SHOWN_LINE_BYTES) -> None:
        self._limit = limit_bytes
        self._kept = bytearray()
        self._dropped = 0
        self._return_pending = False

    @property
    def is_empty(self) -> bool:
        """Whether no part of a line is buffered."""
        return not (self._kept or self._dropped)

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        pieces = data.split(b"\n")
        lines = []
        for piece in pieces[:-1]:
            self._append(piece)
            lines.append(self._take())
        self._append(pieces[-1])
        return lines

    def finish(self) -> str | None:
        """Return the last line, which has no newline; None: no such line."""
        return None if self.is_empty else self._take()

    def _append(self, piece: bytes) -> None:
        if not piece:
            return
        stripped = piece.rstrip(b"\r")
        if self._return_pending and stripped:
            self._restart()
        if not stripped:
            self._return_pending = True
            return
        last_return = stripped.rfind(b"\r")
        if last_return >= 0:
            self._restart()
            stripped = stripped[last_return + 1 :]
        room = self._limit - len(self._kept)
        self._kept += stripped[:room]
        self._dropped += max(0, len(stripped) - room)
        self._return_pending = piece.endswith(b"\r")

    def _restart(self) -> None:
        self._kept.clear()
        self._dropped = 0
        self._return_pending = False

    def _take(self) -> str:
        kept = bytes(self._kept)
        if self._dropped:  # perhaps within a character of UTF-8
            kept = _BROKEN_END.sub(b"", kept)
        text = decode_line(kept)
        if self._dropped:
            text += f"... (+{format_bytes(self._dropped)})"
        self._restart()
        return text


def decode_line(raw: bytes) -> str:
    """Decode as UTF-8; else GB2312 if all bytes are valid; else UTF-8 with invalid bytes as \\xff."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        pass
    try:
        text = raw.decode("gb2312")  # not gbk: truncated UTF-8 is nearly always valid GBK
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace")
    return text if len(raw) - len(text) > 1 else raw.decode("utf-8", "backslashreplace")  # 1: truncated UTF-8


# ---------------------------------------------------------------- merge

BATCH_LINES = 256


def merge(streams: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    """Merge lines of many streams by time, with `merge_batches` of a few hundred lines each."""
    for batch in merge_batches(_in_batches(stream) for stream in streams):
        yield from batch


def _in_batches(stream: Iterable[LogLine]) -> Iterator[list[LogLine]]:
    lines = iter(stream)
    while batch := list(islice(lines, BATCH_LINES)):
        yield batch


def merge_batches(sources: Iterable[Iterator[list[LogLine]]]) -> Iterator[list[LogLine]]:
    """Merge lines of many sources by time, batch by batch; of equal times, in the order of the sources.

    Each source keeps its own order: a line without a time, or with an earlier time, stays directly after the line
    before it. Memory: one batch of every source.
    """
    waiting = [_Source(source) for source in sources]
    while waiting := [source for source in waiting if source.refill()]:
        horizon_s = min(source.times[-1] for source in waiting)
        times: list[float] = []
        lines: list[LogLine] = []
        for source in waiting:
            source.move_until(horizon_s, times, lines)
        yield [lines[at] for at in sorted(range(len(lines)), key=times.__getitem__)]


class _Source:
    """Lines of one source that are not merged yet. `times`: of each line, ascending."""

    def __init__(self, batches: Iterator[list[LogLine]]) -> None:
        self._batches = batches
        self._newest_s = float("-inf")
        self._lines: list[LogLine] = []
        self.times: list[float] = []

    def refill(self) -> bool:
        """Return whether more lines exist."""
        while not self.times:
            batch = next(self._batches, None)
            if batch is None:
                return False
            self.times = never_back([line[0] for line in batch], self._newest_s)
            if batch:
                self._newest_s = self.times[-1]
            self._lines = batch
        return True

    def move_until(self, horizon_s: float, times: list[float], lines: list[LogLine]) -> None:
        count = bisect_right(self.times, horizon_s)
        if count == len(self.times):
            times += self.times
            lines += self._lines
            self.times = []
        elif count:
            times += self.times[:count]
            lines += self._lines[:count]
            del self.times[:count]
            self._lines = self._lines[count:]


def never_back(times: Sequence[float | None], newest_s: float) -> list[float]:
    """Return each time, or the maximum before it (at first `newest_s`) if it is missing or smaller."""
    given = [at_s for at_s in times if at_s is not None]
    if len(given) == len(times) and sorted(given) == given and (not given or given[0] >= newest_s):
        return given  # nearly always
    kept = []
    for at_s in times:
        if at_s is not None and at_s > newest_s:
            newest_s = at_s
        kept.append(newest_s)
    return kept


# ---------------------------------------------------------------- ranks


def parse_ranks(text: str) -> frozenset[int]:
    """Return `0,8-15` as a set. Raises ValueError with the invalid part."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = [first, last] if dash else [first]
        if not all(end.isascii() and end.isdigit() and len(end) <= 7 for end in ends) or not (
            int(first) <= int(ends[-1]) < RANKS_LIMIT
        ):
            raise ValueError(Text("ranks.range", "expected ranks such as 3 or 0,8-15, got {part:quote}", part=part))
        ranks.update(range(int(first), int(ends[-1]) + 1))
    return frozenset(ranks)
