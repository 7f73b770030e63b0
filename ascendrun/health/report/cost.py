"""Use of devices: hours and energy of one job, and the hours of ended jobs and their users, for `history`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.job import ACTIVE_STATES
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
    """Use of devices by one ended job. `user`: who submitted it, None: unknown.

    `devices`: of its newest attempt. `held_s`: seconds in which it had its hosts, from the checks to the end of each
    attempt. `device_hours`: in that time, over all attempts. None: unknown, or it never had a host.
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


@dataclass(frozen=True)
class UserUse:
    """Use of devices of one type by all ended jobs of one user. `user` None: unknown.

    `unknown_jobs`: jobs that had hosts for a time, but an unknown number of devices: they are not in `device_hours`.
    """

    user: str | None
    device_type: str
    jobs: int
    device_hours: float
    unknown_jobs: int


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
    held = [(stay.attempt, (stay.end_ms - stay.start_ms) / 1000) for stay in stays if stay.state in ACTIVE_STATES]
    counts = [(count_devices(spec, job, attempt), seconds) for attempt, seconds in held if seconds]
    known = [count * seconds for count, seconds in counts if count is not None]
    same = ("id", "name", "user", "created_at_s", "started_at_s", "ended_at_s", "pipeline", "stage")
    return JobUse(
        **{name: getattr(job, name) for name in same},
        state=job.state.value,
        device_type=str((spec.get("devices") or {}).get("type") or "auto"),
        devices=count_devices(spec, job, job.attempt),
        attempts=job.attempt,
        held_s=sum(seconds for _, seconds in held),
        device_hours=sum(known) / 3600 if len(known) == len(counts) else None,
    )


def sum_users(jobs: Iterable[JobUse]) -> tuple[UserUse, ...]:
    """Return one row for each user and type of device, the most device-hours first."""
    groups: dict[tuple[str | None, str], list[JobUse]] = {}
    for job in jobs:
        groups.setdefault((job.user, job.device_type), []).append(job)
    rows = [
        UserUse(
            user=user,
            device_type=device_type,
            jobs=len(found),
            device_hours=sum(job.device_hours for job in found if job.device_hours is not None),
            unknown_jobs=sum(job.device_hours is None for job in found),
        )
        for (user, device_type), found in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.device_hours, row.user or "", row.device_type)))
