"""Events of one job, one pipeline or all, read from the store in the process of the command as they are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascendrun.core.events import JobEvent
    from ascendrun.head.state.store import Store
    from ascendrun.health.forecast import History


def event_codes(state_dir: Path) -> tuple[str, ...]:
    """Return the codes of events in this state directory."""
    from ascendrun.head.state.store import Store

    with Store.open_for_reading(state_dir) as store:
        return store.events.codes()


def read_history(state_dir: Path, *, now_s: float) -> History:
    """Return running time and lost nodes of past jobs. Raises StoreUnusableError."""
    from ascendrun.core.jobs.job import Cause
    from ascendrun.core.jobs.lifecycle import state_changes
    from ascendrun.head.state.store import Store
    from ascendrun.health.forecast import JobTimeline, sum_up

    with Store.open_for_reading(state_dir) as store:
        timelines = [
            JobTimeline(
                nodes=job.request.nodes,
                transitions=state_changes(store.events.of(job.id)),
                lost_a_node=job.cause is Cause.NODE_LOST and job.is_terminal,
            )
            for job in (stored.job for stored in store.jobs.all())
        ]
    return sum_up(timelines, now_s=now_s)


class EventStream:
    """Events of one job, of a pipeline, or of all, as they are written; works without a controller.

    `pipeline`: its id; includes the jobs of all its stages, also later ones. `since_s`: no older events; `codes`: only
    these. All calls raise StoreUnusableError.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        job: str | None = None,
        pipeline: str | None = None,
        since_s: float | None = None,
        codes: Collection[str] | None = None,
    ) -> None:
        self._state_dir, self._job, self._pipeline = state_dir, job, pipeline
        self._since_s, self._codes = since_s, codes
        self._after = 0
        self._store: Store | None = None

    def new_events(self) -> tuple[JobEvent, ...]:
        """Return the events written since the last call; at the first call, the stored events."""
        store = self._open()
        events: list[JobEvent] = []
        while True:
            batch = store.events.stream(
                after=self._after, job=self._job, pipeline=self._pipeline, since_s=self._since_s, codes=self._codes
            )
            if not batch:
                return tuple(events)
            events += batch
            self._after = batch[-1].number

    def job_names(self) -> Mapping[str, str]:
        """Return the name of every job, by its id."""
        return self._open().jobs.names()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> Store:
        from ascendrun.head.state.store import Store

        if self._store is not None and (self._store.is_copy or not self._store.is_in_place()):
            self.close()  # a controller may have created, migrated or replaced the file meanwhile
        if self._store is None:
            self._store = Store.open_for_reading(self._state_dir)
            if self._store.events.newest() < self._after:
                self._after = 0  # the file was rebuilt
        return self._store
