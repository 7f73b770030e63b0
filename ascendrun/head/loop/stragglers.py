"""Monitor that records stragglers of running jobs; a child process searches for them once a minute."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Optional

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.head.command import run_module
from ascendrun.head.waiting import in_background
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.loop.context import Context
    from ascendrun.health.stragglers.detect import Straggler

CHECK_EVERY_S = 60.0
RESTS = 60.0
"""The pause after a search, in CPU times of the search: thousands of ranks cost 2 % of a core."""
SEARCH_S = 300.0
"""Seconds for a search, which takes a few."""
GONE_AFTER = 2
"""Consecutive checks without a straggler before it is resolved."""
APPEARED, GONE = "straggler", "straggler-resolved"
"""Codes of events."""

Key = tuple[str, Optional[int]]
"""(host, rank); rank None: the complete node."""


@dataclass(frozen=True)
class Known:
    """Stragglers that the events of a job name. `missing`: the consecutive checks in which each was not found."""

    attempt: int
    missing: Mapping[Key, int] = field(default_factory=dict)


def update_known(known: Known, found: Iterable[Straggler], *, now_s: float = 0.0) -> tuple[Known, tuple[Event, ...]]:
    """Return the known stragglers after a check, and the events to record: new and resolved stragglers.

    A rank that becomes part of a slow node is reported once more, as the node; it has not become faster.
    """
    from ascendrun.health.stragglers.detect import describe_cause, describe_slowness

    seen: dict[Key, Straggler] = {(straggler.host, straggler.rank): straggler for straggler in found}
    events: list[Event] = []
    missing: dict[Key, int] = {}
    for key in sorted(known.missing, key=str):
        if key in seen:
            missing[key] = 0
        elif (key[0], None) in seen:
            continue
        elif known.missing[key] + 1 < GONE_AFTER:
            missing[key] = known.missing[key] + 1
        else:
            host, rank = key
            gone = () if rank is None else (rank,)
            events.append(Event(GONE, {"is_node": rank is None}, (host,), gone, known.attempt, now_s))
    for key, found_now in seen.items():
        if key not in missing:
            by, fraction, cause = found_now.slower_by, found_now.step_fraction, found_now.cause
            values = {
                "slower_by": None if by is None else round(by - 1, 4),
                "step_fraction": None if fraction is None else round(fraction, 4),
                "cause": None if cause is None else cause.value,
                "is_node": found_now.rank is None,
                "finding": describe_slowness(found_now),
                "likely_cause": describe_cause(found_now),
            }
            ranks = found_now.ranks if found_now.rank is None else (found_now.rank,)
            events.append(Event(APPEARED, values, (found_now.host,), tuple(ranks), known.attempt, now_s))
            missing[key] = 0
    return Known(known.attempt, missing), tuple(events)


def known_from_events(attempt: int, events: Iterable[Event]) -> Known:
    """Return the stragglers of the current attempt that were reported before. `events`: oldest first."""
    missing: dict[Key, int] = {}
    for event in events:
        if event.attempt != attempt or event.code not in (APPEARED, GONE):
            continue
        for host in event.hosts:
            rank = None if event.values.get("is_node") or not event.ranks else event.ranks[0]
            missing.pop((host, rank), None)
            if event.code == APPEARED:
                missing[(host, rank)] = 0
    return Known(attempt, missing)


class StragglerMonitor:
    """Straggler monitor of the controller's thread; one search at a time."""

    def __init__(self, context: Context) -> None:
        self._state_dir, self._post, self._steps = context.state_dir, context.post, context.steps
        self._known: dict[str, Known] = {}
        self._due = time.monotonic() + CHECK_EVERY_S
        self._is_checking = False
        self._took_s = 0.0

    def tick(self, jobs: Iterable[Job]) -> None:
        """Call periodically with all jobs of the controller."""
        if self._is_checking or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + max(CHECK_EVERY_S, RESTS * self._took_s)
        self.check(jobs)

    def check(self, jobs: Iterable[Job]) -> None:
        """Start a check of the running jobs; the result comes in a posted call."""
        running = [job for job in jobs if job.state is State.RUNNING and job.world_size > 1]
        self._known = {job.id: known for job in running for known in (self._known.get(job.id),) if known is not None}
        if not running:
            return
        self._is_checking = True
        in_background(partial(self._check, running), "stragglers")

    def _check(self, jobs: Sequence[Job]) -> None:
        found: Mapping[str, tuple[Straggler, ...]] = {}
        took_s = 0.0
        try:
            searched, data = "ascendrun.head.loop.straggler_search", pickle.dumps(list(jobs))
            found, took_s = pickle.loads(run_module(searched, str(self._state_dir), stdin=data, timeout_s=SEARCH_S))
        except (OSError, subprocess.SubprocessError) as error:
            what = "cannot search for stragglers: {error} (next search in {next_s:.0f} s, `{command}` shows the state)"
            next_s = max(0.0, self._due - time.monotonic())
            text = Text("controller.stragglers", what, error=str(error), next_s=next_s, command="ascendrun top")
            print(f"controller: {text}", file=sys.stderr, flush=True)
        finally:
            self._post(partial(self._take, jobs, found, took_s=took_s))

    def _take(self, jobs: Sequence[Job], found: Mapping[str, tuple[Straggler, ...]], *, took_s: float) -> None:
        self._is_checking, self._took_s = False, took_s
        for job in jobs:
            if job.id not in found:
                continue
            known = self._known.get(job.id)
            if known is None or known.attempt != job.attempt:
                known = known_from_events(job.attempt, self._steps.events_of(job.id))
            known, events = update_known(known, found[job.id], now_s=time.time())
            if events:
                self._steps.record(job.id, events)
            self._known[job.id] = known
