"""Readers of past jobs: their use of devices, their running time and the nodes that they lost."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ascendrun.core.jobs.job import Cause
from ascendrun.core.jobs.lifecycle import state_changes
from ascendrun.health.forecast import History, JobTimeline, sum_up
from ascendrun.health.report.cost import JobUse, measure_job
from ascendrun.health.report.time_use import find_stays

if TYPE_CHECKING:
    from ascendrun.core.events import Event
    from ascendrun.head.state.store import Store

EVENTS_AT_ONCE = 10_000


def read_history(store: Store, *, since_s: float | None = None, user: str | None = None) -> tuple[JobUse, ...]:
    """Return the use of devices by each job that ended after `since_s`, the newest end first; None: of all, and of all
    users."""
    chosen = {
        stored.job.id: stored
        for stored in store.jobs.all()
        if stored.job.is_terminal
        and (since_s is None or (stored.job.ended_at_s or 0.0) >= since_s)
        and user in (None, stored.job.user)
    }
    events = _changes(store)
    rows = []
    for job_id, stored in chosen.items():
        job = stored.job
        until_s = job.created_at_s if job.ended_at_s is None else job.ended_at_s
        stays = find_stays(state_changes(events[job_id]), created_s=job.created_at_s, until_s=until_s)
        rows.append(measure_job(stored.spec, job, stays))
    return tuple(sorted(rows, key=lambda row: row.ended_at_s or 0.0, reverse=True))


def read_losses(store: Store, *, now_s: float) -> History:
    """Return running time and lost nodes of past jobs."""
    events = _changes(store)
    timelines = [
        JobTimeline(
            nodes=job.request.nodes,
            transitions=state_changes(events[job.id]),
            lost_a_node=job.cause is Cause.NODE_LOST and job.is_terminal,
        )
        for job in (stored.job for stored in store.jobs.all())
    ]
    return sum_up(timelines, now_s=now_s)


def _changes(store: Store) -> dict[str, list[Event]]:
    """Return the changes of state of every job, in order."""
    found: dict[str, list[Event]] = defaultdict(list)
    after = 0
    while batch := store.events.stream(after=after, codes=["state-changed"], limit=EVENTS_AT_ONCE):
        for item in batch:
            found[item.job].append(item.event)
        after = batch[-1].number
    return found
