"""Sources of the lines of `logs`: the head's copy, and for a pattern also data that is still only on the nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from ascendrun.core.errors import NotFoundError
from ascendrun.core.logs.log_lines import LogLine
from ascendrun.core.logs.log_view import LineTest, LogView
from ascendrun.core.rank_env import forks_ranks
from ascendrun.head.spool.clocks import HostClock, read_clocks
from ascendrun.head.spool.grep import HostHits, Position, Wanted, make_request, query_hosts, starts_of
from ascendrun.head.spool.spool_files import StreamFiles, find_streams, is_complete
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.query.log_reader import read_batches
from ascendrun.query.views import JobDetail
from ascendrun.text import Text

StreamKey = tuple[str, int, str]
"""(host, rank, stream)"""


def open_streams(
    state_dir: Path, detail: JobDetail, attempt: int, view: LogView, *, warn: Callable[[Text], None]
) -> list[Iterator[list[LogLine]]]:
    """Return the requested lines of every selected stream, in batches; [] if there is no stream at all.

    `warn`: gets the nodes that could not search the lines that only they have.
    """
    folder = spool_dir(state_dir, detail.job.id, attempt)
    clocks = read_clocks(folder)
    hits: dict[StreamKey, Sequence[LogLine]] = {}
    ends: dict[StreamKey, Position] = {}
    if view.patterns and not is_complete(folder) and detail.job.attempt == attempt:
        asked = _ranks_of(detail, view)
        starts = {host: starts_of(folder, host, attempt, ranks, view.streams) for host, ranks in asked.items()}
        found = _grep(state_dir, detail.job.id, attempt, view, starts, clocks)
        for one in found:
            if one.problem is None or one.lines:
                ends.update({(one.host, *key): start for key, start in starts[one.host].items()})
            hits.update({(one.host, *key): lines for key, lines in one.lines.items()})
        _report_problems(found, warn)
    files = find_streams(folder, attempt, hosts=view.hosts, ranks=view.ranks, streams=view.streams)
    sources = [_read(one, view, clocks, ends, hits, among=len(files)) for one in files]
    return [*sources, *(iter([list(lines)]) for lines in hits.values())]  # streams without any copy here


def _read(
    files: StreamFiles,
    view: LogView,
    clocks: Mapping[str, HostClock],
    ends: Mapping[StreamKey, Position],
    hits: dict[StreamKey, Sequence[LogLine]],
    *,
    among: int,
) -> Iterator[list[LogLine]]:
    key = (files.host, files.rank, files.stream)
    tail = None if view.filters_lines else view.tail
    batches = read_batches(
        files, tail=tail, clock=clocks.get(files.host), since_s=view.since_s, among=among, end=ends.get(key)
    )
    more = hits.pop(key, None)
    chosen = _choose(batches, view)
    return chain(chosen, iter([list(more)])) if more else chosen


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


def _grep(
    state_dir: Path,
    job_id: str,
    attempt: int,
    view: LogView,
    starts: Mapping[str, Mapping[tuple[int, str], Position]],
    clocks: Mapping[str, HostClock],
) -> list[HostHits]:
    wanted = Wanted(view.patterns, view.ignore_case, view.invert, view.since_s, view.until_s)
    requests = {
        host: make_request(wanted, of_host, clocks.get(host, HostClock()))
        for host, of_host in starts.items()
        if of_host
    }
    return query_hosts(state_dir, job_id, attempt, requests, clocks) if requests else []


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
    by_problem: dict[str, list[str]] = {}
    for one in found:
        if one.problem is not None:
            by_problem.setdefault(str(one.problem), []).append(one.host)
    for problem, hosts in by_problem.items():
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
