"""Events as they are written, of one job, one pipeline or all; read from the store in the process of the command."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascendrun.core.event_lines import StoryLine
    from ascendrun.head.state.store import Store


def event_kinds(state_dir: Path) -> tuple[str, ...]:
    """The kinds of lines that the stories of this state folder hold."""
    from ascendrun.head.state.store import Store

    store = Store.open_for_reading(state_dir)
    if store is None:
        return ()
    try:
        return store.event_kinds()
    finally:
        store.close()


class EventStream:
    """The lines of one job's story, of a pipeline's, or of all, as they are written; whether a controller runs does not
    matter.

    `pipeline`: its id; the jobs of all its stages, later ones too. `since_s`: no older lines; `kinds`: only these. Its
    calls raise StoreUnusableError.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        job: str | None = None,
        pipeline: str | None = None,
        since_s: float | None = None,
        kinds: Collection[str] | None = None,
    ) -> None:
        self._state_dir, self._job, self._pipeline = state_dir, job, pipeline
        self._since_s, self._kinds = since_s, kinds
        self._after = 0
        self._store: Store | None = None

    def new_lines(self) -> tuple[StoryLine, ...]:
        """What was written since the last call; at first, what is there."""
        from ascendrun.core.event_lines import StoryLine

        store = self._open()
        if store is None:
            return ()
        lines = []
        while True:
            batch = store.stream(
                after=self._after, job=self._job, pipeline=self._pipeline, since_s=self._since_s, kinds=self._kinds
            )
            lines += [StoryLine(line.number, line.at_s, line.job, line.kind, line.text) for line in batch]
            if not batch:
                return tuple(lines)
            self._after = batch[-1].number

    def job_hosts(self) -> Mapping[str, tuple[str, ...]]:
        """The names of every job's hosts, by its id."""
        store = self._open()
        return store.job_hosts() if store is not None else {}

    def job_names(self) -> Mapping[str, str]:
        """The name of every job, by its id."""
        store = self._open()
        return store.job_names() if store is not None else {}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> Store | None:
        from ascendrun.head.state.store import Store

        if self._store is None:
            self._store = Store.open_for_reading(self._state_dir)
        return self._store
