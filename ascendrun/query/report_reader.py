"""The door to what a report is made from: one job's record and story, its first rank's metrics, its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.head.spool.clocks import HostClock, read_clocks
from ascendrun.head.spool.metrics_reader import find_metrics, iter_lines
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.settings import spool_dir
from ascendrun.head.state.store import Store
from ascendrun.health.report.data import EventRow, Material, Report, make_report

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job

LINES = 150_000
"""So many lines of plain steps are read of one attempt; of more, every second, third … one."""
LINE_BYTES = 120
"""A usual line is longer."""
LOOKS = 1000
"""A series of samples is read at this many moments over the job's time, or as fine as it is kept."""


def read_report(store: Store, state_dir: Path, ref: str, *, now_s: float) -> Report:
    """Raises NotFoundError, ConflictError, StoreUnusableError."""
    stored = store.find(ref)
    job = stored.job
    events = [EventRow(event.at_s, event.kind, event.text) for event in store.events(job.id)]
    until_s = job.ended_at_s if job.ended_at_s is not None else now_s
    lines: dict[int, tuple[MetricsLine, ...]] = {}
    every: dict[int, int] = {}
    for attempt in range(1, job.attempt + 1):
        lines[attempt], every[attempt] = read_first_rank(spool_dir(state_dir, job.id, attempt))
    devices, hosts = _read_samples(state_dir, job, since_s=job.created_at_s, until_s=until_s)
    return make_report(Material(job, stored.spec, stored.file, events, lines, devices, hosts, every), now_s=now_s)


def read_first_rank(attempt_dir: Path, *, most: int = LINES) -> tuple[tuple[MetricsLine, ...], int]:
    """(lines of the first rank that wrote any, with the head's times; of how many plain ones each was read)."""
    files = find_metrics(attempt_dir)
    for rank in sorted(files):
        size = sum(path.stat().st_size for path in files[rank])
        if not size:
            continue
        every = 1 + size // (most * LINE_BYTES)
        clock = read_clocks(attempt_dir).get(files[rank][0].parent.name, HostClock())
        lines = iter_lines(files[rank], every=every)
        return tuple(
            line if line.at_s is None else replace(line, at_s=clock.to_head_s(line.at_s)) for line in lines
        ), every
    return (), 1


def _read_samples(
    state_dir: Path, job: Job, *, since_s: float, until_s: float
) -> tuple[Sequence[DeviceSample], Sequence[HostSample]]:
    store = SampleStore.open_for_reading(state_dir)
    if store is None:
        return (), ()
    devices: list[DeviceSample] = []
    hosts: list[HostSample] = []
    every_s = (until_s - since_s) / LOOKS
    try:
        own = _own_devices(store.rank_series(since_s=since_s, until_s=until_s, job=job.id, every_s=max(every_s, 60.0)))
        for host in job.hosts:
            mine = store.device_series(since_s=since_s, until_s=until_s, host=host, every_s=every_s)
            devices += [one for one in mine if own.get(host) is None or one.device in own[host]]
            hosts += store.host_series(since_s=since_s, until_s=until_s, host=host, every_s=every_s)
    finally:
        store.close()
    return sorted(devices, key=_at), sorted(hosts, key=_at)


def _at(sample: DeviceSample | HostSample) -> float:
    return sample.at_s


def _own_devices(samples: Sequence[RankSample]) -> Mapping[str, set[int]]:
    """By host the devices that the job's ranks were given; a host of which nothing is known is missing."""
    found: dict[str, set[int]] = {}
    for one in samples:
        if one.device is not None:
            found.setdefault(one.host, set()).add(one.device)
    return found


def find_report(state_dir: Path, ref: str, *, now_s: float) -> Report:
    """The same with the store opened for it. Raises NotFoundError, ConflictError, StoreUnusableError."""
    from ascendrun.core.errors import NotFoundError

    store: Store | None = Store.open_for_reading(state_dir)
    if store is None:
        raise NotFoundError(f"no job {ref!r}", hint="`ascendrun ps -a` lists all jobs")
    try:
        return read_report(store, state_dir, ref, now_s=now_s)
    finally:
        store.close()
