"""Reader of the data of a report: record and events of a job, metrics of its first rank, samples, diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import State
from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample
from ascendrun.head.spool.clocks import HostClock, read_clocks
from ascendrun.head.spool.metrics_reader import find_metrics, iter_lines
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.head.state.store import Store
from ascendrun.health.report.data import Material, Report, make_report

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job
    from ascendrun.health.diagnosis import Diagnosis

LINES = 150_000
"""Step lines of one attempt that are read; of more lines, every second, third … line."""
LINE_BYTES = 120
"""Bytes, less than a usual line."""
POINTS = 1000
"""A series of samples is read at this many times of the job, or at the stored resolution if that is coarser."""


def read_report(store: Store, state_dir: Path, ref: str, *, now_s: float) -> Report:
    """Read the data of a report. Raises NotFoundError, ConflictError, StoreUnusableError."""
    stored = store.find(ref)
    job = stored.job
    events = store.events(job.id)
    until_s = job.ended_at_s if job.ended_at_s is not None else now_s
    lines: dict[int, tuple[MetricsLine, ...]] = {}
    every: dict[int, int] = {}
    for attempt in range(1, job.attempt + 1):
        lines[attempt], every[attempt] = read_first_rank(spool_dir(state_dir, job.id, attempt))
    devices, hosts = _read_samples(state_dir, job, since_s=job.created_at_s, until_s=until_s)
    report = make_report(Material(job, stored.spec, stored.file, events, lines, devices, hosts, every), now_s=now_s)
    return replace(report, diagnosis=_diagnose(state_dir, job, now_s=now_s)) if job.state is State.FAILED else report


def _diagnose(state_dir: Path, job: Job, *, now_s: float) -> Diagnosis | None:
    """Return the diagnosis that `explain` makes of the failed job, None: no diagnosis."""
    from ascendrun.query.explain import explain_job

    try:
        return explain_job(state_dir, job.id, now_s=now_s).diagnosis
    except AscendrunError:
        return None


def read_first_rank(attempt_dir: Path, *, most: int = LINES) -> tuple[tuple[MetricsLine, ...], int]:
    """Return (lines of the first rank that wrote any, in the head node's time; n if every n-th step line was read)."""
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
    devices: list[DeviceSample] = []
    hosts: list[HostSample] = []
    every_s = (until_s - since_s) / POINTS
    own: dict[str, set[int]] = {}  # hosts without samples are missing
    window = {"since_s": since_s, "until_s": until_s}
    with SampleStore.open_for_reading(state_dir) as store:
        for sample in store.rank_series(job=job.id, every_s=max(every_s, 60.0), **window):
            if sample.device is not None:
                own.setdefault(sample.host, set()).add(sample.device)
        for host in job.hosts:
            mine = store.device_series(host=host, every_s=every_s, **window)
            devices += [device for device in mine if host not in own or device.device in own[host]]
            hosts += store.host_series(host=host, every_s=every_s, **window)
    at_s = attrgetter("at_s")
    return sorted(devices, key=at_s), sorted(hosts, key=at_s)


def find_report(state_dir: Path, ref: str, *, now_s: float) -> Report:
    """Find the job and read its report; opens the store. Raises NotFoundError, ConflictError, StoreUnusableError."""
    with Store.open_for_reading(state_dir) as store:
        return read_report(store, state_dir, ref, now_s=now_s)
