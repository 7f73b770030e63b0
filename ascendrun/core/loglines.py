"""Lines of many ranks as one readable stream: split, merge by time, fold what ranks share."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

SHOWN_LINE_BYTES = 64 * 1024
"""A longer line is cut on screen; `logs --raw` still has every byte."""

RANKS_LIMIT = 1_000_000


@dataclass(frozen=True)
class LogLine:
    """One line of one rank, without its newline. `at_s`: arrival on the node in UTC seconds, None: not recorded."""

    at_s: Optional[float]
    host: str
    rank: int
    stream: str
    text: str
    attempt: int = 1


@dataclass(frozen=True)
class FoldedLine:
    """The same text of one or more ranks, in the order in which it came; at most one line of each rank."""

    lines: tuple[LogLine, ...]

    @property
    def text(self) -> str:
        return self.lines[0].text

    @property
    def at_s(self) -> Optional[float]:
        """When the first of them came."""
        return self.lines[0].at_s

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(line.rank for line in self.lines))


# ---------------------------------------------------------------- split


class LineSplitter:
    """Bytes in any pieces become lines; what is held is never more than one shown line, however long the line is.

    A carriage return starts the line anew, as on a terminal: of a progress bar the last state is left.
    """

    def __init__(self, *, limit_bytes: int = SHOWN_LINE_BYTES) -> None:
        self._limit = limit_bytes
        self._kept = bytearray()
        self._dropped = 0
        self._return_pending = False

    @property
    def is_empty(self) -> bool:
        """True when no part of a line is held."""
        return not (self._kept or self._dropped)

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        pieces = data.split(b"\n")
        lines = []
        for piece in pieces[:-1]:
            self._append(piece)
            lines.append(self._take())
        self._append(pieces[-1])
        return lines

    def finish(self) -> Optional[str]:
        """The last line, which has no newline; None when there is none."""
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
            stripped = stripped[last_return + 1:]
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
        if self._dropped:
            kept = _without_broken_end(kept)
        text = kept.decode("utf-8", "replace")
        if self._dropped:
            text += f"... (+{describe_bytes(self._dropped)})"
        self._restart()
        return text


def _without_broken_end(data: bytes) -> bytes:
    """A cut may fall inside a character of up to four bytes: then that character goes too."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return data
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data if back >= needed else data[:-back]
    return data


def describe_bytes(count: int) -> str:
    """9.9 MB, 512 bytes: powers of 1000, two digits where it helps."""
    if count < 1000:
        return f"{count} bytes"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.1f} {unit}" if size < 99.95 else f"{size:.0f} {unit}"
    return f"{size / 1000:.1f} TB"


# ---------------------------------------------------------------- merge


def merge(streams: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    """Lines of many streams by time. Each stream keeps its own order: a line without a time, or with one that went
    backwards, stays directly after the line before it. Reads one line ahead of every stream, no more."""
    keyed = (_with_running_time(index, stream) for index, stream in enumerate(streams))
    for _at_s, _index, _count, line in heapq.merge(*keyed):
        yield line


def _with_running_time(index: int, stream: Iterable[LogLine]) -> Iterator[tuple[float, int, int, LogLine]]:
    newest_s = float("-inf")
    for count, line in enumerate(stream):
        if line.at_s is not None and line.at_s > newest_s:
            newest_s = line.at_s
        yield newest_s, index, count, line


# ---------------------------------------------------------------- fold

FoldKey = tuple[str, str, int]


OPEN_GROUPS_LIMIT = 4096
"""More lines than this are not held back: a rank that pours out lines folds less, and memory stays bounded."""


class _Group:
    """One folded line in the making."""

    __slots__ = ("key", "lines", "number", "opened_s")

    def __init__(self, key: FoldKey, number: int, opened_s: float) -> None:
        self.key = key
        self.number = number
        self.opened_s = opened_s
        self.lines: list[LogLine] = []


class Folder:
    """Folds lines as they come. A line joins an earlier one with the same text, stream and attempt when that one is
    no older than the window and no other line of the same rank would be overtaken.

    `ranks`: how many there are, so that a line which all have said need not wait for the window; None: not known.
    Both may change while lines wait.
    """

    def __init__(self, *, window_s: float, ranks: Optional[int] = None) -> None:
        self.window_s = window_s
        self.ranks = ranks
        self._open: deque[_Group] = deque()
        self._by_key: dict[FoldKey, tuple[list[int], list[_Group]]] = {}
        self._last_of_rank: dict[int, int] = {}
        self._count = 0

    def add(self, line: LogLine, *, now_s: float) -> None:
        """`now_s`: the line's time on a clock that never goes back; one clock for all lines."""
        key = (line.text, line.stream, line.attempt)
        group = self._group_to_join(key, line.rank, now_s)
        if group is None:
            group = self._open_group(key, now_s)
        group.lines.append(line)
        self._last_of_rank[line.rank] = group.number

    def take(self, *, now_s: float) -> list[FoldedLine]:
        """What can no longer grow, in order."""
        ready = []
        while self._open and self._is_done(self._open[0], now_s):
            ready.append(self._close_first())
        return ready

    def finish(self) -> list[FoldedLine]:
        """All that is left, in order."""
        ready = []
        while self._open:
            ready.append(self._close_first())
        return ready

    def _is_done(self, group: _Group, now_s: float) -> bool:
        is_full = self.ranks is not None and len(group.lines) >= self.ranks
        return is_full or now_s - group.opened_s > self.window_s or len(self._open) > OPEN_GROUPS_LIMIT

    def _group_to_join(self, key: FoldKey, rank: int, now_s: float) -> Optional[_Group]:
        numbers, groups = self._by_key.get(key, ((), ()))
        for group in groups[bisect_right(numbers, self._last_of_rank.get(rank, -1)):]:
            if now_s - group.opened_s <= self.window_s:
                return group
        return None

    def _open_group(self, key: FoldKey, now_s: float) -> _Group:
        group = _Group(key, self._count, now_s)
        self._count += 1
        self._open.append(group)
        numbers, groups = self._by_key.setdefault(key, ([], []))
        numbers.append(group.number)
        groups.append(group)
        return group

    def _close_first(self) -> FoldedLine:
        group = self._open.popleft()
        numbers, groups = self._by_key[group.key]
        del numbers[0], groups[0]  # groups of one key close in the order in which they opened
        if not groups:
            del self._by_key[group.key]
        return FoldedLine(tuple(group.lines))


def fold(lines: Iterable[LogLine], *, window_s: float) -> Iterator[FoldedLine]:
    """Lines in order of time, folded where ranks say the same within the window. `unfold` gives every line back."""
    folder = Folder(window_s=window_s)
    now_s = 0.0
    for line in lines:
        if line.at_s is not None and line.at_s > now_s:
            now_s = line.at_s
        yield from folder.take(now_s=now_s)
        folder.add(line, now_s=now_s)
    yield from folder.finish()


def unfold(folded: Iterable[FoldedLine]) -> Iterator[LogLine]:
    """Every line that went into `fold`, the order within each rank kept."""
    for one in folded:
        yield from one.lines


# ---------------------------------------------------------------- ranks


def fold_ranks(ranks: Iterable[int]) -> str:
    """0-3,8: the short way to write many ranks."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    for index, rank in enumerate(ordered):
        if index + 1 < len(ordered) and ordered[index + 1] == rank + 1:
            continue
        first = ordered[start]
        parts.append(str(rank) if first == rank else f"{first}-{rank}")
        start = index + 1
    return ",".join(parts)


def parse_ranks(text: str) -> frozenset[int]:
    """0,8-15 as a set. Raises ValueError with a sentence saying which part is wrong."""
    ranks: list[int] = []
    for part in text.split(","):
        ranks.extend(_parse_rank_range(part.strip()))
    return frozenset(ranks)


def _parse_rank_range(part: str) -> Sequence[int]:
    first, dash, last = part.partition("-")
    ends = [first, last] if dash else [first]
    if not all(end.isascii() and end.isdigit() and len(end) <= 7 for end in ends):
        raise ValueError(f"{part!r} is no rank and no range of ranks; write 3 or 0,8-15")
    low, high = int(ends[0]), int(ends[-1])
    if high < low:
        raise ValueError(f"the range {part} runs backwards")
    if high >= RANKS_LIMIT:
        raise ValueError(f"{part}: ranks above {RANKS_LIMIT - 1} do not exist")
    return range(low, high + 1)
