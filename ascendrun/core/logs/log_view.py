"""Selection of log lines for display, and their format."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator

from ascendrun.core.dataclass import dataclass
from ascendrun.core.logs.log_lines import LogLine

FOLD_WINDOW_S = 0.3
"""Equal lines of several ranks within this time are shown as one."""

ERROR_WORDS = (
    r"\b(?:error|exception|traceback|fatal|critical|panic|segmentation fault|core dumped|out of memory|oom|killed"
    r"|assert(?:ion)?(?:error)?|abort(?:ed|ing)?|terminate called)\b|\w(?:Error|Exception)\b|\bE[IEJZ]\d{4}\b"
    r"|\bERR\d{5}\b"
)
"""Pattern of `--first` when none is given."""
NO_ERROR = r"\b(?:0|no|without) errors?\b|error(?:s|_count)?[\"']?\s*[:=]\s*(?:0\b|none\b|null\b|false\b)"


@dataclass(frozen=True)
class LogView:
    """None for hosts, ranks, since_s, until_s, tail: no restriction. `streams`: of "out" and "err".

    `patterns`: a line is selected if one of them matches, with `invert` if none does; (): every line.
    Times: UTC seconds of the head's clock. `tail`: number of selected lines of the existing log. `only_first`: of each
    rank its first selected line. `folds`: equal lines of several ranks are one line.
    """

    hosts: Collection[str] | None = None
    ranks: Collection[int] | None = None
    streams: Collection[str] = ("out", "err")
    since_s: float | None = None
    until_s: float | None = None
    patterns: tuple[str, ...] = ()
    ignore_case: bool = False
    invert: bool = False
    tail: int | None = None
    only_first: bool = False
    folds: bool = True
    has_times: bool = False
    has_prefix: bool = True

    @property
    def filters_lines(self) -> bool:
        """Whether lines of a chosen stream are filtered: its tail cannot be found by counting lines."""
        return bool(self.patterns) or self.only_first or self.since_s is not None or self.until_s is not None

    def has_host(self, host: str) -> bool:
        return self.hosts is None or host in self.hosts

    def has_rank(self, rank: int | None) -> bool:
        """Return whether the rank is selected. None: a line of no rank is selected."""
        return self.ranks is None or rank is None or rank in self.ranks

    def choose(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Return the selected lines."""
        passes = LineTest(self).passes
        return (line for line in lines if passes(line)) if self.filters_lines else iter(lines)


class LineTest:
    """Whether a line is selected; a line without a time follows the line before it in its stream."""

    def __init__(self, view: LogView) -> None:
        flags = re.IGNORECASE if view.ignore_case else 0
        self._searches: list[Callable[[str], object]] = [re.compile(text, flags).search for text in view.patterns]
        self._invert = view.invert
        self._since_s, self._until_s = view.since_s, view.until_s
        self._has_times = view.since_s is not None or view.until_s is not None
        self._passed: dict[tuple[str, int, str], bool] = {}
        if view.only_first and not view.patterns:
            self._searches = [find_error]

    def passes(self, line: LogLine) -> bool:
        if self._has_times and not self._is_in_time(line):
            return False
        if not self._searches:
            return True
        text = line.text
        return any(search(text) is not None for search in self._searches) is not self._invert

    def _is_in_time(self, line: LogLine) -> bool:
        key = (line.host, line.rank, line.stream)
        if line.at_s is not None:
            self._passed[key] = (self._since_s is None or line.at_s >= self._since_s) and (
                self._until_s is None or line.at_s <= self._until_s
            )
        return self._passed.get(key, False)


_ERROR_WORDS, _NO_ERROR = re.compile(ERROR_WORDS, re.IGNORECASE), re.compile(NO_ERROR, re.IGNORECASE)


def find_error(text: str) -> re.Match[str] | None:
    """Return the part of a line that resembles an error; None: not found, or "no error"."""
    found = _ERROR_WORDS.search(text)
    return None if found is None or _NO_ERROR.search(text) else found


def first_of_each_rank(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    seen: set[int] = set()
    for line in lines:
        if line.rank not in seen:
            seen.add(line.rank)
            yield line
