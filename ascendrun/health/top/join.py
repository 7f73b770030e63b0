"""From samples, live jobs and their metrics to what `top` shows."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.top.view import HostRow, JobRow, JobSeen, Progress, RankPlace, TopRow, TopView, Totals

STALE_S = 60.0
"""A figure older than this says little of now: sampling takes 5 s, a hanging tool and a retry less than a minute."""
ENDING_S = 15.0
"""So long after the end of a rank a sample may still list its process: tools take seconds, rounds differ."""
NEWEST_STEPS = 20
SILENT = ("SUSPECT", "UNREACHABLE")
ELSEWHERE = ("QUEUED", "BACKOFF")
"""States in which a job holds none of its hosts; another may have them."""
BEFORE_RUNNING = ("CHECKING", "STAGING", "STARTING")


def make_view(
    *,
    now_s: float,
    devices: Sequence[DeviceSample] = (),
    hosts: Sequence[HostSample] = (),
    ranks: Sequence[RankSample] = (),
    jobs: Sequence[JobSeen] = (),
    ended: Sequence[JobSeen] = (),
    names: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
    was_asked: bool = False,
) -> TopView:
    """Join what is known of jobs, ranks, devices and hosts at one moment.

    Args:
        ended: jobs that held hosts until a moment ago: samples measured before their end list their processes.
        names: hosts to show in addition to those of samples and jobs.
        refused: hosts that were queried just now without data, and why.
        was_asked: hosts without a job were queried at all.

    Of hosts that are neither named nor held by a live job only recent samples are shown: what was measured while a
    job ran there does not describe the host now.
    """
    refused = refused or {}
    kept = {*names, *refused, *(host for job in jobs for host in job.hosts)}
    devices = [one for one in devices if one.host in kept or now_s - one.at_s <= STALE_S]
    hosts = [one for one in hosts if one.host in kept or now_s - one.at_s <= STALE_S]
    of_rank = {(one.job, one.attempt, one.rank): one for one in ranks}
    on_device, loose = _place_ranks(jobs, of_rank)
    beside = {job.id: _beside_others(job) for job in jobs}
    silent = {host: word for job in jobs for host, word in job.liveness.items() if word in SILENT}
    samples = {(one.host, one.device): one for one in devices}
    own = _OwnProcesses(jobs, ended, ranks)
    rows: list[TopRow] = []
    for key in {**samples, **on_device}:
        here = on_device.get(key, [])
        known = _device_fields(key, samples.get(key), own, now_s)
        for job, place in here:
            fields = _rank_fields(job, place, of_rank, beside[job.id], now_s)
            rows.append(_with_problems(TopRow(**{**known, **fields}), silent))
        if not here:
            rows.append(_with_problems(TopRow(**known), silent))
    for job, place in loose:
        rows.append(
            _with_problems(TopRow(host=place.host, **_rank_fields(job, place, of_rank, beside[job.id], now_s)), silent)
        )
    seen = {row.host for row in rows}
    rows.extend(
        _with_problems(TopRow(host=one.host, age_s=_age(one.at_s, now_s)), silent)
        for one in hosts
        if one.host not in seen
    )
    rows.sort(key=place_key)
    host_rows = _host_rows(rows, hosts, jobs, names, refused, was_asked, now_s)
    return TopView(
        now_s, _totals(rows, host_rows), tuple(_job_row(job, beside[job.id]) for job in jobs), host_rows, tuple(rows)
    )


def _place_ranks(
    jobs: Sequence[JobSeen], of_rank: Mapping[tuple[str, int, int], RankSample]
) -> tuple[dict[tuple[str, int], list[tuple[JobSeen, RankPlace]]], list[tuple[JobSeen, RankPlace]]]:
    """The live ranks by the device that each has, and those that have none. What was measured counts more than what
    was given."""
    on_device: dict[tuple[str, int], list[tuple[JobSeen, RankPlace]]] = {}
    loose: list[tuple[JobSeen, RankPlace]] = []
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


def place_key(row: TopRow) -> tuple[object, ...]:
    """By host as people count (npu2 before npu10), device, rank."""
    return natural_key(row.host), row.device is None, row.device or 0, row.rank is None, row.rank or 0


def natural_key(name: str) -> tuple[object, ...]:
    """npu2 before npu10. Texts and numbers take turns, so that two keys can always be compared."""
    return tuple(int(piece) if piece.isdigit() else piece for piece in _NUMBERS.split(name))


_NUMBERS = re.compile(r"([0-9]+)")


def progress_of(lines: Sequence[MetricsLine]) -> Progress:
    """What one rank's newest lines say together; each figure is the newest that was said."""
    steps = [line for line in lines if line.step is not None and line.event is None]
    times, own = _step_times(steps[-NEWEST_STEPS - 1 :])
    return Progress(
        at_s=_newest(lines, "at_s"),
        step=_newest(steps, "step"),
        total_steps=_newest(lines, "total_steps"),
        epoch=_newest(steps, "epoch"),
        loss=_newest(steps, "loss"),
        tokens_per_s=_newest(steps, "tokens_per_s"),
        mfu=_newest(steps, "mfu"),
        step_s=median(times) if times else None,
        own_s=median(own) if own else None,
    )


def _newest(lines: Sequence[MetricsLine], name: str) -> Any:
    return next((getattr(line, name) for line in reversed(lines) if getattr(line, name) is not None), None)


def _step_times(lines: Sequence[MetricsLine]) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of each without waiting for others: as said, else from line to line."""
    said = [line for line in lines if line.step_s is not None]
    if said:
        own = [max(0.0, (line.step_s or 0.0) - line.comm_s) for line in said if line.comm_s is not None]
        return [line.step_s for line in said if line.step_s is not None], own
    times = []
    for before, after in zip(lines, lines[1:]):
        if before.at_s is None or after.at_s is None or before.step is None or after.step is None:
            continue
        if after.step > before.step and after.at_s >= before.at_s:
            times.append((after.at_s - before.at_s) / (after.step - before.step))
    return times, []


def _beside_others(job: JobSeen) -> Mapping[int, float]:
    """For each rank its time a step by the median of the others' (of what is its own, where all tell that apart)."""
    own = {rank: one.own_s for rank, one in job.progress.items() if one.own_s is not None}
    whole = {rank: one.step_s for rank, one in job.progress.items() if one.step_s is not None}
    times = own if len(own) == len(whole) else whole
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
    """The median of sorted values when one of them is left out; without sorting anew for each."""
    at, count = bisect_left(ordered, one), len(ordered) - 1

    def pick(index: int) -> float:
        return ordered[index if index < at else index + 1]

    return pick(count // 2) if count % 2 else (pick(count // 2 - 1) + pick(count // 2)) / 2


class _OwnProcesses:
    """The processes of ranks, running and ended, by host and by device."""

    def __init__(self, jobs: Sequence[JobSeen], ended: Sequence[JobSeen], ranks: Sequence[RankSample]) -> None:
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
        """The processes on the device that belong to no rank, None: unknown.

        Where a rank used the device when it was measured but its own process is not listed, a child of it may be.
        """
        if not sample.pids:
            return sample.pids
        measured_s = sample.at_s - ENDING_S
        own = {pid for pid, until_s in self._of_host.get(sample.host, ()) if until_s >= measured_s}
        if not own.isdisjoint(sample.pids):
            return tuple(pid for pid in sample.pids if pid not in own)
        return None if self._used.get((sample.host, sample.device), -math.inf) >= measured_s else sample.pids


def _device_fields(
    key: tuple[str, int], sample: DeviceSample | None, own: _OwnProcesses, now_s: float
) -> dict[str, Any]:
    known: dict[str, Any] = {"host": key[0], "device": key[1], "sample": sample}
    if sample is None:
        return known
    return {**known, "foreign_pids": own.external(sample), "age_s": _age(sample.at_s, now_s)}


def _rank_fields(
    job: JobSeen,
    place: RankPlace,
    of_rank: Mapping[tuple[str, int, int], RankSample],
    beside: Mapping[int, float],
    now_s: float,
) -> dict[str, Any]:
    sample = of_rank.get((job.id, job.attempt, place.rank))
    progress = job.progress.get(place.rank, Progress())
    slow = job.slow.get(place.rank)
    slower_by = slow.slower_by if slow is not None and slow.slower_by is not None else beside.get(place.rank)
    return {
        "job": job.id,
        "job_name": job.name,
        "rank": place.rank,
        "pid": sample.pid if sample and sample.pid is not None else place.pid,
        "cpu": sample.cpu if sample else None,
        "rss_bytes": sample.rss_bytes if sample else None,
        "rank_age_s": _age(sample.at_s, now_s) if sample else None,
        "progress": progress,
        "slower_by": slower_by,
        "slow_sign": slow.sign if slow else None,
        "metrics_age_s": None if progress.at_s is None else _age(progress.at_s, now_s),
        "problems": ("slow",) if slow else (),
    }


def _age(at_s: float, now_s: float) -> float:
    return max(0.0, now_s - at_s)


def _with_problems(row: TopRow, silent: Mapping[str, str]) -> TopRow:
    found = list(row.problems)
    if row.figures.health not in (None, "OK"):
        found.append("health")
    if row.figures.link_up is False:
        found.append("link")
    if row.foreign_pids:
        found.append("foreign")
    if row.host in silent:
        found.append("silent")
    if row.age_s is not None and row.age_s > STALE_S:
        found.append("stale")
    return row if tuple(found) == row.problems else replace(row, problems=tuple(found))


def _host_rows(
    rows: Sequence[TopRow],
    samples: Sequence[HostSample],
    jobs: Sequence[JobSeen],
    names: Sequence[str],
    refused: Mapping[str, str],
    was_asked: bool,
    now_s: float,
) -> tuple[HostRow, ...]:
    of_host = {one.host: one for one in samples}
    counts: dict[str, set[int]] = {}
    measured: dict[str, float] = {}
    for row in rows:
        if row.device is not None:
            counts.setdefault(row.host, set()).add(row.device)
        ages = [age for age in (row.age_s, row.rank_age_s) if age is not None]
        if ages:
            measured[row.host] = min([*ages, *([measured[row.host]] if row.host in measured else [])])
    on_host: dict[str, list[JobSeen]] = {}
    for job in jobs:
        for host in job.hosts if job.state not in ELSEWHERE else ():
            on_host.setdefault(host, []).append(job)
    every = {*names, *refused, *of_host, *on_host, *(row.host for row in rows)}
    found = []
    for host in sorted(every, key=natural_key):
        here, one = on_host.get(host, []), of_host.get(host)
        liveness = next((job.liveness[host] for job in here if host in job.liveness), None)
        why = None
        if one is None and host not in measured:
            why = _why(host, here, liveness, refused, was_asked)
        found.append(
            HostRow(
                host=host,
                devices=len(counts[host]) if host in counts else None,
                jobs=tuple(job.id for job in here),
                liveness=liveness,
                sample=one,
                age_s=_age(one.at_s, now_s) if one else measured.get(host),
                why=why,
                detail=refused.get(host) if why is not None else None,
            )
        )
    return tuple(found)


def _why(host: str, jobs: Sequence[JobSeen], liveness: str | None, refused: Mapping[str, str], was_asked: bool) -> str:
    if liveness in SILENT:
        return "unreachable"
    if host in refused:
        return "no-answer"
    if any(job.state in BEFORE_RUNNING for job in jobs):
        return "starting"
    return "no-samples" if jobs or was_asked else "not-asked"


def _job_row(job: JobSeen, beside: Mapping[int, float]) -> JobRow:
    first = [job.progress[rank] for rank in sorted(job.progress)]
    times = [one.step_s for one in first if one.step_s is not None]

    def say(name: str) -> Any:
        return next((getattr(one, name) for one in first if getattr(one, name) is not None), None)

    slower = {**beside, **{rank: one.slower_by for rank, one in job.slow.items() if one.slower_by is not None}}
    slowest = max(slower, key=lambda rank: slower[rank]) if slower else None
    progress = Progress(
        step=say("step"),
        total_steps=say("total_steps"),
        epoch=say("epoch"),
        loss=say("loss"),
        tokens_per_s=say("tokens_per_s"),
        mfu=say("mfu"),
        step_s=median(times) if times else None,
    )
    return JobRow(
        job,
        progress,
        slowest=slowest,
        slower_by=None if slowest is None else slower[slowest],
        stragglers=tuple(sorted(job.slow)),
    )


def _totals(rows: Sequence[TopRow], hosts: Sequence[HostRow]) -> Totals:
    devices = {(row.host, row.device): row for row in rows if row.device is not None}
    busy = {(row.host, row.device) for row in rows if row.device is not None and (row.job or row.foreign_pids)}
    figures = [row.figures for row in devices.values()]
    power = [one.power_w for one in figures if one.power_w is not None]
    memory = [
        (one.memory_used_bytes, one.memory_total_bytes)
        for one in figures
        if one.memory_used_bytes is not None and one.memory_total_bytes is not None
    ]
    return Totals(
        hosts=len(hosts),
        hosts_without=sum(1 for host in hosts if host.why is not None),
        devices=len(devices),
        busy=len(busy),
        bad=sum(1 for row in devices.values() if {"health", "link"} & set(row.problems)),
        unknown=sum(1 for one in figures if one.health is None),
        power_w=sum(power) if power else None,
        memory_used_bytes=sum(used for used, _ in memory) if memory else None,
        memory_total_bytes=sum(total for _, total in memory) if memory else None,
    )
