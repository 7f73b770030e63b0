"""What the parts of the controller share; what collects files and samples of jobs is made when it is first used."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.retention import Retention
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.replica import Replica
from ascendrun.head.loop.steps import Guard, JobSteps
from ascendrun.head.spool.artifact_store import requests_dir
from ascendrun.head.state.job_files import waiting_jobs
from ascendrun.head.state.store import Store

if TYPE_CHECKING:
    from ascendrun.head.agents.lease import HeadLease
    from ascendrun.head.loop.judging import Judging
    from ascendrun.head.protocol.file_messages import ArtifactData
    from ascendrun.head.protocol.remote import AgentConnection
    from ascendrun.head.queue.client import SharedQueue
    from ascendrun.head.queue.others import OtherUsers
    from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
    from ascendrun.head.spool.output_fetch import OutputFetcher
    from ascendrun.head.spool.sample_ingest import SampleIngest
    from ascendrun.head.survey.kept_facts import KeptFacts

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.


class Context:
    """Use from the controller's thread. `post` runs a call there, in order. `queue`: decides where jobs start; None:
    this controller does. `other_users`: serves other users of that queue. `lease`: of a head with a standby; without
    it nothing changes on nodes."""

    def __init__(self, store: Store, links: Connections, retention: Retention, guard: Guard) -> None:
        self.store, self.links, self.retention, self.guard, self.post = store, links, retention, guard, links.post
        self.state_dir: Path = store.path.parent
        self.steps = JobSteps(store, guard)
        self.queue: SharedQueue | None = None
        self.other_users: OtherUsers | None = None
        self.replica = Replica(store, links.post, guard)
        self.steps.after = lambda call: self.replica.after(call)
        self.lease: HeadLease | None = None

    @cached_property
    def kept_facts(self) -> KeptFacts:
        from ascendrun.head.survey.kept_facts import KeptFacts

        return KeptFacts()

    @cached_property
    def judging(self) -> Judging:
        from ascendrun.head.loop.judging import Judging

        return Judging(self.state_dir, lambda: self.artifacts, self.steps.feed_diagnosis, self.post)

    def is_judging(self, job_id: str) -> bool:
        """Return whether a diagnosis of the job is awaited."""
        return "judging" in vars(self) and self.judging.is_open(job_id)

    @cached_property
    def artifacts(self) -> ArtifactFetcher:
        from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
        from ascendrun.head.survey.submission import load_subject

        return ArtifactFetcher(
            self.state_dir,
            self.links,
            lambda job_id: load_subject(self.store.jobs.find(job_id)),
            lambda job_id, attempt: self.judging.repeat(job_id, attempt),
        )

    @cached_property
    def outputs(self) -> OutputFetcher:
        from ascendrun.head.spool.output_fetch import OutputFetcher
        from ascendrun.head.survey.submission import load_outputs

        return OutputFetcher(
            self.state_dir,
            self.links,
            lambda job_id: load_outputs(self.store.jobs.find(job_id)),
            self.steps.record,
            self.retention,
        )

    @cached_property
    def samples(self) -> SampleIngest:
        from ascendrun.head.spool.sample_ingest import SampleIngest

        ingest = SampleIngest(
            self.state_dir,
            separate=lambda source, world: self.post(
                lambda: self.steps.note_separate(source.job, source.attempt, source.host, world)
            ),
            alone=lambda source, alone: self.post(
                lambda: self.steps.note_alone(source.job, source.attempt, source.host, alone)
            ),
        )
        ingest.start()
        return ingest

    @property
    def is_fetching(self) -> bool:
        return "outputs" in vars(self) and self.outputs.is_busy

    def resume(self) -> None:
        """Continue what an earlier controller has not finished."""
        if requests_dir(self.state_dir).is_dir():
            self.guard(lambda: self.artifacts.resume())
        if waiting_jobs(self.state_dir):
            self.guard(lambda: self.outputs.resume())

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
        if self.queue is not None:
            self.queue.close()
        if self.other_users is not None:
            self.other_users.close()
        if "samples" in vars(self):
            self.samples.close()
