"""The live jobs: their events pass through the lifecycle; decisions are stored, then carried out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Callable

from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError
from ascendrun.core.event_types.jobs import SEPARATE
from ascendrun.core.events import Event
from ascendrun.core.retention import Retention
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.call_guard import Guard
from ascendrun.head.loop.collectors import Collectors
from ascendrun.head.loop.placing import Placing
from ascendrun.head.loop.steps import JobSteps
from ascendrun.head.protocol.file_messages import FileData, FileTrouble
from ascendrun.head.protocol.messages import Message
from ascendrun.head.protocol.remote import AgentConnection, boot_s
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.store import Store
from ascendrun.node.failpoint import failpoint

if TYPE_CHECKING:
    from ascendrun.core.jobs.draft import Step
    from ascendrun.core.jobs.inputs import JobInput
    from ascendrun.core.jobs.job import Job
    from ascendrun.core.jobs.job_copy import JobCopy
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.loop.judging import Judging
    from ascendrun.head.loop.machines import Machines
    from ascendrun.head.survey.submission import Submission

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.

SETTLING_S = 30.0
"""Seconds after a job's end during which its last bytes may still arrive."""


class LiveJobs:
    """The jobs with a runner: live jobs, and ended jobs whose last bytes are awaited.

    Use from the controller's thread, except `handle_message`. `machines` and `judging` are made when they are first
    used.
    """

    def __init__(
        self,
        store: Store,
        links: Connections,
        collectors: Collectors,
        retention: Retention,
        guard: Guard,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._state_dir, self._store, self._links = store.path.parent, store, links
        self._collectors, self._retention, self._guard, self._post = collectors, retention, guard, post
        self._runners: dict[str, JobRunner] = {}
        self.steps = JobSteps(store, guard, self._runners, self._carry_out)
        self.placing = Placing(self._job, self.steps.feed)
        self._listens_boot_s = boot_s()

    def __iter__(self) -> Iterator[JobRunner]:
        """Iterate over a copy: a runner may be removed during the loop."""
        return iter(tuple(self._runners.values()))

    def __bool__(self) -> bool:
        records = self.machines.records if "machines" in vars(self) else None
        return bool(self._runners) or (records is not None and (records.has_found or records.has_unsaved))

    def is_busy(self, *, now_s: float) -> bool:
        """Return whether a job is live, or has ended so recently that its last bytes may still arrive."""
        return any(
            runner.job.ended_at_s is None
            or now_s - runner.job.ended_at_s < SETTLING_S
            or self._is_judging(runner.job.id)
            for runner in self
        )

    def _is_judging(self, job_id: str) -> bool:
        return "judging" in vars(self) and self.judging.is_open(job_id)

    # From any thread

    def handle_message(self, link: AgentConnection, event: Message, body: bytes) -> None:
        """Handle an event of a node: bytes of an attempt's files, or that they cannot be followed."""
        if not isinstance(event, (FileData, FileTrouble)):
            return
        for runner in self:
            host = runner.uses(link) if runner.copies.follows(event.tag) else None
            if host is None:
                continue
            if isinstance(event, FileData):
                runner.copies.take_data(host, event, body)
            else:
                self._post(partial(self._record_trouble, runner, host, event))

    # Addition and removal

    def adopt(self, stored: StoredJob) -> None:
        """Resume a job of an earlier controller, from its record and the events of its nodes."""
        from ascendrun.core.jobs.lifecycle import resume
        from ascendrun.head.survey.submission import Submission

        runner = self.add(stored.job, Submission.from_stored(stored))
        self.steps.settle(stored.job.id, resume(stored.job, now_s=time.time()))
        if stored.job.is_terminal:
            from ascendrun.head.spool.artifact_fetch import unrequested_attempt

            attempt = unrequested_attempt(stored.job, now_s=time.time())
            if attempt is not None:
                self._guard(lambda: self._collectors.artifacts.fetch(stored.job.id, attempt, only_missing=True))
            noted = {event.code for event in self.events_of(stored.job.id) if event.attempt == stored.job.attempt}
            if not noted & {"outputs-fetched", "outputs-missing", "outputs-failed"}:
                self._guard(partial(request_outputs, self._collectors, runner))
        if runner.job.go_sent_at_s is not None:
            for host in runner.job.hosts:
                runner.copies.present.take_records(host)
                runner.link(host)

    def _adopt_found(self, copy: JobCopy, attempt: int) -> None:
        """Take over an attempt that runs and that the store does not know, from the copy of its job on a node."""
        from ascendrun.head.loop.rescue import job_after_go
        from ascendrun.head.state.job_files import write_copy

        job = job_after_go(self._state_dir, copy, replace(copy.new_job(), attempt=attempt))
        copy = replace(copy, placement=())
        write_copy(self._state_dir, copy)
        found = Event("adopted", {}, job.hosts, attempt=attempt, at_s=time.time())
        with self._store.writing() as db:
            self._store.jobs.put(db, copy, job, [found], is_drained=False)
        if job.id in self._runners:  # it was known as it was submitted
            self._runners.pop(job.id).abandon()
        self.adopt(self._store.jobs.find(job.id))

    def add(self, job: Job, submission: Submission) -> JobRunner:
        """Give the job a runner; an existing runner is kept."""
        if job.id in self._runners:
            return self._runners[job.id]
        from ascendrun.head.loop.job.live_job import JobContext
        from ascendrun.head.loop.job.runner import JobRunner

        context = JobContext(
            self._store,
            self._links,
            post=self._post,
            feed=self.steps.feed,
            drained=self._forget,
            samples=self._collectors.samples,
            record=self.record,
            retention=self._retention,
            idle_memory=lambda host: self.machines.memory.idle(host),
            note_memory=lambda *noted: self.machines.memory.note(*noted),
        )
        runner = self._runners[job.id] = JobRunner(job, submission, context)
        return runner

    def stored(self) -> tuple[StoredJob, ...]:
        """Return the jobs with a runner as the store must have them."""
        return tuple(StoredJob(runner.job, **runner.submission.values) for runner in self)

    def adopt_missing(self) -> None:
        """Resume the live jobs of the store that have no runner, and store the machines again."""
        if "machines" in vars(self):
            self.machines.records.keep_all()
        for stored in self._store.jobs.live():
            if stored.job.id not in self._runners:
                self._guard(partial(self.adopt, stored))

    def _forget(self, job_id: str) -> None:
        runner = self._runners[job_id]
        if runner.job.held_hosts or self._is_judging(job_id):
            return
        self._store.jobs.mark_drained(job_id)
        del self._runners[job_id]
        if runner.job.go_sent_at_s is not None:
            self.judging.repeat(job_id, runner.job.attempt)

    # Connections and time

    @cached_property
    def machines(self) -> Machines:
        from ascendrun.head.loop.machine.job_access import JobAccess
        from ascendrun.head.loop.machines import Machines

        steps = self.steps
        jobs = JobAccess(lambda: iter(self), self._job, steps.feed, self.record, steps.work_off, self._adopt_found)
        return Machines(self._store, self._links, jobs, post=self._post)

    @cached_property
    def judging(self) -> Judging:
        from ascendrun.head.loop.judging import Judging

        return Judging(self._state_dir, lambda: self._collectors.artifacts, self._take_diagnosis, self._post)

    def _take_diagnosis(self, job_id: str, event: JobInput) -> None:
        """Feed a diagnosis, also to a job that has no runner any more."""
        from ascendrun.core.jobs.lifecycle import advance

        if job_id in self._runners:
            self.steps.feed(job_id, event)
            return
        job = self._job(job_id)
        if job is not None:
            step = advance(job, event, now_s=time.time())
            self._store.jobs.save(step.job, step.events, now_s=time.time())

    def on_up(self, link: AgentConnection) -> None:
        self.placing.changes += 1
        if link.info.live or self._runners:  # else a node without attempts, before the first job
            self._guard(lambda: self.machines.reconciler.on_up(link))
        for runner in self:
            host = runner.uses(link)
            if host is not None:
                runner.on_up(host)

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        self.placing.changes += 1
        for runner in self:
            host = runner.uses(link)
            if host is not None:
                runner.on_down(host, link, error)

    def tick(self, *, was_away: bool) -> None:
        """Handle time. `was_away`: this process was suspended, so missing messages mean nothing about the nodes."""
        from ascendrun.core.jobs.inputs import Tick

        now_boot_s = boot_s()
        if was_away:
            self._listens_boot_s = now_boot_s
        reachable = frozenset(link.host.name for link in self._links if link.is_up)
        quiet_s = {
            link.host.name: now_boot_s - max(self._listens_boot_s, link.heard_boot_s or 0.0)
            for link in self._links
            if not link.is_up
        }
        for runner in self:
            self._guard(runner.tick)
            self._guard(partial(self.judging.tick, runner, quiet_s))
            if runner.job.is_terminal:
                self._guard(runner.copies.drain)
                continue
            if was_away:
                self.steps.restart_timers(runner.job.id)
            self.steps.feed(runner.job.id, Tick(reachable, runner.leases.expired(), quiet_s))
        self._guard(self.machines.tick)
        self.schedule()

    def schedule(self) -> None:
        """Decide again where queued jobs start, if something has changed."""
        self.placing.schedule(tuple(self), self.machines)

    def _job(self, job_id: str) -> Job | None:
        runner = self._runners.get(job_id)
        if runner is not None:
            return runner.job
        try:
            found = self._store.jobs.find(job_id).job
        except (NotFoundError, ConflictError):
            return None
        return found if found.id == job_id else None  # a name or a longer id may start like it

    # Events of jobs

    def events_of(self, job_id: str) -> tuple[Event, ...]:
        return self._store.events.of(job_id)

    def record(self, job_id: str, events: Sequence[Event]) -> None:
        """Store events that do not change the job, which may have ended."""
        job = self._job(job_id)
        if job is not None:
            self._store.jobs.save(job, events, now_s=time.time())

    def _record_trouble(self, runner: JobRunner, host: str, trouble: FileTrouble) -> None:
        from ascendrun.head.protocol.agent_events import file_event

        self.record(runner.job.id, [file_event(host, trouble, now_s=time.time())])

    def note_separate(self, job_id: str, attempt: int, host: str, world_size: int) -> None:
        """Record once for each attempt that ranks train without the others, and end the job; an earlier controller may
        have done so. The job continues if its `checks.skip` names the event."""
        from ascendrun.core.jobs.inputs import TrainsSeparately

        if any(one.attempt == attempt and one.code == SEPARATE for one in self.events_of(job_id)):
            return
        values = {"world_size": world_size}
        self.record(job_id, [Event(SEPARATE, values, (host,), attempt=attempt, at_s=time.time())])
        if SEPARATE not in ((self._store.jobs.find(job_id).spec.get("checks") or {}).get("skip") or ()):
            self.steps.feed(job_id, TrainsSeparately(attempt, host, world_size))

    # What a step decided

    def _carry_out(self, runner: JobRunner, before: Job, step: Step) -> None:
        from ascendrun.core.jobs.inputs import Judge

        for event in step.events:
            if event.code in ("restarting", "gave-up"):
                self._guard(partial(self.machines.closures.note_failure, runner, event))
        for action in step.actions:
            is_judging = isinstance(action, Judge)
            call = partial(self.judging.start, runner) if is_judging else partial(runner.perform, action)
            self._guard(call)  # the others continue if one fails
        failpoint("controller.after_actions")
        if step.transitions:
            self._guard(partial(request_artifacts, self._collectors, before, step))
        if step.transitions and step.job.is_terminal:
            self._guard(partial(request_outputs, self._collectors, runner))
            runner.copies.drain()


def request_outputs(collectors: Collectors, runner: JobRunner) -> None:
    """Request the outputs of an ended job that was started."""
    if runner.spec.outputs and runner.job.go_sent_at_s is not None:
        collectors.outputs.request(runner.job.id)


def request_artifacts(collectors: Collectors, before: Job, step: Step) -> None:
    """Request the files that may explain a failure immediately: logs rotate, and devices recover."""
    from ascendrun.core.jobs.draft import may_restart
    from ascendrun.head.spool.artifact_fetch import failed_attempt

    attempt = failed_attempt(before, step.job, step.transitions)
    if attempt is not None and not may_restart(before):  # else requested when it started to stop
        collectors.artifacts.fetch(before.id, attempt)
