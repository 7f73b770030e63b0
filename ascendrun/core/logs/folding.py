"""Folding of similar lines that many ranks write at about the same time: [0-63] step 120 loss 2.31±0.02.

line_patterns.py defines the variable parts. Different measured numbers are shown as mean±half of their spread. The line
of a rank with an outlier or a nan follows separately and unchanged.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ascendrun.core.logs.line_patterns import MEASURED, SHOWN, Shape, Template, Templates
from ascendrun.core.logs.log_lines import LogLine

OPEN_GROUPS_LIMIT = 4096
"""Maximum number of waiting lines, to limit memory: more lines are folded less."""
OPEN_CHARACTERS_LIMIT = 8_000_000
LONG_LINE = 1000
"""Characters. Only longer lines count for the character limit: the limit of groups covers the others."""
CROWD_CHECK = 128
"""The two limits above are checked after this number of lines."""
FEWEST_FOR_OUTLIERS = 4
"""Minimum number of ranks for outliers."""
OUTLIER_SIGMAS = 6.0
USUAL = 1.4826
"""Median absolute deviation to sigma of a normal distribution."""
OUTLIER_SHARE = 0.05
"""A number within this fraction of the median is never an outlier."""

FoldKey = tuple[Template, str, int]


class FoldedLine(NamedTuple):
    """Lines of one or more ranks, at most one per rank, in the order of arrival. `text`: the common text."""

    lines: tuple[LogLine, ...]
    text: str

    @property
    def at_s(self) -> float | None:
        """Arrival of the first line."""
        return self.lines[0].at_s

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(line.rank for line in self.lines))


class _Group:
    """A folded line that may still grow."""

    __slots__ = ("characters", "key", "lines", "number", "opened_s", "shapes")

    def __init__(self, key: FoldKey, number: int, opened_s: float) -> None:
        self.key = key
        self.number = number
        self.opened_s = opened_s
        self.lines: list[LogLine] = []
        self.characters = 0
        self.shapes: list[Shape] = []


class _Peers:
    """The open groups of one key, oldest first, and their numbers."""

    __slots__ = ("groups", "newest", "numbers")

    def __init__(self, first: _Group) -> None:
        self.newest = first
        self.numbers = [first.number]
        self.groups = [first]

    def open(self, group: _Group) -> None:
        self.newest = group
        self.numbers.append(group.number)
        self.groups.append(group)

    def oldest(self, last: int, since_s: float) -> _Group:
        """Return the oldest group after the rank's last line and within the window; the newest must be."""
        behind = self.groups[bisect_right(self.numbers, last) :]
        return next(group for group in behind if group.opened_s >= since_s)


class Folder:
    """Folds lines as they arrive. A line joins an earlier line with the same template, stream and attempt if that line
    is within the window and no other line of the same rank would be overtaken.

    `ranks`: number of ranks, so that a line of all ranks does not wait for the window; None: not known. Both may change
    while lines wait.
    """

    def __init__(self, *, window_s: float, ranks: int | None = None) -> None:
        self.window_s = window_s
        self.ranks = ranks
        self._templates = Templates()
        self._open: deque[_Group] = deque()
        self._by_key: dict[FoldKey, _Peers] = {}
        self._last_of_rank: dict[int, int] = {}
        self._count = 0
        self._characters = 0

    def add(self, lines: Sequence[LogLine], *, now_s: float) -> None:
        """Add lines that arrived at `now_s`, on one monotonic clock for all lines."""
        self._join(lines, now_s, now_s)

    def add_past(
        self, lines: Sequence[LogLine], *, now_s: float, until_s: float = math.inf
    ) -> tuple[list[FoldedLine], float]:
        """Add lines with their own arrival times, none after `until_s`; `now_s`: the time of the line before them.
        Return the completed lines, as `take`, and the time of the last line."""
        ready = self.take(now_s=now_s)
        more, now_s = self._join(lines, now_s, max(now_s, until_s))
        return ready + more, now_s

    def _join(self, lines: Sequence[LogLine], now_s: float, until_s: float) -> tuple[list[FoldedLine], float]:
        """Add lines in one long loop: a function call for each of millions of lines would cost more than its work."""
        ready: list[FoldedLine] = []
        by_key, last_of_rank, window_s, due_s = self._by_key, self._last_of_rank, self.window_s, self.due_s
        found = self._templates.find_all([line[4] for line in lines], [line[2] for line in lines])
        for line, (template, shape) in zip(lines, found):
            at_s, _host, rank, stream, text, attempt = line
            if now_s < until_s and at_s is not None and at_s > now_s:
                now_s = at_s if at_s < until_s else until_s
                if now_s > due_s:
                    ready += self.take(now_s=now_s)
                    due_s = self.due_s
            key = (template, stream, attempt)
            peers = by_key.get(key)
            if peers is None:
                group = self._open_group(key, now_s)
                by_key[key] = _Peers(group)
            else:
                last, since_s, group = last_of_rank.get(rank, -1), now_s - window_s, peers.newest
                if group.number <= last or group.opened_s < since_s:
                    group = self._open_group(key, now_s)
                    peers.open(group)
                elif len(peers.groups) > 1:
                    group = peers.oldest(last, since_s)
            group.lines.append(line)
            group.shapes.append(shape)
            if len(text) > LONG_LINE:
                self._characters += len(text)
                group.characters += len(text)
            last_of_rank[rank] = group.number
        return ready, now_s

    def take(self, *, now_s: float) -> list[FoldedLine]:
        """Return the folded lines that can no longer grow, in order."""
        ready: list[FoldedLine] = []
        while self._open and self._is_done(self._open[0], now_s):
            ready += self._close_first()
        return ready

    def finish(self) -> list[FoldedLine]:
        """Return the other folded lines, in order."""
        ready: list[FoldedLine] = []
        while self._open:
            ready += self._close_first()
        return ready

    @property
    def due_s(self) -> float:
        """Latest time for the first waiting line; -inf: no line waits."""
        return self._open[0].opened_s + self.window_s if self._open else -math.inf

    def _is_done(self, group: _Group, now_s: float) -> bool:
        is_full = self.ranks is not None and len(group.lines) >= self.ranks
        is_crowded = len(self._open) > OPEN_GROUPS_LIMIT or self._characters > OPEN_CHARACTERS_LIMIT
        return is_full or is_crowded or now_s - group.opened_s > self.window_s

    def _open_group(self, key: FoldKey, now_s: float) -> _Group:
        group = _Group(key, self._count, now_s)
        self._count += 1
        self._open.append(group)
        return group

    def _close_first(self) -> list[FoldedLine]:
        group = self._open.popleft()
        peers = self._by_key[group.key]
        del peers.numbers[0], peers.groups[0]  # groups of one key close in the order in which they opened
        if not peers.groups:
            del self._by_key[group.key]
        self._characters -= group.characters
        return summarise(group.lines, group.shapes)


def fold(lines: Iterable[LogLine], *, window_s: float) -> Iterator[FoldedLine]:
    """Yield lines in order of time; equal lines of several ranks within the window are folded. Inverse: `unfold`."""
    folder = Folder(window_s=window_s)
    now_s = 0.0
    waiting = iter(lines)
    while some := list(islice(waiting, CROWD_CHECK)):
        ready, now_s = folder.add_past(some, now_s=now_s)
        yield from ready
    yield from folder.finish()


def fold_each(lines: Iterable[LogLine]) -> Iterator[FoldedLine]:
    """Yield each line by itself, immediately."""
    return (FoldedLine((line,), line.text) for line in lines)


def unfold(folded: Iterable[FoldedLine]) -> Iterator[LogLine]:
    """Yield every line that was passed to `fold`, in the order of each rank."""
    for line in folded:
        yield from line.lines


# ---------------------------------------------------------------- common text


def summarise(lines: Sequence[LogLine], shapes: Sequence[Shape]) -> list[FoldedLine]:
    """Fold lines of one template into one line, followed by each outlier. `shapes`: of the lines."""
    texts, shape = [line[4] for line in lines], shapes[0]
    first = texts[0]
    if not shape.fields or texts.count(first) == len(texts):
        return [FoldedLine(tuple(lines), first)]
    if shapes.count(shape) == len(shapes):
        columns = [_make_column(kind, [text[start:end] for text in texts], 1) for start, end, kind in shape.fields]
    else:
        columns = [
            _make_column(kind, [text[own.fields[at][0] : own.fields[at][1]] for text, own in zip(texts, shapes)])
            for at, (_start, _end, kind) in enumerate(shape.fields)
        ]
    parts = _parts(columns, len(lines))
    if len(parts) == 1:
        return [FoldedLine(tuple(lines), _render(first, shape, columns))]
    return [line for part in parts for line in summarise([lines[at] for at in part], [shapes[at] for at in part])]


class _Column(NamedTuple):
    """A variable part of every line. `values`: as numbers, () if not numbers or all equal. `examples`: a text of each
    width."""

    kind: str
    texts: Sequence[str]
    values: Sequence[float]
    examples: Sequence[str]
    is_equal: bool


def _make_column(kind: str, texts: Sequence[str], widths: int | None = None) -> _Column:
    """Return a column. `widths`: number of different widths, None: not known."""
    if texts.count(texts[0]) == len(texts):
        return _Column(kind, texts, (), texts[:1], True)
    examples = texts[:1] if widths == 1 else list({len(text): text for text in texts}.values())
    return _Column(kind, texts, list(map(float, texts)) if kind == MEASURED else (), examples, False)


def _parts(columns: Sequence[_Column], count: int) -> list[list[int]]:
    """Return the indexes of the lines to merge, the largest group first, then each outlier.

    A number and a nan or inf are never merged, for any number of ranks.
    """
    measured = [column.values for column in columns if column.values]
    if not all(math.isfinite(sum(values)) for values in measured):
        kinds: dict[tuple[str, ...], list[int]] = {}
        for at in range(count):
            kind = tuple("" if math.isfinite(values[at]) else str(values[at]) for values in measured)
            kinds.setdefault(kind, []).append(at)
        if len(kinds) > 1:
            return sorted(kinds.values(), key=len, reverse=True)
    elif count >= FEWEST_FOR_OUTLIERS:
        outliers = set().union(*map(find_outliers, measured))
        if 0 < len(outliers) < count / 2:
            return [[at for at in range(count) if at not in outliers], *([at] for at in sorted(outliers))]
    return [list(range(count))]


def find_outliers(values: Sequence[float]) -> set[int]:
    """Return the indexes of outliers, by distance from the median in units of the median distance."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    least = max(OUTLIER_SHARE * abs(middle), 1e-9)
    most = max(ordered[-1] - middle, middle - ordered[0])
    if most <= least:
        return set()
    near = most / OUTLIER_SIGMAS / USUAL * 1.001
    if bisect_left(ordered, middle + near) - bisect_right(ordered, middle - near) <= len(ordered) // 2:
        return set()  # more than half are farther away, so the median distance is also larger
    usual = USUAL * sorted([abs(value - middle) for value in values])[len(values) // 2]
    limit = max(OUTLIER_SIGMAS * usual, least)
    return {at for at, value in enumerate(values) if abs(value - middle) > limit}


def _render(text: str, shape: Shape, columns: Sequence[_Column]) -> str:
    """Return the line with a summary of its variable parts."""
    pieces = []
    at = 0
    for (start, end, _kind), column in zip(shape.fields, columns):
        pieces.append(text[at:start])
        pieces.append(column.texts[0] if column.is_equal else _describe(column))
        at = end
    pieces.append(text[at:])
    return "".join(pieces)


def _describe(column: _Column) -> str:
    if column.kind == MEASURED:
        return describe_spread(column.values, column.examples)
    return SHOWN.get(column.kind, column.texts[0])


def describe_spread(values: Sequence[float], examples: Sequence[str]) -> str:
    """Return the mean and half of the range, as precise as the examples: 2.31±0.02."""
    low, high = min(values), max(values)
    if not (math.isfinite(low) and math.isfinite(high)) or low == high:
        return examples[0]
    mean, half = math.fsum(values) / len(values), (high - low) / 2
    mantissas = [text.lower().partition("e")[0] for text in examples]
    digits = max(len(mantissa.partition(".")[2]) for mantissa in mantissas)
    if any(len(mantissa) < len(text) for mantissa, text in zip(mantissas, examples)):
        return f"{mean:.{digits}e}±{half:.0e}"
    spread = f"{half:.{digits}f}"
    return f"{mean:.{digits}f}±{spread if float(spread) else f'{half:.1g}'}"
