"""Use of devices: hours and energy of one job, and the hours of ended jobs and their users, for `history`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.job import ACTIVE_STATES, State
from ascendrun.core.samples import DeviceSample
from ascendrun.health.report.time_use import Stay

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job
    from ascendrun.health.report.time_use import Stay


BRIDGED = 3.0
"""A gap between two samples of a device counts as measured up to this many usual intervals, and always up to:"""
BRIDGED_S = 30.0
AROUND = 4
"""Number of intervals on each side that define the usual interval."""


@dataclass(frozen=True)
class Cost:
    """Cost. `devices`: number in use by the job, None: unknown; `family`: their type. `held_s`: duration of use.

    `energy_kwh`: of the devices in that time, as far as power was measured; None: not measured.
    `energy_known`: the measured fraction of that time, 0 to 1.
    """

    devices: int | None
    device_type: str
    held_s: float
    device_hours: float | None
    energy_kwh: float | None
    energy_known: float | None


def held_spans(stays: Sequence[Stay]) -> list[tuple[float, float]]:
    """Return the merged times (start, end) at which the job used its devices."""
    spans: list[tuple[float, float]] = []
    for stay in stays:
        if stay.state in ACTIVE_STATES:
            start_s, end_s = stay.start_ms / 1000, stay.end_ms / 1000
            if spans and spans[-1][1] == start_s:
                spans[-1] = (spans[-1][0], end_s)
            else:
                spans.append((start_s, end_s))
    return spans


def count_cost(
    stays: Sequence[Stay], *, devices: int | None, device_type: str, samples: Sequence[DeviceSample]
) -> Cost:
    """Compute the cost. `samples`: of the job's devices only, in order of time."""
    spans = held_spans(stays)
    held_s = sum(end - start for start, end in spans)
    by_device: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one in samples:
        if one.power_w is not None:
            by_device.setdefault((one.host, one.device), []).append((one.at_s, one.power_w))
    joules, known_s = 0.0, 0.0
    for points in by_device.values():
        energy, seconds = integrate(points, spans)
        joules, known_s = joules + energy, known_s + seconds
    count = devices if devices is not None else len(by_device) or None
    hours = None if count is None else count * held_s / 3600
    if not known_s or not count or not held_s:
        return Cost(count, device_type, held_s, hours, None, 0.0 if count and held_s else None)
    return Cost(count, device_type, held_s, hours, joules / 3.6e6, min(1.0, known_s / (count * held_s)))


def integrate(points: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (integral over time, known seconds) within the spans, with linear interpolation between points.

    A gap much longer than those around it is unknown, except one usual interval after its first point. The usual
    interval varies along a series: older parts may be stored as means of ten minutes.
    """
    gaps = [later - earlier for (earlier, _), (later, _) in zip(points, points[1:])]
    total, known_s = 0.0, 0.0
    for index, (at, value) in enumerate(points):
        around = (gaps[max(0, index - AROUND) : index], gaps[index + 1 : index + 1 + AROUND])
        usual_s = max((median(side) for side in around if side), default=BRIDGED_S)
        end, next_value = points[index + 1] if index < len(gaps) else (at + usual_s, value)
        if end - at > max(BRIDGED_S, BRIDGED * usual_s):
            end, next_value = at + usual_s, value
        for start, stop in spans:
            low, high = max(start, at), min(stop, end)
            if low < high:
                slope = (next_value - value) / (end - at)
                total += (value + slope * ((low + high) / 2 - at)) * (high - low)
                known_s += high - low
    return total, known_s


@dataclass(frozen=True)
class JobUse:
    """Use of devices by one ended job. `user`: who submitted it, None: unknown. `project`: its label.

    `devices`: of its newest attempt. `held_s`: seconds in which it had its hosts, from the checks to the end of each
    attempt. `device_hours`: in that time, over all attempts. None: unknown, or it never had a host. Of these hours,
    `failed_hours`: in attempts that failed; `idle_hours`: in other attempts while no rank ran, that is in checks,
    staging and at the end. `waited_s`: in the queue and between attempts.
    """

    id: str
    name: str
    user: str | None
    state: str
    device_type: str
    devices: int | None
    attempts: int
    held_s: float
    device_hours: float | None
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    pipeline: str | None = None
    stage: str | None = None
    project: str | None = None
    failed_hours: float | None = None
    idle_hours: float | None = None
    waited_s: float = 0.0


@dataclass(frozen=True)
class GroupUse:
    """Use of devices of one type by all ended jobs of one `user`, `project` or `month`; the others are None, and so is
    one that is unknown. A job counts in the month of its end, in local time.

    `unknown_jobs`: jobs that had hosts for a time, but an unknown number of devices: they are not in the hours.
    """

    user: str | None
    device_type: str
    jobs: int
    device_hours: float
    unknown_jobs: int
    project: str | None = None
    month: str | None = None
    failed_hours: float = 0.0
    idle_hours: float = 0.0
    waited_s: float = 0.0


def count_devices(spec: Mapping[str, Any], job: Job, attempt: int) -> int | None:
    """Return the number of devices of an attempt; None: unknown."""
    devices = spec.get("devices") or {}
    each = len(devices.get("ids") or ()) or devices.get("per_node")
    hosts = job.hosts_of(attempt)
    if isinstance(each, int) and each > 0 and hosts:
        return each * len(hosts)
    return job.world_size or None


def measure_job(spec: Mapping[str, Any], job: Job, stays: Sequence[Stay]) -> JobUse:
    """Return the use of an ended job. `stays`: of time_use.find_stays."""
    held = [stay for stay in stays if stay.state in ACTIVE_STATES and stay.seconds]
    counts = {stay.attempt: count_devices(spec, job, stay.attempt) for stay in held}
    failed = {stay.attempt for stay in stays if stay.after in (State.BACKOFF, State.FAILED)}

    def hours(stays: Iterable[Stay]) -> float | None:
        return (
            None if None in counts.values() else sum((counts[one.attempt] or 0) * one.seconds for one in stays) / 3600
        )

    same = ("id", "name", "user", "created_at_s", "started_at_s", "ended_at_s", "pipeline", "stage")
    return JobUse(
        **{name: getattr(job, name) for name in same},
        state=job.state.value,
        device_type=str((spec.get("devices") or {}).get("type") or "auto"),
        devices=count_devices(spec, job, job.attempt),
        attempts=job.attempt,
        held_s=sum(stay.seconds for stay in held),
        device_hours=hours(held),
        project=(spec.get("labels") or {}).get("project"),
        failed_hours=hours(stay for stay in held if stay.attempt in failed),
        idle_hours=hours(stay for stay in held if stay.attempt not in failed and stay.state is not State.RUNNING),
        waited_s=sum(stay.seconds for stay in stays if stay.state in (State.QUEUED, State.BACKOFF)),
    )


GROUPS = ("user", "project", "month")


def sum_groups(jobs: Iterable[JobUse], by: str) -> tuple[GroupUse, ...]:
    """Return one row for each user, project or month and type of device: the newest month, or the most device-hours
    first."""
    groups: dict[tuple[str | None, str], list[JobUse]] = {}
    for job in jobs:
        name = _month(job.ended_at_s) if by == "month" else getattr(job, by)
        groups.setdefault((name, job.device_type), []).append(job)
    rows = []
    for (name, device_type), found in groups.items():
        totals = {
            field: sum(getattr(job, field) or 0.0 for job in found)
            for field in ("device_hours", "failed_hours", "idle_hours", "waited_s")
        }
        unknown = sum(job.device_hours is None for job in found)
        group = {"user": None, by: name, "device_type": device_type, "jobs": len(found), "unknown_jobs": unknown}
        rows.append(GroupUse(**group, **totals))  # type: ignore[arg-type]
    rows.sort(key=lambda row: (-row.device_hours, getattr(row, by) or "", row.device_type))
    return tuple(sorted(rows, key=lambda row: row.month or "", reverse=True))


def _month(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s).strftime("%Y-%m")
