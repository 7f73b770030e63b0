"""What brings files and samples of jobs to the head node; each is made when it is first used."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.retention import Retention
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.call_guard import Guard
from ascendrun.head.spool.artifact_store import requests_dir
from ascendrun.head.state.outputs import waiting_jobs
from ascendrun.head.state.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.core.events import Event
    from ascendrun.head.protocol.file_messages import ArtifactData
    from ascendrun.head.protocol.remote import AgentConnection
    from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
    from ascendrun.head.spool.output_fetch import OutputFetcher
    from ascendrun.head.spool.sample_ingest import SampleIngest

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.


class Collectors:
    """Use from the controller's thread. `post` runs a call there, `record` stores events of a job,
    `separate(job, attempt, host, world size)` notes that ranks train without the others, `collected(job, attempt)`
    that all artifacts of an attempt that can come now are here."""

    def __init__(
        self,
        store: Store,
        links: Connections,
        retention: Retention,
        *,
        post: Callable[[Callable[[], None]], None],
        record: Callable[[str, Sequence[Event]], None],
        separate: Callable[[str, int, str, int], None],
        collected: Callable[[str, int], None] = lambda job_id, attempt: None,
    ) -> None:
        self._state_dir: Path = store.path.parent
        self._store, self._links, self._retention = store, links, retention
        self._post, self._record, self._separate, self._collected = post, record, separate, collected

    @cached_property
    def artifacts(self) -> ArtifactFetcher:
        from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
        from ascendrun.head.survey.submission import load_subject

        return ArtifactFetcher(
            self._state_dir,
            self._links,
            self._post,
            lambda job_id: load_subject(self._store.jobs.find(job_id)),
            self._collected,
        )

    @cached_property
    def outputs(self) -> OutputFetcher:
        from ascendrun.head.spool.output_fetch import OutputFetcher
        from ascendrun.head.survey.submission import load_outputs

        return OutputFetcher(
            self._state_dir,
            self._links,
            self._post,
            lambda job_id: load_outputs(self._store.jobs.find(job_id)),
            self._record,
            self._retention,
        )

    @cached_property
    def samples(self) -> SampleIngest:
        from ascendrun.head.spool.sample_ingest import SampleIngest

        ingest = SampleIngest(
            self._state_dir,
            separate=lambda source, world: self._post(
                lambda: self._separate(source.job, source.attempt, source.host, world)
            ),
        )
        ingest.start()
        return ingest

    @property
    def is_fetching(self) -> bool:
        return "outputs" in vars(self) and self.outputs.is_busy

    def resume(self, guard: Guard) -> None:
        """Continue what an earlier controller has not finished."""
        if requests_dir(self._state_dir).is_dir():
            guard(lambda: self.artifacts.resume())
        if waiting_jobs(self._state_dir):
            guard(lambda: self.outputs.resume())

    def take(self, link: AgentConnection, event: ArtifactData, body: bytes) -> None:
        """Take a part of a file that was requested; called in the connection's thread."""
        if "artifacts" in vars(self):
            self.artifacts.take(link, event, body)

    def on_up(self, link: AgentConnection) -> None:
        if "artifacts" in vars(self):
            self.artifacts.on_up(link)
        if "outputs" in vars(self):
            self.outputs.on_up(link)

    def close(self) -> None:
        if "samples" in vars(self):
            self.samples.close()
