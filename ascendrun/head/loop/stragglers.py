"""Finds stragglers of running jobs once a minute, in a thread next to the controller's loop, and records them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Optional

from ascendrun.core.errors import AscendrunError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.samples import Newest
from ascendrun.head.state.state_dir import spool_dir

if TYPE_CHECKING:
    from ascendrun.health.stragglers.detect import Straggler

# What a look needs is imported by the first one, in its thread: the controller has jobs to start.

LOOK_EVERY_S = 60.0
RESTS = 30.0
"""So many times as long as a look took of a core, the next one waits: thousands of ranks cost 3 % of a core as well."""
SAMPLES_S = 600.0
READ_BYTES = 16 * 1024 * 1024
"""What one look reads of all ranks' metrics together;"""
LEAST_BYTES, MOST_BYTES = 8 * 1024, 64 * 1024
"""of one rank so much: enough for some windows of steps."""
FEW_DEVICES = 256
"""Of more devices than these the means of minutes are looked at."""
GONE_AFTER = 2
"""Looks in a row without it, before a straggler is told to keep up again."""
APPEARED, GONE = "straggler", "straggler-resolved"
"""Codes of events."""

Key = tuple[str, Optional[int]]
"""(host, rank); rank None: the whole node."""


def look_for_stragglers(state_dir: Path, job: Job, *, now_s: float) -> tuple[Straggler, ...]:
    """Those of the job's present attempt, from what is on the head. Samples that cannot be read count as none."""
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
    return find_stragglers(steps, samples, hosts_of_ranks=hosts_of_ranks, now_s=now_s)


def _read_samples(state_dir: Path, job_id: str, hosts: frozenset[str], *, now_s: float, few: bool) -> Newest:
    from ascendrun.head.state.sample_store import SampleStore

    try:
        with SampleStore.open_for_reading(state_dir) as store:
            window = {"since_s": now_s - SAMPLES_S, "until_s": now_s + 1.0, "every_s": 0.0 if few else 60.0}
            return Newest(
                tuple(sample for sample in store.device_series(**window) if sample.host in hosts),
                tuple(sample for sample in store.host_series(**window) if sample.host in hosts),
                store.rank_series(job=job_id, **window),
            )
    except AscendrunError:
        return Newest()


@dataclass(frozen=True)
class Known:
    """The stragglers that the events of a job name. `missing`: for how many checks in a row each was not found."""

    attempt: int
    missing: Mapping[Key, int] = field(default_factory=dict)


def take_look(known: Known, found: Iterable[Straggler], *, now_s: float = 0.0) -> tuple[Known, tuple[Event, ...]]:
    """What is known after a check, and the events to record: who appeared, who is gone.

    A rank that becomes part of a slow node is reported once more, as the node; it has not become faster.
    """
    from ascendrun.health.stragglers.text import describe_cause, describe_slowness

    seen: dict[Key, Straggler] = {(one.host, one.rank): one for one in found}
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
    for key, one in seen.items():
        if key not in missing:
            values = {
                "slower_by": None if one.slower_by is None else round(one.slower_by - 1, 4),
                "step_fraction": None if one.step_fraction is None else round(one.step_fraction, 4),
                "cause": None if one.cause is None else one.cause.value,
                "is_node": one.rank is None,
                "finding": describe_slowness(one),
                "likely_cause": describe_cause(one),
            }
            ranks = one.ranks if one.rank is None else (one.rank,)
            events.append(Event(APPEARED, values, (one.host,), tuple(ranks), known.attempt, now_s))
            missing[key] = 0
    return Known(known.attempt, missing), tuple(events)


def known_from_events(attempt: int, events: Iterable[Event]) -> Known:
    """The stragglers of the present attempt that an earlier controller has reported. `events`: oldest first."""
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
    """Belongs to the controller's thread; a look itself runs in a thread of its own, one at a time.

    `post`: runs a call in the controller's thread. `record`: stores events of a job, may raise.
    `events_of`: those of a job so far, oldest first.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        post: Callable[[Callable[[], None]], None],
        record: Callable[[str, Sequence[Event]], None],
        events_of: Callable[[str], Iterable[Event]],
    ) -> None:
        self._state_dir = state_dir
        self._post, self._record, self._events_of = post, record, events_of
        self._known: dict[str, Known] = {}
        self._due = time.monotonic() + LOOK_EVERY_S
        self._is_looking = False
        self._took_s = 0.0

    def tick(self, jobs: Iterable[Job]) -> None:
        """To be called now and then with all jobs of the controller."""
        if self._is_looking or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + max(LOOK_EVERY_S, RESTS * self._took_s)
        self.look(jobs)

    def look(self, jobs: Iterable[Job]) -> None:
        """Begins a look at those of the jobs that run; what it finds is told by a posted call."""
        running = [job for job in jobs if job.state is State.RUNNING and job.world_size > 1]
        self._known = {job.id: known for job in running for known in (self._known.get(job.id),) if known is not None}
        if not running:
            return
        self._is_looking = True
        threading.Thread(target=self._look, args=(running,), name="stragglers", daemon=True).start()

    def _look(self, jobs: Sequence[Job]) -> None:
        found: dict[str, tuple[Straggler, ...]] = {}
        try:
            for job in jobs:
                found[job.id] = look_for_stragglers(self._state_dir, job, now_s=time.time())
        finally:
            took_s = time.thread_time()
            self._post(lambda: self._looked(jobs, found, took_s=took_s))

    def _looked(self, jobs: Sequence[Job], found: Mapping[str, tuple[Straggler, ...]], *, took_s: float) -> None:
        self._is_looking, self._took_s = False, took_s
        for job in jobs:
            if job.id not in found:
                continue
            known = self._known.get(job.id)
            if known is None or known.attempt != job.attempt:
                known = known_from_events(job.attempt, self._events_of(job.id))
            known, events = take_look(known, found[job.id], now_s=time.time())
            if events:
                self._record(job.id, events)
            self._known[job.id] = known
