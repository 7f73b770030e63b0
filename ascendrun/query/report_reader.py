"""Reader of the data of a report: record and events of a job, metrics of its first rank, samples, diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import Job, State, newest_stages
from ascendrun.core.metrics import MetricsLine, progress_pattern
from ascendrun.core.samples import DeviceSample, HostSample
from ascendrun.head.spool.metrics_reader import read_first_rank
from ascendrun.head.state.job_files import read_plan
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import read_placement, spool_dir
from ascendrun.head.state.store import Store
from ascendrun.health.report.data import Fewer, Material, Report, make_report, of_pipeline
from ascendrun.query.explain import explain_job

RUNS_READ = 40
"""Newest jobs among which a run of the same training on fewer ranks is looked for."""
POINTS = 1000
"""A series of samples is read at this many times of the job, or at the stored resolution if that is coarser."""


def read_report(state_dir: Path, ref: str, *, now_s: float) -> Report:
    """Read the data of a report; of a pipeline that of its current stage, with time, cost and results of all. Raises
    NotFoundError, ConflictError, StoreUnusableError."""
    with Store.open_for_reading(state_dir) as store:
        stored = store.jobs.find(ref)
        job = stored.job
        report = make_report(_read_material(store, state_dir, stored, now_s=now_s), now_s=now_s)
        report = replace(report, planned=read_plan(state_dir, job.id), fewer=_fewer(store, state_dir, stored, report))
        if job.id != ref and job.pipeline is not None and store.jobs.pipeline_id(ref) == job.pipeline:
            report = of_pipeline(report, _read_stages(store, state_dir, job.pipeline, report, now_s=now_s))
    if job.state is not State.FAILED:
        return report
    try:
        return replace(report, diagnosis=explain_job(state_dir, job.id, now_s=now_s).diagnosis)
    except AscendrunError:
        return report


def _read_stages(store: Store, state_dir: Path, pipeline: str, known: Report, *, now_s: float) -> dict[str, Report]:
    """Return the report of the newest job of each stage. `known`: one of them."""
    jobs = store.jobs.stages(pipeline)
    found = {}
    for index in newest_stages([one.job for one in jobs]):
        stored = jobs[index]
        is_known = stored.job.id == known.id
        report = known if is_known else make_report(_read_material(store, state_dir, stored, now_s=now_s), now_s=now_s)
        found[str(stored.job.stage)] = report
    return found


def _read_material(store: Store, state_dir: Path, stored: StoredJob, *, now_s: float) -> Material:
    job = stored.job
    events = store.events.of(job.id)
    until_s = job.ended_at_s if job.ended_at_s is not None else now_s
    lines: dict[int, tuple[MetricsLine, ...]] = {}
    every: dict[int, int] = {}
    for attempt in range(1, job.attempt + 1):
        lines[attempt], every[attempt] = read_first_rank(
            spool_dir(state_dir, job.id, attempt), pattern=progress_pattern(stored.spec)
        )
    devices, hosts = _read_samples(state_dir, job, since_s=job.created_at_s, until_s=until_s)
    placements = {number: read_placement(spool_dir(state_dir, job.id, number)) for number in lines}
    return Material(job, stored.spec, stored.file, events, lines, devices, hosts, every, placements)


def _fewer(store: Store, state_dir: Path, stored: StoredJob, report: Report) -> Fewer | None:
    """Return the newest run of the same training on the fewest ranks, where that is fewer than this job's; None: no
    run. The same: program, command and arguments are equal, but for the sizes of batches."""

    def training_of(spec: Mapping[str, Any]) -> tuple[Any, ...]:
        args = spec.get("args") or {}
        return spec.get("program"), spec.get("command"), {name: args[name] for name in args if "batch" not in name}

    found: list[Fewer] = []
    for one in reversed(store.jobs.all()[-RUNS_READ:]):
        if 0 < one.job.world_size < report.world_size and one.job.attempt and report.metrics.tokens_per_s:
            if training_of(one.spec) != training_of(stored.spec):
                continue
            lines, _ = read_first_rank(spool_dir(state_dir, one.job.id, one.job.attempt), most=2000)
            speeds = [line.tokens_per_s for line in lines if line.tokens_per_s and line.event is None]
            if speeds:
                ratio = report.metrics.tokens_per_s / report.world_size / (median(speeds) / one.job.world_size)
                found.append(Fewer(one.job.id, one.job.world_size, ratio))
    return min(found, key=lambda one: one.ranks, default=None)


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
        for host in job.used_hosts:
            mine = store.device_series(host=host, every_s=every_s, **window)
            devices += [device for device in mine if host not in own or device.device in own[host]]
            hosts += store.host_series(host=host, every_s=every_s, **window)
    at_s = attrgetter("at_s")
    return sorted(devices, key=at_s), sorted(hosts, key=at_s)
