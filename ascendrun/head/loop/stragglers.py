"""Detector that finds and records stragglers of running jobs once a minute, in a separate thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.samples import Newest
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.head.waiting import in_background

if TYPE_CHECKING:
    from ascendrun.head.loop.context import Context
    from ascendrun.health.stragglers.detect import Straggler

# Modules for a check are imported by the first check, in its thread: the controller has jobs to start.

CHECK_EVERY_S = 60.0
RESTS = 30.0
"""The pause after a check, in CPU times of the check: thousands of ranks cost 3 % of a core."""
SAMPLES_S = 600.0
READ_BYTES = 16 * 1024 * 1024
"""Bytes that one check reads of the metrics of all ranks together;"""
LEAST_BYTES, MOST_BYTES = 8 * 1024, 64 * 1024
"""and of one rank: enough for some windows of steps."""
FEW_DEVICES = 256
"""Above this number of ranks the 1-minute means of devices are read."""
GONE_AFTER = 2
"""Consecutive checks without a straggler before it is resolved."""
APPEARED, GONE = "straggler", "straggler-resolved"
"""Codes of events."""

Key = tuple[str, Optional[int]]
"""(host, rank); rank None: the complete node."""


def read_stragglers(state_dir: Path, job: Job, *, now_s: float) -> tuple[Straggler, ...]:
    """Return stragglers of the current attempt, from data on this machine. Unreadable samples count as none."""
    from ascendrun.head.spool.clocks import HostClock, read_clocks
    from ascendrun.head.spool.metrics_reader import find_metrics, iter_lines
    from ascendrun.health.samples.step_times import make_step_times
    from ascendrun.health.stragglers.detect import find_stragglers

    hosts_of_ranks = {rank: node.host for node in job.nodes for rank in node.ranks}
    attempt_dir = spool_dir(state_dir, job.id, job.attempt)
    files = find_metrics(attempt_dir, ranks=hosts_of_ranks)
    last_bytes = min(MOST_BYTES, max(LEAST_BYTES, READ_BYTES // max(1, len(files))))
    clocks = read_clocks(attempt_dir)
    steps = {}
    for rank, paths in files.items():
        clock = clocks.get(hosts_of_ranks[rank], HostClock())
        lines = iter_lines(paths, last_bytes=last_bytes)
        steps[rank] = make_step_times(lines, to_head_s=clock.to_head_s, error_s=clock.error_s)
    samples = _read_samples(
        state_dir, job.id, frozenset(job.hosts), now_s=now_s, few=len(hosts_of_ranks) <= FEW_DEVICES
    )
    found: list[Straggler] = []
    for role in dict.fromkeys(node.role for node in job.nodes):  # those of others do other work
        own = {rank: node.host for node in job.nodes if node.role == role for rank in node.ranks}
        own_steps = {rank: times for rank, times in steps.items() if rank in own}
        found += find_stragglers(own_steps, samples, hosts_of_ranks=own, now_s=now_s)
    return tuple(found)


def _read_samples(state_dir: Path, job_id: str, hosts: frozenset[str], *, now_s: float, few: bool) -> Newest:
    from ascendrun.head.state.sample_store import SampleStore

    try:
        with SampleStore.open_for_reading(state_dir) as store:
            window = {"since_s": now_s - SAMPLES_S, "until_s": now_s + 1.0, "every_s": 0.0 if few else 60.0}
            return Newest(
                store.device_series(host=hosts, **window),
                store.host_series(host=hosts, **window),
                store.rank_series(job=job_id, **window),
            )
    except AscendrunError:
        return Newest()


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
    """Straggler monitor of the controller's thread; a check runs in its own thread, one at a time."""

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
        found: dict[str, tuple[Straggler, ...]] = {}
        try:
            for job in jobs:
                found[job.id] = read_stragglers(self._state_dir, job, now_s=time.time())
        finally:
            took_s = time.thread_time()
            self._post(lambda: self._take(jobs, found, took_s=took_s))

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
