"""Follows a job: its lines as they come, its changes of state, its attempts, until it has ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from ascendrun.cli.log_view import FOLD_WINDOW_S, LogView
from ascendrun.cli.output import describe_progress, describe_seconds
from ascendrun.cli.screen import Screen
from ascendrun.cluster import Cluster, JobDetail, JobView
from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.jobs.job import TERMINAL
from ascendrun.core.logs.folding import FoldedLine, Folder, fold
from ascendrun.core.logs.log_lines import LogLine, merge
from ascendrun.core.names import fold_names
from ascendrun.head.spool.clocks import HostClock, read_clocks
from ascendrun.head.spool.spool_files import find_streams, is_complete
from ascendrun.head.state.settings import spool_dir
from ascendrun.query.log_reader import StreamReader, batch_lines_for

POLL_S = (0.02, 0.1)
NEW_STREAMS_POLL_S = (0.05, 0.5)
LOOKING_SHARE = 0.02
"""Of a core, for each of the two above: a look at few streams costs little and may come soon again."""
JOB_POLL_S = 0.25
COMPLETE_DEADLINE_S = 15.0
"""How long after the end of an attempt the last bytes of its logs may take to arrive."""
BLIND_DEADLINE_S = 60.0
"""How long a controller that does not answer is put up with."""
BATCH_LINES = 2000
LOOK_LINES = 64
"""In a flood the clock, and what is ready to be shown, are looked at once in so many lines."""
CLOCKS_POLL_S = 60.0
LIVE_WINDOW_S = 0.2
"""How long a line waits for other ranks to say the same: their bytes come at different times."""
BURST_WINDOW_S = 0.08
BURST_S = 0.2
"""After silence every host sends at once; only in a stream that goes on do their batches drift apart."""

ENDED = frozenset(state.value for state in TERMINAL)


def has_ended(job: JobView) -> bool:
    return job.state in ENDED


def pipeline_of(cluster: Cluster, ref: str, job: JobView) -> JobView | None:
    """The whole pipeline, when `ref`, for which `job` was found, names one; None: it names a job."""
    whole = cluster.pipeline(ref) if job.pipeline is not None else None
    return whole if whole is not None and whole.id == job.pipeline else None


def follow_job(cluster: Cluster, job_id: str, *, screen: Screen, view: LogView, shows_lines: bool = True) -> JobDetail:
    """Returns the job once it has ended and every line is shown. KeyboardInterrupt passes through."""
    try:
        return _Following(cluster, job_id, screen, view, shows_lines).run()
    finally:
        screen.close()


class _Following:
    def __init__(self, cluster: Cluster, job_id: str, screen: Screen, view: LogView, shows_lines: bool) -> None:
        self._cluster = cluster
        self._job_id = job_id
        self._screen = screen
        self._view = view
        self._shows_lines = shows_lines
        self._state: str | None = None
        self._logs: AttemptLogs | None = None
        self._attempt = 0
        self._blind_since_s: float | None = None

    def run(self) -> JobDetail:
        detail = self._look()
        looked_s = time.monotonic()
        while not has_ended(detail.job):
            began_cpu_s = time.process_time()
            is_quiet = self._show_new_lines() == 0
            pause_s = pause_after(time.process_time() - began_cpu_s, POLL_S)
            if time.monotonic() - looked_s >= JOB_POLL_S:
                detail = self._look_again(detail)
                looked_s = time.monotonic()
            elif is_quiet:
                time.sleep(pause_s)
        self._drain(ended_s=detail.job.ended_at_s)
        return detail

    def _look(self) -> JobDetail:
        """Reads the job and tells what is new about it."""
        detail = self._cluster.job(self._job_id)
        job = detail.job
        if job.attempt != self._attempt and job.attempt > 0:
            self._begin(job)
        if self._logs is not None:
            self._logs.expect_ranks(_count_ranks(job, self._view))
        if job.state != self._state:
            self._state = job.state
            if not has_ended(job):
                self._screen.echo(describe_state(job))
        self._screen.progress("" if has_ended(job) else describe_bottom(job, time.time()))
        return detail

    def _look_again(self, before: JobDetail) -> JobDetail:
        """As `_look`; while the controller does not answer, what was known before: the job does not depend on it."""
        try:
            detail = self._look()
        except (UnreachableError, DeadlineExceededError) as error:
            now_s = time.monotonic()
            if self._blind_since_s is None:
                self._blind_since_s = now_s
                self._screen.echo(f"{error.message}; the job goes on, still trying")
            if now_s - self._blind_since_s > BLIND_DEADLINE_S:
                raise
            return before
        self._blind_since_s = None
        return detail

    def _begin(self, job: JobView) -> None:
        """A later attempt takes over only when the one before is shown to its end."""
        if self._attempt:
            self._drain()
            self._screen.echo(f"attempt {job.attempt} started")
        tail = self._view.tail if self._attempt == 0 else None
        self._attempt = job.attempt
        if self._shows_lines:
            folder = spool_dir(self._cluster.settings.state_dir, job.id, job.attempt)
            self._logs = AttemptLogs(folder, job.attempt, self._view, tail=tail)

    def _show_new_lines(self, *, final: bool = False) -> int:
        if self._logs is None:
            return 0
        count = 0
        batch: list[str] = []
        for line in self._logs.new_lines(final=final):
            batch.append(self._view.format(line, self._screen))
            count += 1
            if len(batch) >= BATCH_LINES:
                self._screen.lines(batch)
                batch.clear()
        self._screen.lines(batch)
        return count

    def _drain(self, *, ended_s: float | None = None) -> None:
        """Shows the attempt to its last byte, waiting for the bytes that are still on their way.

        `ended_s`: when the job ended; of one that ended long ago nothing more is waited for.
        """
        if self._logs is None:
            return
        age_s = 0.0 if ended_s is None else max(0.0, time.time() - ended_s)
        deadline_s = time.monotonic() + max(0.0, COMPLETE_DEADLINE_S - age_s)
        while self._logs.folder.is_dir() and not is_complete(self._logs.folder):
            if time.monotonic() > deadline_s:
                self._screen.echo("the last lines may be missing: not every node's log has arrived")
                break
            if self._show_new_lines() == 0:
                time.sleep(POLL_S[0])
        self._show_new_lines(final=True)
        self._logs = None


class AttemptLogs:
    """All chosen streams of one attempt, merged and folded as they grow."""

    def __init__(self, folder: Path, attempt: int, view: LogView, *, tail: int | None = None) -> None:
        self.folder = folder
        self._attempt = attempt
        self._view = view
        self._tail = tail
        self._readers: dict[tuple[str, int, str], StreamReader] = {}
        self._look_due_s = float("-inf")
        self._folder = Folder(window_s=LIVE_WINDOW_S)
        self._clock_offset_s = time.time() - time.monotonic()
        self._is_first = True
        self._burst_s = self._heard_s = float("-inf")
        self._clocks: Mapping[str, HostClock] = {}
        self._clocks_due_s = float("-inf")

    def expect_ranks(self, ranks: int | None) -> None:
        """How many ranks can say a line: one that all have said is shown at once. None: not known."""
        self._folder.ranks = ranks

    def new_lines(self, *, final: bool = False) -> Iterator[FoldedLine]:
        """What came since the last call. What was there at the first call folds by arrival times; what comes later by
        our own clock, so that nodes whose clocks differ still fold. `final`: everything that is left."""
        self._find_streams(final=final)
        lines = self._view.choose(merge(_read(reader, final=final) for reader in self._readers.values()))
        if self._is_first and self._readers:
            self._is_first = False
            if self._tail is None:
                yield from self._fold_past(lines)
                self._choose_window()
            else:
                yield from deque(fold(lines, window_s=FOLD_WINDOW_S), maxlen=self._tail)
        else:
            while some := list(islice(lines, LOOK_LINES)):
                self._choose_window()
                now_s = self._now_s()
                yield from self._folder.take(now_s=now_s)
                self._folder.add(some, now_s=now_s)
        yield from self._folder.finish() if final else self._folder.take(now_s=self._now_s())

    def _choose_window(self) -> None:
        """For a line that came now: it waits longer when others have been coming all the while."""
        now_s = time.monotonic()
        if now_s - self._heard_s > BURST_S:
            self._burst_s = now_s
        self._heard_s = now_s
        self._folder.window_s = BURST_WINDOW_S if now_s - self._burst_s <= BURST_S else LIVE_WINDOW_S

    def _fold_past(self, lines: Iterator[LogLine]) -> Iterator[FoldedLine]:
        past_s = 0.0
        while some := list(islice(lines, LOOK_LINES)):
            ready, past_s = self._folder.add_past(some, now_s=past_s, until_s=self._now_s())
            yield from ready

    def _now_s(self) -> float:
        """UTC seconds that never go back, whoever sets the clock."""
        return self._clock_offset_s + time.monotonic()

    def _find_streams(self, *, final: bool) -> None:
        now_s = time.monotonic()
        if not final and now_s < self._look_due_s:
            return
        began_cpu_s = time.process_time()
        view = self._view
        tail = None if view.filters_lines or not self._is_first else self._tail
        clocks = self._look_at_clocks()
        found = find_streams(self.folder, self._attempt, hosts=view.hosts, ranks=view.ranks, streams=view.streams)
        for files in found:
            key = (files.host, files.rank, files.stream)
            if key not in self._readers:
                self._readers[key] = StreamReader(files, tail=tail, batch_lines=batch_lines_for(len(found)))
            self._readers[key].clock = clocks.get(files.host)
        self._look_due_s = now_s + pause_after(time.process_time() - began_cpu_s, NEW_STREAMS_POLL_S)

    def _look_at_clocks(self) -> Mapping[str, HostClock]:
        """Read anew now and then: they are measured while the attempt runs."""
        now_s = time.monotonic()
        if now_s >= self._clocks_due_s:
            self._clocks = read_clocks(self.folder)
            is_known = self._clocks and all(clock.readings for clock in self._clocks.values())
            self._clocks_due_s = now_s + (CLOCKS_POLL_S if is_known else 0.0)
        return self._clocks


def pause_after(cost_s: float, bounds_s: tuple[float, float]) -> float:
    """How long to pause after a look that cost so much CPU time."""
    shortest_s, longest_s = bounds_s
    return min(max(cost_s / LOOKING_SHARE, shortest_s), longest_s)


def _count_ranks(job: JobView, view: LogView) -> int | None:
    """How many ranks can say a line; None when that is not known: nodes are chosen, or the job is not planned yet."""
    if view.hosts is not None:
        return None
    ranks = range(job.world_size) if view.ranks is None else [rank for rank in view.ranks if rank < job.world_size]
    return len(ranks) or None


def _read(reader: StreamReader, *, final: bool) -> Iterator[LogLine]:
    while True:
        lines = reader.read(final=final)
        if not lines:
            break
        yield from lines
    if final:
        yield from reader.finish()


def describe_state(job: JobView) -> str:
    """RUNNING on npu[01-02], 16 ranks."""
    if job.state == "RUNNING":
        return f"RUNNING on {fold_names(job.hosts)}, {job.world_size} rank{'s' if job.world_size != 1 else ''}"
    return f"{job.state}: {job.reason}" if job.reason else job.state


def describe_bottom(job: JobView, now_s: float) -> str:
    """The line at the bottom of the terminal: who, state, how long, how far."""
    since_s = job.started_at_s if job.started_at_s is not None else job.created_at_s
    parts = [f"{job.id} {job.state}", describe_seconds(now_s - since_s), describe_progress(job.progress)]
    return " · ".join(part for part in parts if part)
