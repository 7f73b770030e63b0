"""Iterators of the lines of a job, stored and new, with the states of the job; events as they are written."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.errors import DeadlineExceededError, NotFoundError, UnreachableError
from ascendrun.core.events import JobEvent
from ascendrun.core.logs.folding import FoldedLine, Folder, fold, fold_each
from ascendrun.core.logs.log_lines import LogLine, merge, merge_batches
from ascendrun.core.logs.log_view import FOLD_WINDOW_S, LineTest, LogView, first_of_each_rank
from ascendrun.core.rank_env import forks_ranks
from ascendrun.head.spool.clocks import HostClock, read_clocks
from ascendrun.head.spool.spool_files import find_streams, is_complete
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.head.state.store import Store
from ascendrun.query.log_reader import StreamReader, batch_lines_for
from ascendrun.query.views import JobDetail, JobView
from ascendrun.text import Text
from ascendrun.text.format import grouped

if TYPE_CHECKING:
    from ascendrun.head.spool.grep import HostHits, Position

NEW_STREAMS_POLL_S = (0.02, 0.5)
POLL_CPU_FRACTION = 0.02
"""Fraction of a core for the search for new streams: a search of few streams is cheap and can be repeated soon."""
LINES_PER_CLOCK = 64
"""In a flood the clock, and the lines that are ready, are checked once in this many lines."""
CLOCKS_POLL_S = 60.0
LIVE_WINDOW_S = 0.2
"""Seconds that a line waits for other ranks to print the same: their bytes arrive at different times."""
BURST_WINDOW_S = 0.08
BURST_S = 0.2
"""After a pause every host sends at the same time; only in a steady stream do their batches drift apart."""
POLL_S = (0.02, 0.1)
JOB_POLL_S = (0.05, 0.25)
JOB_AGE_FRACTION = 0.25
"""Until its first attempt a job is read after this fraction of its age: who submits it waits for its first line."""
NO_RESPONSE_S = 60.0
"""Seconds that following continues while the controller does not respond."""
BATCH_LINES = 2000
COMPLETE_DEADLINE_S = 15.0
"""Seconds after the end of an attempt within which the last bytes of its logs may arrive."""


@dataclass(frozen=True)
class FollowUpdate:
    """News about a job that is followed. `detail`: its state now, None: unchanged. `problem`: the controller does not
    respond; the job keeps running. `is_incomplete`: lines of an attempt that ended have not arrived."""

    detail: JobDetail | None = None
    lines: tuple[FoldedLine, ...] = ()
    problem: Text | str | None = None
    is_incomplete: bool = False


def stored_lines(
    state_dir: Path, detail: JobDetail, attempt: int, view: LogView, *, warn: Callable[[Text], None] | None = None
) -> Iterator[FoldedLine]:
    """Yield the stored lines of an attempt, merged by time and folded. Memory does not grow with the logs, unless a
    filter and a tail are combined, and then with the tail."""
    sources = open_streams(state_dir, detail, attempt, view, warn=warn or (lambda problem: None))
    lines = chain.from_iterable(merge_batches(sources))
    shown = _fold_as(view, first_of_each_rank(lines) if view.only_first else lines)
    return iter(shown if view.tail is None else deque(shown, maxlen=view.tail))


def _fold_as(view: LogView, lines: Iterable[LogLine]) -> Iterator[FoldedLine]:
    return fold(lines, window_s=FOLD_WINDOW_S) if view.folds else fold_each(lines)


def follow_job(
    state_dir: Path, read: Callable[[str], JobDetail], ref: str, view: LogView | None = None, *, with_lines: bool = True
) -> Iterator[FollowUpdate]:
    """Yield the state and the lines of a job's newest attempt and all later ones, until it has ended and every line has
    arrived. `read` returns the job as it is now.

    Raises UnreachableError, DeadlineExceededError if the controller does not respond for a minute.
    """
    view = view or LogView()
    detail = read(ref)
    ref, attempt, logs = detail.job.id, 0, None
    no_response_mono: float | None = None
    while True:
        job = detail.job
        if job.attempt != attempt and job.attempt > 0:
            if logs is not None:
                yield from _drain(logs)
            tail, attempt = view.tail if attempt == 0 else None, job.attempt
            if with_lines:
                logs = AttemptLogs(spool_dir(state_dir, ref, attempt), attempt, view, tail=tail)
        if logs is not None:
            logs.expect_ranks(count_ranks(job, view))
        if no_response_mono is None:
            yield FollowUpdate(detail)
        if job.ended_at_s is not None:
            break
        yield from _lines_for(logs, job_poll_s(job.attempt, time.time() - job.created_at_s))
        try:
            detail = read(ref)
            no_response_mono = None
        except (UnreachableError, DeadlineExceededError) as error:
            now_s = time.monotonic()
            if no_response_mono is None:
                no_response_mono = now_s
                yield FollowUpdate(problem=error.message)
            if now_s - no_response_mono > NO_RESPONSE_S:
                raise
    if logs is not None:
        yield from _drain(logs, age_s=max(0.0, time.time() - job.ended_at_s))


def job_poll_s(attempt: int, age_s: float) -> float:
    """Return after how long the state of a job is read again. `attempt` 0: it has none."""
    shortest_s, longest_s = JOB_POLL_S
    return longest_s if attempt else min(max(JOB_AGE_FRACTION * age_s, shortest_s), longest_s)


def _lines_for(logs: AttemptLogs | None, seconds: float) -> Iterator[FollowUpdate]:
    """Yield new lines as they arrive, for this many seconds."""
    until_mono = time.monotonic() + seconds
    while time.monotonic() < until_mono:
        started_cpu_s, is_quiet = time.process_time(), True
        for update in _new_lines(logs):
            is_quiet = False
            yield update
        if is_quiet:
            pause_s = pause_after(time.process_time() - started_cpu_s, POLL_S)
            if logs is not None:
                pause_s = min(pause_s, logs.due_in_s())
            time.sleep(max(0.0, min(pause_s, until_mono - time.monotonic())))


def _new_lines(logs: AttemptLogs | None, *, final: bool = False) -> Iterator[FollowUpdate]:
    lines = iter(()) if logs is None else logs.new_lines(final=final)
    while batch := tuple(islice(lines, BATCH_LINES)):
        yield FollowUpdate(lines=batch)


def _drain(logs: AttemptLogs, *, age_s: float = 0.0) -> Iterator[FollowUpdate]:
    """Yield every line of an attempt to its last byte. `age_s`: seconds since the job ended; limits the wait."""
    deadline_mono = time.monotonic() + max(0.0, COMPLETE_DEADLINE_S - age_s)
    while logs.folder.is_dir() and not is_complete(logs.folder):
        if time.monotonic() > deadline_mono:
            yield FollowUpdate(is_incomplete=True)
            break
        yield from _lines_for(logs, POLL_S[0])
    yield from _new_lines(logs, final=True)


class AttemptLogs:
    """All selected streams of one attempt, merged and folded as they grow."""

    def __init__(self, folder: Path, attempt: int, view: LogView, *, tail: int | None = None) -> None:
        self.folder = folder
        self._attempt = attempt
        self._view = view
        self._tail = tail
        self._readers: dict[tuple[str, int, str], StreamReader] = {}
        self._search_due_s = float("-inf")
        self._folder = Folder(window_s=LIVE_WINDOW_S)
        self._clock_offset_s = time.time() - time.monotonic()
        self._is_first = True
        self._burst_s = self._received_s = float("-inf")
        self._clocks: Mapping[str, HostClock] = {}
        self._clocks_due_s = float("-inf")

    def expect_ranks(self, ranks: int | None) -> None:
        """Set how many ranks can print a line: a line that all have printed is shown immediately. None: unknown."""
        self._folder.ranks = ranks

    def new_lines(self, *, final: bool = False) -> Iterator[FoldedLine]:
        """Return the lines since the last call. Lines of the first call are folded by arrival times; later lines by the
        local clock, so that nodes whose clocks differ still fold. `final`: return all remaining lines."""
        self._find_streams(final=final)
        streams = (chain.from_iterable(reader.batches(final=final)) for reader in self._readers.values())
        lines = self._view.choose(merge(streams))
        if self._is_first and self._readers:
            self._is_first = False
            if self._tail is not None:
                yield from deque(_fold_as(self._view, lines), maxlen=self._tail)
            elif self._view.folds:
                yield from self._fold_past(lines)
                self._choose_window()
            else:
                yield from fold_each(lines)
        elif not self._view.folds:
            yield from fold_each(lines)
        else:
            while some := list(islice(lines, LINES_PER_CLOCK)):
                self._choose_window()
                now_s = self._now_s()
                yield from self._folder.take(now_s=now_s)
                self._folder.add(some, now_s=now_s)
        yield from self._folder.finish() if final else self._folder.take(now_s=self._now_s())

    def due_in_s(self) -> float:
        """Return the seconds until the first waiting line no longer waits for other ranks; inf: no line waits."""
        due_s = self._folder.due_s
        return math.inf if due_s == -math.inf else max(due_s - self._now_s(), 0.0) + 0.001

    def _choose_window(self) -> None:
        """Choose the wait of a line that arrived now: longer if others have arrived continuously."""
        now_s = time.monotonic()
        if now_s - self._received_s > BURST_S:
            self._burst_s = now_s
        self._received_s = now_s
        self._folder.window_s = BURST_WINDOW_S if now_s - self._burst_s <= BURST_S else LIVE_WINDOW_S

    def _fold_past(self, lines: Iterator[LogLine]) -> Iterator[FoldedLine]:
        past_s = 0.0
        while some := list(islice(lines, LINES_PER_CLOCK)):
            ready, past_s = self._folder.add_past(some, now_s=past_s, until_s=self._now_s())
            yield from ready

    def _now_s(self) -> float:
        """Return UTC seconds that never decrease, even if the clock is set."""
        return self._clock_offset_s + time.monotonic()

    def _find_streams(self, *, final: bool) -> None:
        now_s = time.monotonic()
        if not final and now_s < self._search_due_s:
            return
        search_started_cpu_s = time.process_time()
        view = self._view
        tail = None if view.filters_lines or not self._is_first else self._tail
        clocks = self._read_clocks()
        found = find_streams(self.folder, self._attempt, hosts=view.hosts, ranks=view.ranks, streams=view.streams)
        for files in found:
            key = (files.host, files.rank, files.stream)
            if key not in self._readers:
                self._readers[key] = StreamReader(files, tail=tail, batch_lines=batch_lines_for(len(found)))
            self._readers[key].clock = clocks.get(files.host)
        self._search_due_s = now_s + pause_after(time.process_time() - search_started_cpu_s, NEW_STREAMS_POLL_S)

    def _read_clocks(self) -> Mapping[str, HostClock]:
        """Read the clocks again periodically: they are measured while the attempt runs."""
        now_s = time.monotonic()
        if now_s >= self._clocks_due_s:
            self._clocks = read_clocks(self.folder)
            is_known = self._clocks and all(clock.readings for clock in self._clocks.values())
            self._clocks_due_s = now_s + (CLOCKS_POLL_S if is_known else 0.0)
        return self._clocks


def pause_after(cost_s: float, bounds_s: tuple[float, float]) -> float:
    """Return how long to pause after a poll that took `cost_s` of CPU time."""
    shortest_s, longest_s = bounds_s
    return min(max(cost_s / POLL_CPU_FRACTION, shortest_s), longest_s)


def count_ranks(job: JobView, view: LogView) -> int | None:
    """Return how many ranks can print a line; None if unknown: nodes are selected, or the job is not planned yet."""
    if view.hosts is not None:
        return None
    world_size = job.world_size or 0
    ranks = range(world_size) if view.ranks is None else [rank for rank in view.ranks if rank < world_size]
    return len(ranks) or None


StreamKey = tuple[str, int, str]
"""(host, rank, stream)"""


def open_streams(
    state_dir: Path, detail: JobDetail, attempt: int, view: LogView, *, warn: Callable[[Text], None]
) -> list[Iterator[list[LogLine]]]:
    """Return the requested lines of every selected stream, in batches; [] if there is no stream at all.

    `warn`: gets the nodes that could not search the lines that only they have.
    """
    from ascendrun.head.spool.grep import Wanted, make_request, query_hosts, starts_of  # connections: not to follow

    folder = spool_dir(state_dir, detail.job.id, attempt)
    clocks = read_clocks(folder)
    hits: dict[StreamKey, Sequence[LogLine]] = {}
    ends: dict[StreamKey, Position] = {}
    if view.patterns and not is_complete(folder) and detail.job.attempt == attempt:
        asked = _ranks_of(detail, view)
        starts = {host: starts_of(folder, host, attempt, ranks, view.streams) for host, ranks in asked.items()}
        wanted = Wanted(view.patterns, view.ignore_case, view.invert, view.since_s, view.until_s)
        requests = {
            host: make_request(wanted, of_host, clocks.get(host, HostClock()))
            for host, of_host in starts.items()
            if of_host
        }
        found = query_hosts(state_dir, detail.job.id, attempt, requests, clocks) if requests else []
        for one in found:
            if one.problem is None or one.lines:
                ends.update({(one.host, *key): start for key, start in starts[one.host].items()})
            hits.update({(one.host, *key): lines for key, lines in one.lines.items()})
        _report_problems(found, warn)
    files = find_streams(folder, attempt, hosts=view.hosts, ranks=view.ranks, streams=view.streams)
    sources: list[Iterator[list[LogLine]]] = []
    for stream in files:
        key = (stream.host, stream.rank, stream.stream)
        reader = StreamReader(
            stream,
            tail=None if view.filters_lines else view.tail,
            clock=clocks.get(stream.host),
            since_s=view.since_s,
            batch_lines=batch_lines_for(len(files)),
            end=ends.get(key),
        )
        more = hits.pop(key, None)
        sources.append(chain(_choose(reader.batches(final=True), view), [list(more)] if more else []))
    return [*sources, *(iter([list(lines)]) for lines in hits.values())]  # streams without any copy here


def _choose(batches: Iterator[list[LogLine]], view: LogView) -> Iterator[list[LogLine]]:
    if not view.filters_lines:
        yield from batches
        return
    passes = LineTest(view).passes
    for batch in batches:
        chosen = [line for line in batch if passes(line)]
        if chosen and view.only_first:
            yield chosen[:1]
            return
        if chosen:
            yield chosen


def _ranks_of(detail: JobDetail, view: LogView) -> dict[str, Collection[int]]:
    """Return the selected ranks of every selected node, and its own process that may start them."""
    return {
        node.host: [
            number for number in (-1 - node.node_rank, *node.ranks) if view.ranks is None or number in view.ranks
        ]
        for node in detail.nodes
        if view.hosts is None or node.host in view.hosts
    }


def _report_problems(found: Sequence[HostHits], warn: Callable[[Text], None]) -> None:
    problems = grouped((str(one.problem), one.host) for one in found if one.problem is not None)
    for problem, hosts in problems.items():
        warn(
            Text(
                "cli.grep-incomplete",
                "{hosts:hosts}: {problem}; only the lines that have arrived on this machine were searched",
                hosts=hosts,
                problem=problem,
            )
        )


def check_choice(detail: JobDetail, view: LogView) -> None:
    """Validate the selection. Raises NotFoundError for hosts or ranks that the job does not have."""
    job = detail.job
    hosts = job.pool or job.hosts
    if view.hosts is not None and not set(view.hosts) & set(hosts):
        unknown = Text("logs.no-node", "{job}: no such node: {hosts:hosts}", job=job.id, hosts=sorted(view.hosts))
        raise NotFoundError(unknown, hint=Text("logs.nodes", "its nodes are {hosts:hosts}", hosts=list(hosts)))
    if view.ranks is not None and forks_ranks(detail.spec):
        shared = Text("logs.one-file", "{job}: the ranks of a node have one output (launcher: none)", job=job.id)
        raise NotFoundError(shared, hint=Text("logs.by-node", "select nodes with --hosts: {hosts:hosts}", hosts=hosts))
    if view.ranks is not None and job.world_size and all(rank >= job.world_size for rank in view.ranks):
        unknown = Text("logs.no-rank", "{job}: no such rank: {ranks:ranks}", job=job.id, ranks=sorted(view.ranks))
        raise NotFoundError(unknown, hint=Text("logs.ranks", "its ranks are 0-{last}", last=job.world_size - 1))


class EventStream:
    """Events of one job, of a pipeline, or of all, as they are written; works without a controller.

    `pipeline`: its id; includes the jobs of all its stages, also later ones. `since_s`: no older events; `codes`: only
    these. All calls raise StoreUnusableError.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        job: str | None = None,
        pipeline: str | None = None,
        since_s: float | None = None,
        codes: Collection[str] | None = None,
    ) -> None:
        self._state_dir, self.job, self.pipeline = state_dir, job, pipeline
        self._since_s, self._codes = since_s, codes
        self._after = 0
        self._store: Store | None = None

    def new_events(self) -> tuple[JobEvent, ...]:
        """Return the events written since the last call; at the first call, the stored events."""
        store = self._open()
        events: list[JobEvent] = []
        while True:
            batch = store.events.stream(
                after=self._after, job=self.job, pipeline=self.pipeline, since_s=self._since_s, codes=self._codes
            )
            if not batch:
                return tuple(events)
            events += batch
            self._after = batch[-1].number

    def job_names(self) -> Mapping[str, str]:
        """Return the name of every job, by its id."""
        return self._open().jobs.names()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> Store:
        if self._store is not None and (self._store.is_copy or not self._store.is_in_place()):
            self.close()  # a controller may have created, migrated or replaced the file meanwhile
        if self._store is None:
            self._store = Store.open_for_reading(self._state_dir)
            if self._store.events.newest() < self._after:
                self._after = 0  # the file was rebuilt
        return self._store
