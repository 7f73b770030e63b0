"""Join samples, live jobs and their metrics to the view of `top`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ascendrun.core.measurement import metrics_of
from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.samples.step_times import make_step_times
from ascendrun.health.top import view
from ascendrun.text import Text

STALE_S = 60.0
"""Older samples are not current: sampling takes 5 s, a hanging tool and a retry less than a minute."""
ENDING_S = 15.0
"""Time after the end of a rank in which a sample may still list its process: tools take seconds, rounds differ."""
NEWEST_STEPS = 20
REPORTED = tuple(name for name in metrics_of(view.Progress) if name != "step_s")
"""Metrics of which the latest value counts."""
NOT_RESPONDING = ("SUSPECT", "UNREACHABLE")
WITHOUT_HOSTS = ("QUEUED", "BACKOFF")
"""States in which a job uses none of its hosts; another job may."""
BEFORE_RUNNING = ("CHECKING", "STAGING", "STARTING")


def make_view(
    *,
    now_s: float,
    devices: Sequence[DeviceSample] = (),
    hosts: Sequence[HostSample] = (),
    ranks: Sequence[RankSample] = (),
    jobs: Sequence[view.TopJob] = (),
    ended: Sequence[view.TopJob] = (),
    names: Sequence[str] = (),
    refused: Mapping[str, str | Text] | None = None,
    was_queried: bool = False,
) -> view.TopView:
    """Join the data of jobs, ranks, devices and hosts at one moment.

    Args:
        ended: jobs that ended recently: samples measured before their end list their processes.
        names: hosts to show in addition to those of samples and jobs.
        refused: hosts whose current query returned no data, and why.
        was_queried: hosts without a job were queried at all.

    Of hosts that are neither named nor used by a live job only recent samples are shown: older samples, measured
    during a job, do not describe the host now.
    """
    refused = refused or {}
    kept = {*names, *refused, *(host for job in jobs for host in job.hosts)}
    devices = [one for one in devices if one.host in kept or now_s - one.at_s <= STALE_S]
    hosts = [one for one in hosts if one.host in kept or now_s - one.at_s <= STALE_S]
    of_rank = {(one.job, one.attempt, one.rank): one for one in ranks}
    on_device, loose = _place_ranks(jobs, of_rank)
    relative = {job.id: _relative_times(job) for job in jobs}
    unreachable = {host for job in jobs for host, state in job.liveness.items() if state in NOT_RESPONDING}
    samples = {(one.host, one.device): one for one in devices}
    own = _OwnProcesses(jobs, ended, ranks)
    rows: list[view.TopRow] = []
    for key in {**samples, **on_device}:
        known: dict[str, Any] = {"host": key[0], "device": key[1], "sample": samples.get(key)}
        if key in samples:
            known.update(external_pids=own.external(samples[key]), age_s=_age(samples[key].at_s, now_s))
        here = [_rank_fields(*one, of_rank, relative, now_s) for one in on_device.get(key, ())]
        rows += [view.TopRow(**known, **fields) for fields in here or [{}]]
    rows += [view.TopRow(host=place.host, **_rank_fields(job, place, of_rank, relative, now_s)) for job, place in loose]
    seen = {row.host for row in rows}
    rows += [view.TopRow(host=one.host, age_s=_age(one.at_s, now_s)) for one in hosts if one.host not in seen]
    rows = sorted((_with_problems(row, unreachable) for row in rows), key=view.place_key)
    host_rows = _host_rows(rows, hosts, jobs, names, refused, was_queried, now_s)
    return view.TopView(
        now_s, _totals(rows, host_rows), tuple(_job_row(job, relative[job.id]) for job in jobs), host_rows, tuple(rows)
    )


def _place_ranks(
    jobs: Sequence[view.TopJob], of_rank: Mapping[tuple[str, int, int], RankSample]
) -> tuple[dict[tuple[str, int], list[tuple[view.TopJob, view.RankPlace]]], list[tuple[view.TopJob, view.RankPlace]]]:
    """Return running ranks by device, and those without. The measured device overrides the planned device."""
    on_device: dict[tuple[str, int], list[tuple[view.TopJob, view.RankPlace]]] = {}
    loose: list[tuple[view.TopJob, view.RankPlace]] = []
    for job in jobs:
        for place in job.places:
            if place.is_over:
                continue
            sample = of_rank.get((job.id, job.attempt, place.rank))
            device = place.device if sample is None or sample.device is None else sample.device
            if device is None:
                loose.append((job, place))
            else:
                on_device.setdefault((place.host, device), []).append((job, place))
    return on_device, loose


def progress_of(lines: Sequence[MetricsLine]) -> view.Progress:
    """Return the latest value of each metric in the last lines of one rank."""
    steps = [line for line in lines if line.step is not None and line.event is None]
    newest = make_step_times(steps[-NEWEST_STEPS - 1 :])
    times = [one.step_s for one in newest if one.step_s is not None]
    own = [one.own_s for one in newest if one.own_s is not None]
    return view.Progress(
        at_s=_newest(lines, "at_s"),
        **{name: _newest(lines if name == "total_steps" else steps, name) for name in REPORTED},
        step_s=median(times) if times else None,
        own_s=median(own) if own else None,
        phase=_phase(lines),
    )


def _phase(lines: Sequence[MetricsLine]) -> str | None:
    """Return the last phase that began after the last step and has not ended."""
    open_phases: list[str] = []
    for line in lines:
        if line.event is None and line.step is not None:
            open_phases = []
        elif line.phase is not None and line.begins:
            open_phases.append(line.phase)
        elif line.phase in open_phases:
            open_phases.remove(line.phase)
    return open_phases[-1] if open_phases else None


def _newest(lines: Sequence[MetricsLine], name: str) -> Any:
    return next((getattr(line, name) for line in reversed(lines) if getattr(line, name) is not None), None)


def _relative_times(job: view.TopJob) -> Mapping[int, float]:
    """Return by rank its step time divided by the others' median, without waiting if all report that."""
    own = {rank: progress.own_s for rank, progress in job.progress.items() if progress.own_s is not None}
    total = {rank: progress.step_s for rank, progress in job.progress.items() if progress.step_s is not None}
    times = own if len(own) == len(total) else total
    if len(times) < 2:
        return {}
    ordered = sorted(times.values())
    found = {}
    for rank, time_s in times.items():
        middle = _median_without(ordered, time_s)
        if middle > 0:
            found[rank] = time_s / middle
    return found


def _median_without(ordered: Sequence[float], one: float) -> float:
    """Return the median of sorted values without `one`."""
    at, count = bisect_left(ordered, one), len(ordered) - 1

    def pick(index: int) -> float:
        return ordered[index if index < at else index + 1]

    return pick(count // 2) if count % 2 else (pick(count // 2 - 1) + pick(count // 2)) / 2


class _OwnProcesses:
    """The processes of ranks, running and ended, by host and by device."""

    def __init__(self, jobs: Sequence[view.TopJob], ended: Sequence[view.TopJob], ranks: Sequence[RankSample]) -> None:
        self._of_host: dict[str, list[tuple[int, float]]] = {}
        self._used: dict[tuple[str, int], float] = {}
        job_end_s = {job.id: math.inf for job in jobs} | {job.id: job.ended_at_s or math.inf for job in ended}
        for job in (*jobs, *ended):
            for place in job.places:
                self._add(place.host, place.device, place.pid, job_end_s[job.id])
        for rank in ranks:
            self._add(rank.host, rank.device, rank.pid, job_end_s.get(rank.job, rank.at_s))

    def _add(self, host: str, device: int | None, pid: int | None, until_s: float) -> None:
        if pid is not None:
            self._of_host.setdefault(host, []).append((pid, until_s))
        if device is not None:
            self._used[host, device] = max(until_s, self._used.get((host, device), -math.inf))

    def external(self, sample: DeviceSample) -> tuple[int, ...] | None:
        """Return the processes on the device that belong to no rank, None: unknown.

        If a rank used the device at the sample's time but is not listed, a listed process may be its child.
        """
        if not sample.pids:
            return sample.pids
        measured_s = sample.at_s - ENDING_S
        own = {pid for pid, until_s in self._of_host.get(sample.host, ()) if until_s >= measured_s}
        if not own.isdisjoint(sample.pids):
            return tuple(pid for pid in sample.pids if pid not in own)
        return None if self._used.get((sample.host, sample.device), -math.inf) >= measured_s else sample.pids


def _rank_fields(
    job: view.TopJob,
    place: view.RankPlace,
    of_rank: Mapping[tuple[str, int, int], RankSample],
    relative: Mapping[str, Mapping[int, float]],
    now_s: float,
) -> dict[str, Any]:
    sample = of_rank.get((job.id, job.attempt, place.rank))
    progress = job.progress.get(place.rank, view.Progress())
    slow = job.slow.get(place.rank)
    slower_by = slow.slower_by if slow is not None and slow.slower_by is not None else relative[job.id].get(place.rank)
    return {
        "job": job.id,
        "job_name": job.name,
        "rank": place.rank,
        "rank_label": place.label,
        "pid": sample.pid if sample and sample.pid is not None else place.pid,
        "rank_sample": sample,
        "rank_age_s": _age(sample.at_s, now_s) if sample else None,
        "progress": progress,
        "slower_by": slower_by,
        "slow_cause": slow.cause if slow else None,
        "metrics_age_s": None if progress.at_s is None else _age(progress.at_s, now_s),
        "problems": ("slow",) if slow else (),
    }


def _age(at_s: float, now_s: float) -> float:
    return max(0.0, now_s - at_s)


def _with_problems(row: view.TopRow, unreachable: Collection[str]) -> view.TopRow:
    problems = {
        "health": row.metrics.health not in (None, "OK"),
        "link": row.metrics.link_up is False,
        "external": bool(row.external_pids),
        "unreachable": row.host in unreachable,
        "stale": row.age_s is not None and row.age_s > STALE_S,
    }
    found = [name for name, holds in problems.items() if holds]
    return replace(row, problems=(*row.problems, *found)) if found else row


def _host_rows(
    rows: Sequence[view.TopRow],
    samples: Sequence[HostSample],
    jobs: Sequence[view.TopJob],
    names: Sequence[str],
    refused: Mapping[str, str | Text],
    was_queried: bool,
    now_s: float,
) -> tuple[view.HostRow, ...]:
    of_host = {one.host: one for one in samples}
    rows_of, on_host = defaultdict(list), defaultdict(list)
    for row in rows:
        rows_of[row.host].append(row)
    for job in jobs:
        for host in job.hosts if (job.last_state or job.state) not in WITHOUT_HOSTS else ():
            on_host[host].append(job)
    found = []
    for host in sorted({*names, *refused, *of_host, *on_host, *rows_of}, key=view.natural_key):
        here, sample = on_host[host], of_host.get(host)
        devices = {row.device for row in rows_of[host] if row.device is not None}
        ages_s = [age_s for row in rows_of[host] for age_s in (row.age_s, row.rank_age_s) if age_s is not None]
        age_s = min(ages_s, default=None) if sample is None else _age(sample.at_s, now_s)
        liveness = next((job.liveness[host] for job in here if host in job.liveness), None)
        why = None if age_s is not None else _why(host, here, liveness, refused, was_queried)
        ids, detail = tuple(job.id for job in here), refused.get(host) if why is not None else None
        found.append(view.HostRow(host, len(devices) or None, ids, liveness, sample, age_s, why, detail))
    return tuple(found)


def _why(
    host: str, jobs: Sequence[view.TopJob], liveness: str | None, refused: Mapping[str, str | Text], was_queried: bool
) -> str:
    if liveness in NOT_RESPONDING:
        return "unreachable"
    if host in refused:
        return "no-reply"
    if any((job.last_state or job.state) in BEFORE_RUNNING for job in jobs):
        return "starting"
    return "no-samples" if jobs or was_queried else "not-queried"


def _job_row(job: view.TopJob, relative: Mapping[int, float]) -> view.JobRow:
    first = [job.progress[rank] for rank in sorted(job.progress)]
    times = [one.step_s for one in first if one.step_s is not None]

    def latest(name: str) -> Any:
        return next((getattr(one, name) for one in first if getattr(one, name) is not None), None)

    slower = {**relative, **{rank: one.slower_by for rank, one in job.slow.items() if one.slower_by is not None}}
    slowest = max(slower, key=slower.__getitem__, default=None)
    step_s = median(times) if times else None
    progress = view.Progress(**{name: latest(name) for name in REPORTED}, step_s=step_s, phase=latest("phase"))
    slower_by = None if slowest is None else slower[slowest]
    return view.JobRow(job, progress, slowest, slower_by, stragglers=tuple(sorted(job.slow)))


def _totals(rows: Sequence[view.TopRow], hosts: Sequence[view.HostRow]) -> view.Totals:
    devices = {(row.host, row.device): row for row in rows if row.device is not None}
    busy = {(row.host, row.device) for row in rows if row.device is not None and (row.job or row.external_pids)}
    samples = [row.metrics for row in devices.values()]
    power = [one.power_w for one in samples if one.power_w is not None]
    memory = [
        (one.memory_used_bytes, one.memory_total_bytes)
        for one in samples
        if one.memory_used_bytes is not None and one.memory_total_bytes is not None
    ]
    return view.Totals(
        hosts=len(hosts),
        hosts_without_data=sum(1 for host in hosts if host.why is not None),
        devices=len(devices),
        busy=len(busy),
        unhealthy=sum(1 for row in devices.values() if {"health", "link"} & set(row.problems)),
        unknown=sum(1 for one in samples if one.health is None),
        power_w=sum(power) if power else None,
        memory_used_bytes=sum(used for used, _ in memory) if memory else None,
        memory_total_bytes=sum(total for _, total in memory) if memory else None,
    )
