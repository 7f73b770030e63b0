"""Data of the log page of a job: lines of all ranks, merged, from the end of the log or from a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ascendrun.cli.options import parse_since
from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.jobs.roles import rank_labels, ranks_of_roles
from ascendrun.core.logs.log_lines import parse_ranks
from ascendrun.core.logs.log_view import LogView, find_error
from ascendrun.core.names import expand_names, split_list
from ascendrun.text import Text
from ascendrun.text.format import label_ranks

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster, JobDetail
    from ascendrun.core.logs.folding import FoldedLine

SHOWN = 400
BUDGET_S = 1.2
"""Seconds of reading for one page. What was found until then is shown, and that the search ended early."""
FEW_RANKS = 16
"""Up to this many, the ends of all streams are read; of more, what arrived in the latest of these periods."""
PERIODS_S = (10.0, 60.0, 600.0, 3600.0, 86400.0)
FIELDS = ("attempt", "ranks", "hosts", "level", "text", "at")
CHECKED_EVERY = 256

Test = Callable[[str], bool]
Value = TypeVar("Value")


def read_logs(cluster: Cluster, ref: str, query: Mapping[str, str]) -> Mapping[str, Any]:
    """Read the newest lines, or those from `at` on. Raises NotFoundError, and InvalidInputError for a field."""
    detail = cluster.jobs.detail(ref)
    asked = {name: query.get(name, "").strip() for name in FIELDS}
    attempt = _parsed("attempt", asked["attempt"], int)
    since_s, labels = _parsed("at", asked["at"], _parse_at), rank_labels(detail.nodes)

    def read_ranks(text: str) -> frozenset[int]:
        return ranks_of_roles(labels, split_list(text)) if labels and not text[0].isdigit() else parse_ranks(text)

    view = LogView(
        hosts=_parsed("hosts", asked["hosts"], _parse_hosts), ranks=_parsed("ranks", asked["ranks"], read_ranks)
    )
    search = _Search(cluster, detail, view, attempt, _test_of(asked))
    lines = search.first(since_s) if since_s is not None else search.newest()
    return {
        "id": detail.job.id,
        "name": detail.job.name,
        "state": detail.job.state,
        "asked": asked,
        "lines": [_row(line, labels) for line in lines],
        "is_cut": search.is_late,
        "is_full": since_s is not None and len(lines) == SHOWN,
    }


def _parsed(name: str, text: str, parse: Callable[[str], Value]) -> Value | None:
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidInputError([Problem(name, None, None, str(error))]) from None


def _parse_at(text: str) -> float:
    """Return UTC seconds of `@1763600000.5`, or of a time as `logs --since` accepts it."""
    return float(text[1:]) if text.startswith("@") else parse_since(text)


def _parse_hosts(text: str) -> list[str]:
    return [name for piece in split_list(text) for name in expand_names(piece)]


def _test_of(asked: Mapping[str, str]) -> Test | None:
    text, is_error = asked["text"].lower(), asked["level"] == "error"
    if not text and not is_error:
        return None
    return lambda line: text in line.lower() and (not is_error or find_error(line) is not None)


class _Search:
    """Reads lines until there are enough, or BUDGET_S is over: `is_late`."""

    def __init__(
        self, cluster: Cluster, detail: JobDetail, view: LogView, attempt: int | None, test: Test | None
    ) -> None:
        self._cluster, self._detail, self._view, self._attempt, self._test = cluster, detail, view, attempt, test
        self._until_mono = time.monotonic() + BUDGET_S
        self.is_late = False

    def first(self, since_s: float) -> list[FoldedLine]:
        """Return the first SHOWN lines that arrived at `since_s` or later."""
        found: list[FoldedLine] = []
        for line in self._lines(since_s=since_s):
            found.append(line)
            if len(found) == SHOWN:
                break
        return found

    def newest(self) -> list[FoldedLine]:
        """Return the last SHOWN lines: of ever longer periods, until there are enough."""
        job = self._detail.job
        if self._test is None and (job.world_size or 1) <= FEW_RANKS:
            return list(self._lines(tail=SHOWN))
        end_s = time.time() if job.ended_at_s is None else job.ended_at_s
        found: deque[FoldedLine] = deque()
        for period_s in (*PERIODS_S, None):
            lines = deque(self._lines(since_s=None if period_s is None else end_s - period_s), maxlen=SHOWN)
            if self.is_late and found:  # the last lines of the longer period were not reached
                break
            found = lines
            if len(found) == SHOWN or self.is_late:
                break
        return list(found)

    def _lines(self, *, since_s: float | None = None, tail: int | None = None) -> Iterator[FoldedLine]:
        view = LogView(self._view.hosts, self._view.ranks, since_s=since_s, tail=tail)
        lines = self._cluster.logs.lines(self._detail, view, attempt=self._attempt)
        for number, line in enumerate(lines):
            if self._test is None or self._test(line.text):
                yield line
            if number % CHECKED_EVERY == 0 and time.monotonic() > self._until_mono:
                self.is_late = True
                return


def _row(line: FoldedLine, labels: Mapping[int, str]) -> Mapping[str, Any]:
    first = line.lines[0]
    ranks = line.ranks
    who = Text("dashboard.node-process", "node {host}", host=first.host) if ranks[0] < 0 else label_ranks(ranks, labels)
    return {
        "at_s": line.at_s,
        "who": who,
        "host": first.host if len(ranks) == 1 else "",
        "text": line.text,
        "is_error": find_error(line.text) is not None,
    }
