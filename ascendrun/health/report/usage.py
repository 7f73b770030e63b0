"""Use of devices by ended jobs and their users, for `history`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.job import ACTIVE_STATES

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job
    from ascendrun.health.report.time_use import Stay


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
    return JobUse(
        id=job.id,
        name=job.name,
        user=job.user,
        state=job.state.value,
        device_type=str((spec.get("devices") or {}).get("type") or "auto"),
        devices=count_devices(spec, job, job.attempt),
        attempts=max(0, job.attempt - job.unstarted),
        held_s=sum(seconds for _, seconds in held),
        device_hours=sum(known) / 3600 if len(known) == len(counts) else None,
        created_at_s=job.created_at_s,
        started_at_s=job.started_at_s,
        ended_at_s=job.ended_at_s,
        pipeline=job.pipeline,
        stage=job.stage,
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
