"""Lines that many ranks write at about the same time, shown once: [0-63] step 120 loss 2.31±0.02.

What may differ is said in core/shapes.py. Measured numbers that differ are shown as mean±half of their spread. A rank
whose number is far from the others', or is none (nan), is no part of that: its line stands alone, in full, behind it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

from ascendrun.core.loglines import LogLine
from ascendrun.core.shapes import ADDRESS, MEASURED, OWN_RANK, Shape, Template, Templates

OPEN_GROUPS_LIMIT = 4096
"""More lines than this are not held back: a rank that pours out lines folds less, and memory stays bounded."""
OPEN_CHARACTERS_LIMIT = 8_000_000
LONG_LINE = 1000
"""Only longer lines count for the limit of characters: the others are bounded by the limit of groups, and are many."""
CROWD_CHECK = 128
"""After so many lines it is looked whether the two limits above are passed."""
FEWEST_FOR_OUTLIERS = 4
"""Of fewer ranks nobody can say which one is the odd one."""
OUTLIER_SIGMAS = 6.0
OUTLIER_SHARE = 0.05
"""However close the others are to each other, a number so little off is not worth a line of its own."""

FoldKey = tuple[Template, str, int]


class FoldedLine(NamedTuple):
    """What one or more ranks said, at most one line of each, in the order in which it came. `text`: one for all."""

    lines: tuple[LogLine, ...]
    text: str

    @property
    def at_s(self) -> Optional[float]:
        """When the first of them came."""
        return self.lines[0].at_s

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(line.rank for line in self.lines))


class _Group:
    """One folded line in the making."""

    __slots__ = ("characters", "key", "lines", "number", "opened_s", "shapes")

    def __init__(self, key: FoldKey, number: int, opened_s: float) -> None:
        self.key = key
        self.number = number
        self.opened_s = opened_s
        self.lines: list[LogLine] = []
        self.characters = 0
        self.shapes: list[Shape] = []


class _Peers:
    """The open groups of one key, in the order in which they opened, and their numbers."""

    __slots__ = ("groups", "numbers")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.groups: list[_Group] = []

    def join(self, last: int, since_s: float) -> Optional[_Group]:
        """The oldest group behind the rank's last line that is young enough, None: there is none."""
        newest = self.groups[-1]
        if newest.number <= last or newest.opened_s < since_s:
            return None
        if len(self.groups) == 1:
            return newest
        for group in self.groups[bisect_right(self.numbers, last):]:
            if group.opened_s >= since_s:
                return group
        return None


class Folder:
    """Folds lines as they come. A line joins an earlier one with the same template, stream and attempt when that one
    is no older than the window and no other line of the same rank would be overtaken.

    `ranks`: how many there are, so that a line which all have said need not wait for the window; None: not known.
    Both may change while lines wait.
    """

    def __init__(self, *, window_s: float, ranks: Optional[int] = None) -> None:
        self.window_s = window_s
        self.ranks = ranks
        self._find = Templates().find
        self._open: deque[_Group] = deque()
        self._by_key: dict[FoldKey, _Peers] = {}
        self._last_of_rank: dict[int, int] = {}
        self._count = 0
        self._characters = 0

    def add(self, line: LogLine, *, now_s: float) -> None:
        """`now_s`: the line's time on a clock that never goes back; one clock for all lines."""
        _at, _host, rank, stream, text, attempt = line
        template, shape = self._find(text, rank)
        key = (template, stream, attempt)
        peers = self._by_key.get(key)
        group = None
        if peers is not None:
            group = peers.join(self._last_of_rank.get(rank, -1), now_s - self.window_s)
        if group is None:
            group = self._open_group(key, peers, now_s)
        group.lines.append(line)
        group.shapes.append(shape)
        if len(text) > LONG_LINE:
            self._characters += len(text)
            group.characters += len(text)
        self._last_of_rank[rank] = group.number

    def take(self, *, now_s: float) -> list[FoldedLine]:
        """What can no longer grow, in order."""
        ready: list[FoldedLine] = []
        while self._open and self._is_done(self._open[0], now_s):
            ready += self._close_first()
        return ready

    def finish(self) -> list[FoldedLine]:
        """All that is left, in order."""
        ready: list[FoldedLine] = []
        while self._open:
            ready += self._close_first()
        return ready

    @property
    def due_s(self) -> float:
        """The first line that waits need not wait longer than this, -inf: none waits."""
        return self._open[0].opened_s + self.window_s if self._open else -math.inf

    def _is_done(self, group: _Group, now_s: float) -> bool:
        is_full = self.ranks is not None and len(group.lines) >= self.ranks
        is_crowded = len(self._open) > OPEN_GROUPS_LIMIT or self._characters > OPEN_CHARACTERS_LIMIT
        return is_full or is_crowded or now_s - group.opened_s > self.window_s

    def _open_group(self, key: FoldKey, peers: Optional[_Peers], now_s: float) -> _Group:
        group = _Group(key, self._count, now_s)
        self._count += 1
        self._open.append(group)
        if peers is None:
            peers = self._by_key[key] = _Peers()
        peers.numbers.append(group.number)
        peers.groups.append(group)
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
    """Lines in order of time, folded where ranks say the same within the window. `unfold` gives every line back."""
    folder = Folder(window_s=window_s)
    now_s, due_s = 0.0, -math.inf
    for count, line in enumerate(lines):
        at_s = line[0]
        if at_s is not None and at_s > now_s:
            now_s = at_s
        if now_s > due_s or count % CROWD_CHECK == 0:
            yield from folder.take(now_s=now_s)
            due_s = folder.due_s
        folder.add(line, now_s=now_s)
    yield from folder.finish()


def unfold(folded: Iterable[FoldedLine]) -> Iterator[LogLine]:
    """Every line that went into `fold`, the order within each rank kept."""
    for one in folded:
        yield from one.lines


# ---------------------------------------------------------------- one text for many


def summarise(lines: Sequence[LogLine], shapes: Sequence[Shape]) -> list[FoldedLine]:
    """Lines of one template as one folded line, and behind it each one whose numbers are far off. `shapes`: theirs."""
    first = lines[0].text
    if len(lines) == 1 or [line.text for line in lines].count(first) == len(lines):
        return [FoldedLine(tuple(lines), first)]
    columns = [_make_column(lines, shapes, at) for at in range(len(shapes[0].fields))]
    parts = _parts(columns, len(lines))
    if len(parts) == 1:
        return [FoldedLine(tuple(lines), _render(first, shapes[0], columns))]
    return [one for part in parts for one in summarise([lines[at] for at in part], [shapes[at] for at in part])]


class _Column(NamedTuple):
    """What stands at one variable place in every line. `values`: as numbers, () where they are none or all the same.
    `examples`: a text of each width that there is."""

    kind: str
    texts: list[str]
    values: Sequence[float]
    examples: list[str]

    @property
    def is_one(self) -> bool:
        return self.texts.count(self.texts[0]) == len(self.texts)


def _make_column(lines: Sequence[LogLine], shapes: Sequence[Shape], at: int) -> _Column:
    start, end, kind = shapes[0].fields[at]
    if shapes.count(shapes[0]) == len(shapes):
        texts = [line[4][start:end] for line in lines]
        examples = texts[:1]
    else:
        texts = [line[4][shape.fields[at][0]:shape.fields[at][1]] for line, shape in zip(lines, shapes)]
        examples = list({len(text): text for text in texts}.values())
    differs = kind == MEASURED and texts.count(texts[0]) < len(texts)
    return _Column(kind, texts, list(map(float, texts)) if differs else (), examples)


def _parts(columns: Sequence[_Column], count: int) -> list[list[int]]:
    """Which lines are shown as one: those that belong together, the most first, then each one that stands out.

    A number and no number (nan, inf) never belong together, however many ranks say either.
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
        odd = set().union(*map(find_odd, measured))
        if 0 < len(odd) < count / 2:
            return [[at for at in range(count) if at not in odd], *([at] for at in sorted(odd))]
    return [list(range(count))]


def find_odd(values: Sequence[float]) -> set[int]:
    """The places of values that do not belong: by the distance from the median, in units of the usual distance."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    least = max(OUTLIER_SHARE * abs(middle), 1e-9)
    if ordered[-1] - middle <= least and middle - ordered[0] <= least:
        return set()
    usual = 1.4826 * sorted([abs(value - middle) for value in values])[len(values) // 2]
    limit = max(OUTLIER_SIGMAS * usual, least)
    return {at for at, value in enumerate(values) if abs(value - middle) > limit}


def _render(text: str, shape: Shape, columns: Sequence[_Column]) -> str:
    """The line with what the ranks share of its variable parts."""
    pieces = []
    at = 0
    for (start, end, _kind), column in zip(shape.fields, columns):
        pieces.append(text[at:start])
        pieces.append(column.texts[0] if column.is_one else _describe(column))
        at = end
    pieces.append(text[at:])
    return "".join(pieces)


def _describe(column: _Column) -> str:
    if column.kind == MEASURED:
        return describe_spread(column.values, column.examples)
    return {OWN_RANK: "*", ADDRESS: "0x…"}.get(column.kind, column.texts[0])


def describe_spread(values: Sequence[float], examples: Sequence[str]) -> str:
    """2.31±0.02: the mean, and half of what lies between the least and the greatest; as precise as the examples."""
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
