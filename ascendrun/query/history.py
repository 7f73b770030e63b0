"""Running time and lost nodes of past jobs, from the store."""

from __future__ import annotations

from pathlib import Path

from ascendrun.core.jobs.job import Cause
from ascendrun.core.jobs.lifecycle import state_changes
from ascendrun.head.state.store import Store
from ascendrun.health.forecast import History, JobTimeline, sum_up


def read_history(state_dir: Path, *, now_s: float) -> History:
    """An empty one when nothing was ever submitted here. Raises StoreUnusableError."""
    with Store.open_for_reading(state_dir) as store:
        timelines = [
            JobTimeline(
                nodes=len(job.hosts),
                transitions=state_changes(store.events(job.id)),
                lost_a_node=job.cause is Cause.NODE_LOST and job.is_terminal,
            )
            for job in (stored.job for stored in store.all_jobs())
        ]
    return sum_up(timelines, now_s=now_s)
