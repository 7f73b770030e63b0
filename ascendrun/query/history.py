"""The door to the past: what this head's store tells of running time and lost nodes."""

from __future__ import annotations

from pathlib import Path

from ascendrun.core.jobs.job import Cause, State
from ascendrun.head.state.store import Store
from ascendrun.health.forecast import History, JobTimeline, sum_up


def read_history(state_dir: Path, *, now_s: float) -> History:
    """An empty one when nothing was ever submitted here. Raises StoreUnusableError."""
    store = Store.open_for_reading(state_dir)
    if store is None:
        return History()
    try:
        stories: list[JobTimeline] = []
        for stored in store.all_jobs():
            job = stored.job
            moves = [_move(event.at_s, event.text) for event in store.events(job.id) if event.kind == "state"]
            stories.append(
                JobTimeline(
                    nodes=len(job.hosts),
                    transitions=tuple(move for move in moves if move is not None),
                    lost_a_node=job.cause is Cause.NODE_LOST and job.is_terminal,
                )
            )
        return sum_up(stories, now_s=now_s)
    finally:
        store.close()


def _move(at_s: float, text: str) -> tuple[float, State] | None:
    """The controller writes "RUNNING: why"; a state of another release is passed over."""
    name = text.partition(":")[0]
    return (at_s, State(name)) if name in State.__members__ else None
