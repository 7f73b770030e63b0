"""Data of `top`: live jobs of the store, metrics of their ranks, samples; the hosts themselves if none is recent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError, NotFoundError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import Job, NodeProgress, State
from ascendrun.core.jobs.roles import devices_of, rank_labels
from ascendrun.core.metrics import parse_line, progress_pattern
from ascendrun.core.pulse import Sight
from ascendrun.core.samples import Newest
from ascendrun.head.loop.straggler_search import read_stragglers
from ascendrun.head.loop.stragglers import known_from_events
from ascendrun.head.spool.clocks import read_clocks
from ascendrun.head.spool.metrics_reader import find_progress, iter_lines
from ascendrun.head.spool.spool_files import read_at, size_of
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import StoreUnusableError, spool_dir
from ascendrun.head.state.store import Store
from ascendrun.health.top.join import make_view, progress_of
from ascendrun.health.top.view import Progress, RankPlace, Slow, TopJob, TopView
from ascendrun.query.views import state_now
from ascendrun.text import Text

QUERY_EVERY_S = 10.0
"""Interval at which hosts that are not sampled otherwise are queried."""
KEPT_S = 30.0
"""A single refresh does not wait for hosts with samples newer than this, since npu-smi alone takes over a second. They
are shown with their age, and queried for the next refresh."""
ANSWER_S = 20.0
LATE_S = 12.0
"""Seconds after ANSWER_S at which the last reply of a controller short of CPU may still arrive."""


class TopSource:
    """Refreshes the data of `top` from stored samples, and from the named hosts themselves if none is recent.

    `sight`: what the controller knows, None: no job is live.
    `query`: (hosts, timeout_s) -> (newest, {host: why it sent no samples}). `request`: the same, without waiting.
    """

    def __init__(
        self,
        state_dir: Path,
        hosts: Sequence[Host] = (),
        *,
        sight: Callable[[], Sight | None],
        query: Callable[[Sequence[Host], float], tuple[Newest, Mapping[str, Text | str]]],
        request: Callable[[Sequence[Host]], None],
        is_patient: bool = False,
        with_progress: bool = True,
    ) -> None:
        self._state_dir = state_dir
        self.hosts = tuple(hosts)
        self._sight, self._query, self._request = sight, query, request
        self._reader = TopReader(state_dir, is_patient=is_patient, with_progress=with_progress)
        self._querying: threading.Thread | None = None
        self._queried_at_s = float("-inf")
        self._queried: tuple[Host, ...] = ()
        self._answer: tuple[Newest, Mapping[str, Text | str]] = (Newest(), {})

    def needs_query(self, *, now_s: float) -> bool:
        """Return whether a refresh that waits would query hosts, which takes a moment."""
        try:
            newest = newest_samples(self._state_dir, since_s=now_s - KEPT_S)
        except StoreUnusableError:
            newest = Newest()
        return bool(self._unsampled(newest, now_s, KEPT_S))

    def refresh(self, *, now_s: float, wait_s: float = 0.0) -> TopView:
        """Refresh the view. `wait_s`: how long to wait for queried hosts; 0: their samples appear in a later refresh.
        It does not wait if all of them have samples newer than KEPT_S.

        Raises StoreUnusableError, UnreachableError (no controller starts for the live jobs).
        """
        seen = self._reader.read(now_s=now_s, sight=self._sight())
        unsampled, queried = self._unsampled(seen.newest, now_s, QUERY_EVERY_S), False
        if wait_s > 0 and unsampled and not self._unsampled(seen.newest, now_s, KEPT_S):
            self._request(unsampled)
        else:
            queried = self._query_hosts(unsampled, now_s, wait_s)
        fresh, refused = self._answer
        if wait_s > 0 and self._querying is not None and self._querying.is_alive():
            late = Text("top.no-response", "no response within {limit_s:duration}", limit_s=wait_s)
            refused = {**refused, **{host.name: late for host in self._queried}}
        both = _newer(seen.newest, fresh)
        view = make_view(
            now_s=now_s,
            devices=both.devices,
            hosts=both.hosts,
            ranks=both.ranks,
            jobs=seen.jobs,
            ended=seen.ended,
            names=[host.name for host in self.hosts],
            refused=refused,
            was_queried=queried,
        )
        return replace(view, samples_error=seen.samples_error)

    def refresh_once(self, *, now_s: float) -> TopView:
        """Refresh as `refresh`, and wait for the hosts that are queried."""
        return self.refresh(now_s=now_s, wait_s=ANSWER_S + LATE_S)

    def _unsampled(self, newest: Newest, now_s: float, young_s: float) -> tuple[Host, ...]:
        """Return the hosts without a sample newer than `young_s`."""
        recent = {sample.host for sample in newest.devices if now_s - sample.at_s < young_s}
        recent.update(sample.host for sample in newest.hosts if now_s - sample.at_s < young_s)
        return tuple(host for host in self.hosts if host.name not in recent)

    def _query_hosts(self, hosts: Sequence[Host], now_s: float, wait_s: float) -> bool:
        if not hosts:
            return self._answer[1] != {}
        is_querying = self._querying is not None and self._querying.is_alive()
        if not is_querying and now_s - self._queried_at_s >= QUERY_EVERY_S:
            self._queried_at_s, self._queried = now_s, tuple(hosts)
            self._querying = threading.Thread(target=self._receive, args=(hosts,), daemon=True, name="query hosts")
            self._querying.start()
        if wait_s > 0 and self._querying is not None:
            self._querying.join(wait_s)
        return True

    def _receive(self, hosts: Sequence[Host]) -> None:
        try:
            newest, refused = self._query(hosts, ANSWER_S)
        except AscendrunError as error:
            newest, refused = Newest(), {host.name: error.message for host in hosts}
        self._answer = _newer(self._answer[0], newest), refused


def _newer(one: Newest, other: Newest) -> Newest:
    """Return the newer sample of each device, host and rank."""
    devices = {(it.host, it.device): it for it in sorted((*one.devices, *other.devices), key=lambda it: it.at_s)}
    hosts = {it.host: it for it in sorted((*one.hosts, *other.hosts), key=lambda it: it.at_s)}
    ranks = {(it.job, it.attempt, it.rank): it for it in sorted((*one.ranks, *other.ranks), key=lambda it: it.at_s)}
    return Newest(tuple(devices.values()), tuple(hosts.values()), tuple(ranks.values()))


WINDOW_S = 900.0
"""Samples older than this are not read; newer samples are shown with their age."""
TAIL_BYTES, LEAST_TAIL_BYTES = 4096, 2048
"""Bytes read from the end of each metrics file: about 20 lines, or 10 if there are many ranks."""
HEAD_BYTES = 4096
FEW_RANKS = 64
STRAGGLERS_EVERY_S = 60.0
FRESH_S = 60.0
"""An older sample does not describe the present state."""
WITH_RANKS = (State.STARTING, State.RUNNING, State.STOPPING)


@dataclass(frozen=True)
class TopInputs:
    """Input of `top`. `ended`: jobs and attempts that ended recently; samples may still list their processes.

    `samples_error`: why the samples could not be read, None: no error, or there are no samples.
    """

    jobs: tuple[TopJob, ...]
    newest: Newest
    ended: tuple[TopJob, ...] = ()
    samples_error: str | Text | None = None


def newest_samples(state_dir: Path, *, hosts: Collection[str] | None = None, since_s: float | None = None) -> Newest:
    """Return the newest sample of every device, host and rank; empty if nothing was measured.

    `since_s`: oldest time, None: one minute ago. Raises StoreUnusableError.
    """
    with SampleStore.open_for_reading(state_dir) as store:
        return store.newest(since_s=time.time() - FRESH_S if since_s is None else since_s, hosts=hosts)


class TopReader:
    """Reader that reads the store at each call, but a metrics file only if it has grown.

    `is_patient`: find stragglers in jobs of any size, once a minute, which takes seconds for many ranks. Otherwise
    those of large jobs come from the events of the job, without a cause. `with_progress`: read the steps of each rank.
    """

    def __init__(self, state_dir: Path, *, is_patient: bool = False, with_progress: bool = True) -> None:
        self._state_dir = state_dir
        self._is_patient, self._with_progress = is_patient, with_progress
        self._slow_of: dict[str, tuple[float, Mapping[int, Slow]]] = {}
        self._known: dict[tuple[str, int, int], tuple[tuple[int, ...], Progress]] = {}

    def read(self, *, now_s: float, sight: Sight | None = None) -> TopInputs:
        """Read all input. `sight`: what the controller knows, None: nothing.

        Raises StoreUnusableError if the store of jobs cannot be read; unreadable samples are not an error.
        """
        newest, samples_error = Newest(), None
        try:
            newest = newest_samples(self._state_dir, since_s=now_s - WINDOW_S)
        except StoreUnusableError as error:
            samples_error = error.message
        live, over = _read_jobs(self._state_dir, {sample.job for sample in newest.ranks})
        jobs = tuple(self._job(stored, sight, now_s) for stored in live)
        alive = {job.id for job in jobs}
        self._known = {key: value for key, value in self._known.items() if key[0] in alive}
        ended = [stored for stored in live if stored.job.state not in WITH_RANKS]
        return TopInputs(jobs, newest, tuple(_ended_job(stored) for stored in (*ended, *over)), samples_error)

    def _job(self, stored: StoredJob, sight: Sight | None, now_s: float) -> TopJob:
        job = stored.job
        seen = None if sight is None else sight.job(job.id)
        state, reason = state_now(job, seen)
        nodes = job.nodes if job.state in WITH_RANKS else ()
        progress = self._progress(stored) if nodes and self._with_progress else {}
        return _top_job(
            stored,
            nodes,
            state=state,
            reason=reason,
            started_at_s=job.started_at_s,
            progress=progress,
            slow=self._slow(job, now_s) if nodes else {},
            liveness={} if seen is None else dict(seen.liveness),
            last_state=job.state.value if state != job.state.value else "",
        )

    def _progress(self, stored: StoredJob) -> Mapping[int, Progress]:
        job = stored.job
        attempt_dir = spool_dir(self._state_dir, job.id, job.attempt)
        clocks = None
        hosts = {rank: node.host for node in job.nodes for rank in node.ranks}
        found: dict[int, Progress] = {}
        for rank, paths in find_progress(attempt_dir).items():
            key, sizes = (job.id, job.attempt, rank), tuple(size_of(path) for path in paths)
            known = self._known.get(key)
            if known is None or known[0] != sizes:
                clocks = read_clocks(attempt_dir) if clocks is None else clocks
                clock = clocks.get(hosts.get(rank, ""))
                known = (
                    sizes,
                    _read_progress(
                        paths,
                        clock,
                        with_total=not found,
                        last_bytes=TAIL_BYTES if len(hosts) <= FEW_RANKS else LEAST_TAIL_BYTES,
                        pattern=progress_pattern(stored.spec),
                    ),
                )
                self._known[key] = known
            found[rank] = known[1]
        return found

    def _slow(self, job: Job, now_s: float) -> Mapping[int, Slow]:
        with Store.open_for_reading(self._state_dir) as store:
            events = store.events.of(job.id)
        ranks_of = {node.host: node.ranks for node in job.nodes}
        missing = known_from_events(job.attempt, events).missing
        stragglers = (ranks_of.get(host, ()) if rank is None else (rank,) for host, rank in missing)
        reported = {rank: Slow() for ranks in stragglers for rank in ranks}
        if job.state is not State.RUNNING or not (self._is_patient or job.world_size <= FEW_RANKS):
            return reported
        known = self._slow_of.get(job.run_id)
        if known is None or now_s - known[0] > STRAGGLERS_EVERY_S:
            found = {
                rank: Slow(slow.slower_by, slow.cause.value if slow.cause is not None else None, slow.since_s)
                for slow in read_stragglers(self._state_dir, job, now_s=now_s)
                for rank in slow.ranks
            }
            known = self._slow_of[job.run_id] = now_s, found
        return {**reported, **known[1]}


def _read_progress(
    paths: Sequence[Path], clock: Any, *, with_total: bool, last_bytes: int, pattern: str | None
) -> Progress:
    progress = progress_of(tuple(iter_lines(paths, last_bytes=last_bytes, pattern=pattern)))
    if clock is not None and progress.at_s is not None:
        progress = replace(progress, at_s=clock.to_head_s(progress.at_s))
    if with_total and progress.total_steps is None and paths:
        first = [parse_line(line) for line in read_at(paths[0], 0, HEAD_BYTES).split(b"\n")[:-1]]
        totals = [line.total_steps for line in first if line is not None and line.total_steps is not None]
        progress = replace(progress, total_steps=totals[-1] if totals else None)
    return progress


def _read_jobs(state_dir: Path, measured: Collection[str]) -> tuple[list[StoredJob], list[StoredJob]]:
    """Return (live jobs, jobs of `measured` that have ended)."""
    live: list[StoredJob] = []
    over: list[StoredJob] = []
    with Store.open_for_reading(state_dir) as store:
        for stored in store.jobs.live():
            (over if stored.job.is_terminal else live).append(stored)
        for job_id in sorted(set(measured) - {stored.job.id for stored in (*live, *over)}):
            with contextlib.suppress(NotFoundError):
                over.append(store.jobs.find(job_id))
    return live, over


def _ended_job(stored: StoredJob) -> TopJob:
    """Return the locations of the ranks of its last attempt. Hosts that did not confirm the end may still run them."""
    job = stored.job
    ended_at_s = None if job.unconfirmed else job.ended_at_s
    return _top_job(stored, job.nodes, state=job.state.value, reason=job.reason, ended_at_s=ended_at_s)


def _top_job(stored: StoredJob, nodes: Sequence[NodeProgress], **values: Any) -> TopJob:
    same = {name: getattr(stored.job, name) for name in ("id", "name", "attempt", "hosts", "world_size")}
    labels = rank_labels(nodes)
    return TopJob(**same, **values, places=tuple(place for node in nodes for place in _places(stored, node, labels)))


def _places(stored: StoredJob, node: NodeProgress, labels: Mapping[int, str]) -> list[RankPlace]:
    devices = devices_given(devices_of(stored.spec, node.role), stored.hosts, node.host)
    return [
        RankPlace(
            rank=rank,
            label=labels.get(rank),
            host=node.host,
            pid=node.pids.get(rank),
            is_over=rank in node.exits,
            device=devices[local] if devices is not None and local < len(devices) else None,
        )
        for local, rank in enumerate(sorted(node.ranks))
    ]


def devices_given(wanted: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]], name: str) -> tuple[int, ...] | None:
    """Return the devices that the plan gave the job on a host, in rank order; None: it has none (type cpu). `wanted`:
    `devices` of the job file for this host."""
    if wanted.get("type", "cpu") == "cpu":
        return None
    if wanted.get("ids"):
        return tuple(wanted["ids"])
    host = next((one for one in hosts if one.get("name") == name), {})
    offered = host.get("devices")
    count = wanted.get("per_node") or host.get("slots") or len(offered or ()) or 1
    return tuple(offered[:count]) if offered else tuple(range(count))
