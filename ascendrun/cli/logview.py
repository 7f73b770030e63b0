"""Which lines a person wants to see, and how one looks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Optional

from ascendrun.cli.sanitise import sanitise
from ascendrun.cli.screen import Screen
from ascendrun.core.folding import FoldedLine
from ascendrun.core.loglines import LogLine, fold_ranks

FOLD_WINDOW_S = 0.3
"""Ranks that say the same within this time are shown as one line."""


@dataclass(frozen=True)
class LogView:
    """None for hosts, ranks, since_s, pattern: no restriction. `streams`: of "out" and "err".

    `since_s`: UTC seconds. `tail`: so many shown lines of what is there already, None: all.
    """

    hosts: Optional[Collection[str]] = None
    ranks: Optional[Collection[int]] = None
    streams: Collection[str] = ("out", "err")
    since_s: Optional[float] = None
    pattern: Optional[re.Pattern[str]] = None
    tail: Optional[int] = None
    has_times: bool = False
    has_prefix: bool = True

    @property
    def filters_lines(self) -> bool:
        """True when not every line of a chosen stream is shown: its tail cannot be found by counting lines."""
        return self.pattern is not None or self.since_s is not None

    def choose(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """The lines that pass; one without a time passes with the line before it in its stream."""
        passed: dict[tuple[int, str], bool] = {}
        for line in lines:
            if self.since_s is not None:
                key = (line.rank, line.stream)
                if line.at_s is not None:
                    passed[key] = line.at_s >= self.since_s
                if not passed.get(key, False):
                    continue
            if self.pattern is None or self.pattern.search(line.text):
                yield line

    def format(self, line: FoldedLine, screen: Screen) -> str:
        """`[0-3] text`, harmless, with a time when wanted."""
        text = sanitise(line.text)
        if self.has_prefix:
            text = f"{screen.paint_rank(f'[{fold_ranks(line.ranks)}]', line.ranks[0])} {text}"
        if self.has_times:
            text = f"{format_time(line.at_s)} {text}"
        return text


def format_time(at_s: Optional[float]) -> str:
    """Local time to the millisecond, with its offset from UTC; dots when it is not known."""
    if at_s is None:
        return "..." + " " * 26
    return datetime.fromtimestamp(at_s).astimezone().isoformat(timespec="milliseconds")
