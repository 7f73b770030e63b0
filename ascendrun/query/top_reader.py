"""Reader of the data of `top`: live jobs of the store, metrics of their ranks, the latest samples."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.jobs.job import State
from ascendrun.core.metrics import progress_pattern
from ascendrun.core.samples import Newest
from ascendrun.head.state.state_dir import StoreUnusableError, spool_dir
from ascendrun.health.top.view import Progress, RankPlace, Slow, TopJob
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job, NodeProgress
    from ascendrun.core.pulse import Sight
    from ascendrun.head.state.job_table import StoredJob

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
    from ascendrun.head.state.sample_store import SampleStore

    with SampleStore.open_for_reading(state_dir) as store:
        return store.newest(since_s=time.time() - FRESH_S if since_s is None else since_s, hosts=hosts)


class TopReader:
    """Reader that reads the store at each call, but a metrics file only if it has grown.

    `is_patient`: find stragglers in jobs of any size, once a minute, which takes seconds for many ranks. Otherwise
    those of large jobs come from the events of the job, without a cause.
    """

    def __init__(self, state_dir: Path, *, is_patient: bool = False) -> None:
        self._state_dir = state_dir
        self._is_patient = is_patient
        self._slow_of: dict[str, tuple[float, Mapping[int, Slow]]] = {}
        self._known: dict[tuple[str, int, int], tuple[tuple[int, ...], Progress]] = {}

    def read(
        self,
        *,
        now_s: float,
        sight: Sight | None = None,
        window_s: float = WINDOW_S,
        hosts: Collection[str] | None = None,
    ) -> TopInputs:
        """Read all input. `sight`: what the controller knows, None: nothing.

        Raises StoreUnusableError if the store of jobs cannot be read; unreadable samples are not an error.
        """
        newest, samples_error = Newest(), None
        try:
            newest = newest_samples(self._state_dir, since_s=now_s - window_s, hosts=hosts)
        except StoreUnusableError as error:
            samples_error = error.message
        live, over = _read_jobs(self._state_dir, {sample.job for sample in newest.ranks})
        jobs = tuple(self._job(stored, sight, now_s) for stored in live)
        alive = {job.id for job in jobs}
        self._known = {key: value for key, value in self._known.items() if key[0] in alive}
        ended = [stored for stored in live if stored.job.state not in WITH_RANKS]
        return TopInputs(jobs, newest, tuple(_ended_job(stored) for stored in (*ended, *over)), samples_error)

    def _job(self, stored: StoredJob, sight: Sight | None, now_s: float) -> TopJob:
        from ascendrun.query.views import state_now

        job = stored.job
        seen = None if sight is None else sight.job(job.id)
        state, reason = state_now(job, seen)
        nodes = job.nodes if job.state in WITH_RANKS else ()
        progress = self._progress(stored) if nodes else {}
        return TopJob(
            id=job.id,
            name=job.name,
            state=state,
            reason=reason,
            attempt=job.attempt,
            hosts=job.hosts,
            world_size=job.world_size,
            started_at_s=job.started_at_s,
            places=tuple(place for node in nodes for place in _places(stored, node)),
            progress=progress,
            slow=self._slow(job, now_s) if nodes else {},
            liveness={} if seen is None else dict(seen.liveness),
            last_state=job.state.value if state != job.state.value else "",
        )

    def _progress(self, stored: StoredJob) -> Mapping[int, Progress]:
        from ascendrun.head.spool.clocks import read_clocks
        from ascendrun.head.spool.metrics_reader import find_progress
        from ascendrun.head.spool.spool_files import size_of

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
        reported = {rank: Slow() for rank in _reported_stragglers(self._state_dir, job)}
        if job.state is not State.RUNNING or not (self._is_patient or job.world_size <= FEW_RANKS):
            return reported
        known = self._slow_of.get(job.run_id)
        if known is None or now_s - known[0] > STRAGGLERS_EVERY_S:
            known = self._slow_of[job.run_id] = now_s, _find_slow(self._state_dir, job, now_s)
        return {**reported, **known[1]}


def _reported_stragglers(state_dir: Path, job: Job) -> list[int]:
    """Return the ranks that are stragglers according to the events of the job."""
    from ascendrun.head.loop.stragglers import known_from_events
    from ascendrun.head.state.store import Store

    with Store.open_for_reading(state_dir) as store:
        events = store.events.of(job.id)
    found: list[int] = []
    for host, rank in known_from_events(job.attempt, events).missing:
        found.extend(
            [rank] if rank is not None else [one for node in job.nodes if node.host == host for one in node.ranks]
        )
    return found


def _find_slow(state_dir: Path, job: Job, now_s: float) -> Mapping[int, Slow]:
    from ascendrun.head.loop.stragglers import read_stragglers

    return {
        rank: Slow(slow.slower_by, slow.cause.value if slow.cause is not None else None, slow.since_s)
        for slow in read_stragglers(state_dir, job, now_s=now_s)
        for rank in slow.ranks
    }


def _read_progress(
    paths: Sequence[Path], clock: Any, *, with_total: bool, last_bytes: int, pattern: str | None
) -> Progress:
    from dataclasses import replace

    from ascendrun.core.metrics import parse_line
    from ascendrun.head.spool.metrics_reader import iter_lines
    from ascendrun.head.spool.spool_files import read_at
    from ascendrun.health.top.join import progress_of

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
    from ascendrun.core.errors import NotFoundError
    from ascendrun.head.state.store import Store

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
    return TopJob(
        id=job.id,
        name=job.name,
        state=job.state.value,
        reason=job.reason,
        attempt=job.attempt,
        hosts=job.hosts,
        world_size=job.world_size,
        ended_at_s=None if job.unconfirmed else job.ended_at_s,
        places=tuple(place for node in job.nodes for place in _places(stored, node)),
    )


def _places(stored: StoredJob, node: NodeProgress) -> list[RankPlace]:
    devices = devices_given(stored.spec, stored.hosts, node.host)
    return [
        RankPlace(
            rank=rank,
            host=node.host,
            pid=node.pids.get(rank),
            is_over=rank in node.exits,
            device=devices[local] if devices is not None and local < len(devices) else None,
        )
        for local, rank in enumerate(sorted(node.ranks))
    ]


def devices_given(spec: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]], name: str) -> tuple[int, ...] | None:
    """Return the devices that the plan gave the job on a host, in rank order; None: it has none (type cpu)."""
    wanted = spec.get("devices") or {}
    if wanted.get("type", "cpu") == "cpu":
        return None
    if wanted.get("ids"):
        return tuple(wanted["ids"])
    host = next((one for one in hosts if one.get("name") == name), {})
    offered = host.get("devices")
    count = wanted.get("per_node") or host.get("slots") or len(offered or ()) or 1
    return tuple(offered[:count]) if offered else tuple(range(count))
