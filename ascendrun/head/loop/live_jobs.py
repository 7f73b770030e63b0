"""The live jobs: their events pass through the lifecycle; decisions are stored, then carried out."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Union

from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.retention import Retention
from ascendrun.head.agents.connections import Connections
from ascendrun.head.protocol.agent_messages import FileData, FileLimited, FileTruncated, FileUnreadable
from ascendrun.head.protocol.messages import Message
from ascendrun.head.protocol.remote import AgentConnection, boot_s
from ascendrun.head.state.state_dir import StoreDamagedError, StoreUnusableError
from ascendrun.head.state.store import LostLeaseError, Store, StoredJob
from ascendrun.node.failpoint import failpoint
from ascendrun.node.layout import split_tag

if TYPE_CHECKING:
    from ascendrun.core.hosts import Host
    from ascendrun.core.jobs.draft import Step
    from ascendrun.core.jobs.inputs import JobInput
    from ascendrun.core.jobs.job import Job
    from ascendrun.core.jobs.job_copy import JobCopy
    from ascendrun.core.jobs.schedule import Claim
    from ascendrun.head.loop.job_runner import JobRunner
    from ascendrun.head.loop.judging import Judging
    from ascendrun.head.loop.machines import Machines
    from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
    from ascendrun.head.spool.output_fetch import OutputFetcher
    from ascendrun.head.spool.sample_ingest import SampleIngest
    from ascendrun.head.survey.submission import Submission

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.

SETTLING_S = 30.0
"""Seconds after a job's end during which its last bytes may still arrive."""


class Guard:
    """Runs calls; their internal errors are logged and do not end the controller. Use from one thread.

    Raises LostLeaseError only: a controller that has lost its lease must do nothing more. `store_is_damaged`: a call
    found damage, and the controller must check the store.
    """

    def __init__(self) -> None:
        self._last = ""
        self.store_is_damaged = False

    def __call__(self, call: Callable[[], object]) -> None:
        try:
            call()
        except LostLeaseError:
            raise
        except StoreDamagedError:  # the controller repairs it and calls again
            self.store_is_damaged = True
        except Exception:  # a bug in one operation: the log has the traceback, all other jobs keep running
            self.log_exception()

    def log_exception(self) -> None:
        """Log the current exception; a repeated one once. The disk of the log may be full."""
        text = traceback.format_exc()
        if text != self._last:
            self._last = text
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)


class LiveJobs:
    """The jobs with a runner: live jobs, and ended jobs whose last bytes are awaited.

    Use from the controller's thread, except `handle_message`. `artifacts`, `outputs` and `samples` create their object
    at the first call.
    """

    def __init__(
        self,
        state_dir: Path,
        store: Store,
        links: Connections,
        *,
        post: Callable[[Callable[[], None]], None],
        guard: Guard,
        artifacts: Callable[[], ArtifactFetcher],
        outputs: Callable[[], OutputFetcher],
        samples: Callable[[], SampleIngest],
        retention: Retention,
    ) -> None:
        self._state_dir, self._store, self._links = state_dir, store, links
        self._post, self._guard, self._artifacts, self._samples = post, guard, artifacts, samples
        self._retention, self._outputs = retention, outputs
        self._runners: dict[str, JobRunner] = {}
        self._submissions: dict[str, Submission] = {}
        self._claims: dict[str, Mapping[str, Claim]] = {}
        self._scheduled: tuple[object, ...] = ()
        self._changes = 0
        self._machines: Machines | None = None
        self._judging: Judging | None = None
        self._events: deque[tuple[str, JobInput]] = deque()
        self._unsaved: dict[str, Step] = {}
        self._listens_boot_s = boot_s()

    def __iter__(self) -> Iterator[JobRunner]:
        """Iterate over a copy: a runner may be removed during the loop."""
        return iter(tuple(self._runners.values()))

    def __bool__(self) -> bool:
        machines = self._machines
        return bool(self._runners) or (machines is not None and (machines.has_found or machines.has_unsaved))

    def is_busy(self, *, now_s: float) -> bool:
        """Return whether a job is live, or has ended so recently that its last bytes may still arrive."""
        return any(runner.job.ended_at_s is None or now_s - runner.job.ended_at_s < SETTLING_S for runner in self)

    # From any thread

    def handle_message(self, link: AgentConnection, event: Message, body: bytes) -> None:
        """Handle an event of a node: bytes of an attempt's files, or that they cannot be followed."""
        if not isinstance(event, (FileData, FileTruncated, FileUnreadable, FileLimited)):
            return
        for runner in self:
            host = runner.uses(link) if runner.follows(event.tag) else None
            if host is None:
                continue
            if isinstance(event, FileData):
                runner.take_data(host, event, body)
            else:
                self._post(partial(self._record_trouble, runner, host, event))

    # Addition and removal

    def adopt(self, stored: StoredJob) -> None:
        """Resume a job of an earlier controller, from its record and the events of its nodes."""
        from ascendrun.core.jobs.lifecycle import resume
        from ascendrun.head.survey.submission import Submission

        runner = self.add(stored.job, Submission.from_stored(stored))
        self._settle(stored.job.id, resume(stored.job, now_s=time.time()))
        if stored.job.is_terminal:
            from ascendrun.head.spool.artifact_fetch import unrequested_attempt

            attempt = unrequested_attempt(stored.job, now_s=time.time())
            if attempt is not None:
                self._guard(partial(self._artifacts().fetch, stored.job.id, attempt, only_missing=True))
            noted = {event.code for event in self.events_of(stored.job.id) if event.attempt == stored.job.attempt}
            if not noted & {"outputs-fetched", "outputs-missing", "outputs-failed"}:
                self._fetch_outputs(runner)
        if runner.job.go_sent_at_s is not None:
            for host in runner.job.hosts:
                runner.read_records(host)
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
            self._store.put(db, copy, job, [found], is_drained=False)
        if job.id in self._runners:  # it was known as it was submitted
            self._runners[job.id].abandon()
            del self._runners[job.id], self._submissions[job.id], self._claims[job.id]
        self.adopt(self._store.find(job.id))

    def add(self, job: Job, submission: Submission) -> JobRunner:
        """Give the job a runner; an existing runner is kept."""
        if job.id in self._runners:
            return self._runners[job.id]
        from ascendrun.head.loop.job_runner import JobRunner, RunnerContext
        from ascendrun.head.survey.submission import claims_of

        context = RunnerContext(
            self._state_dir,
            self._links,
            post=self._post,
            feed=self.feed,
            drained=self._forget,
            samples=self._samples(),
            record=self.record,
            retention=self._retention,
            idle_memory=lambda host: self.machines.idle_memory(host),
            note_memory=lambda *noted: self.machines.note_memory(*noted),
        )
        runner = JobRunner(job, spec=submission.spec, hosts=submission.hosts, trees=submission.trees, context=context)
        self._runners[job.id], self._submissions[job.id] = runner, submission
        self._claims[job.id] = claims_of(submission.spec, submission.hosts)
        return runner

    def stored(self) -> tuple[StoredJob, ...]:
        """Return the jobs with a runner as the store must have them."""
        pairs = [(runner.job, self._submissions[job_id]) for job_id, runner in self._runners.items()]
        return tuple(
            StoredJob(job, one.key, one.spec_values, one.host_values, one.tree_values, one.file) for job, one in pairs
        )

    def adopt_missing(self) -> None:
        """Resume the live jobs of the store that have no runner, and store the machines again."""
        if self._machines is not None:
            self._machines.save_all()
        for stored in self._store.live_jobs():
            if stored.job.id not in self._runners:
                self._guard(partial(self.adopt, stored))

    def _forget(self, job_id: str) -> None:
        runner = self._runners[job_id]
        if runner.job.held_hosts:
            return
        self._store.mark_drained(job_id)
        del self._runners[job_id], self._submissions[job_id], self._claims[job_id]

    # Connections and time

    @property
    def machines(self) -> Machines:
        if self._machines is None:
            from ascendrun.head.loop.machines import JobAccess, Machines

            jobs = JobAccess(
                lambda: iter(self), self._job, self.feed, self.record, self.work_off_events, self._adopt_found
            )
            self._machines = Machines(self._store, self._links, jobs, post=self._post)
        return self._machines

    @property
    def judging(self) -> Judging:
        if self._judging is None:
            from ascendrun.head.loop.judging import Judging

            self._judging = Judging(self._state_dir, self._artifacts, self.feed, self._post)
        return self._judging

    def on_up(self, link: AgentConnection) -> None:
        self._changes += 1
        if link.info.live or self._runners:  # else a node without attempts, before the first job
            self._guard(lambda: self.machines.on_up(link))
        for runner in self:
            host = runner.uses(link)
            if host is not None:
                runner.on_up(host)

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        self._changes += 1
        for runner in self:
            host = runner.uses(link)
            if host is not None:
                runner.on_down(host, link, error)

    def tick(self, *, was_away: bool) -> None:
        """Handle time. `was_away`: this process was suspended, so missing messages mean nothing about the nodes."""
        from ascendrun.core.jobs.draft import Step
        from ascendrun.core.jobs.inputs import Tick
        from ascendrun.core.jobs.lifecycle import restart_timers

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
            if runner.job.is_terminal:
                self._guard(runner.drain)
                continue
            self._guard(partial(self.judging.tick, runner, quiet_s))
            if was_away:
                unsaved = self._unsaved.pop(runner.job.id, None) or Step(runner.job)
                self._settle(runner.job.id, unsaved.then(Step(restart_timers(unsaved.job, now_s=time.time()))))
            self.feed(runner.job.id, Tick(reachable, runner.fenced(), quiet_s))
        self._guard(self.machines.tick)
        self.schedule()

    def schedule(self) -> None:
        """Decide again where queued jobs start: when a job or a machine has changed, else once a second."""
        jobs = [runner.job for runner in self]
        seen = (jobs, self.machines.version, self._changes, int(time.time()))
        if seen == self._scheduled or all(job.state.value != "QUEUED" for job in jobs):
            return
        self._scheduled = seen
        from ascendrun.core.jobs.schedule import schedule

        contenders = self.machines.contenders([(runner.job, runner.hosts) for runner in self], self._claims)
        for job_id, decision in schedule(contenders, self._job, now_s=time.time()).items():
            self.feed(job_id, decision)

    def placement(self, submission: Submission) -> tuple[Host, ...]:
        """Return the hosts on which a job would start now; if it would wait, those of its pool that come first."""
        from ascendrun.core.jobs.inputs import NodesFree
        from ascendrun.core.jobs.schedule import schedule
        from ascendrun.head.survey.submission import claims_of, make_job

        job = make_job(submission, "j-new", "dry-run", time.time())
        jobs = [(runner.job, runner.hosts) for runner in self]
        claims = {**self._claims, job.id: claims_of(submission.spec, submission.hosts)}
        contenders = self.machines.contenders([*jobs, (job, submission.hosts)], claims)
        decision = schedule(contenders, self._job, now_s=time.time())[job.id]
        names = decision.hosts if isinstance(decision, NodesFree) else job.pool[: job.request.nodes]
        return tuple(host for name in names for host in submission.hosts if host.name == name)

    def _job(self, job_id: str) -> Job | None:
        runner = self._runners.get(job_id)
        if runner is not None:
            return runner.job
        try:
            found = self._store.find(job_id).job
        except (NotFoundError, ConflictError):
            return None
        return found if found.id == job_id else None  # a name or a longer id may start like it

    # Events of jobs

    def events_of(self, job_id: str) -> tuple[Event, ...]:
        return self._store.events(job_id)

    def record(self, job_id: str, events: Sequence[Event]) -> None:
        """Store events that do not change the job, which may have ended."""
        job = self._job(job_id)
        if job is not None:
            self._store.save(job, events, now_s=time.time())

    def _record_trouble(self, runner: JobRunner, host: str, trouble: FileTrouble) -> None:
        self.record(runner.job.id, [file_event(host, trouble, attempt=split_tag(trouble.tag)[1], now_s=time.time())])

    # Events, decisions, actions

    def feed(self, job_id: str, event: JobInput) -> None:
        """Give an event to a job's lifecycle; handled before anything else that arrives."""
        self._events.append((job_id, event))

    def work_off_events(self) -> None:
        """Handle queued events; all events of one job are one step of it, stored once."""
        if not self._events:
            return
        from ascendrun.core.jobs.draft import Step

        while self._events:
            steps, self._unsaved = self._unsaved, {}
            while self._events:
                job_id, event = self._events.popleft()
                if job_id in self._runners:
                    before = steps.get(job_id) or Step(self._runners[job_id].job)
                    steps[job_id] = before.then(self._advance(before.job, event))
            for job_id, step in steps.items():
                self._guard(partial(self._settle, job_id, step))

    def _advance(self, job: Job, event: JobInput) -> Step:
        from ascendrun.core.jobs.draft import Step
        from ascendrun.core.jobs.lifecycle import advance

        def recent() -> list[str]:
            return [f"{event.code} {event.values}" for event in self._store.events(job.id)[-20:]]

        try:
            return advance(job, event, now_s=time.time(), recent=recent)
        except Exception:
            self._guard.log_exception()  # the job stays as it was; the others must not suffer
            return Step(job)

    def _settle(self, job_id: str, step: Step) -> None:
        """Take the step, or keep it for the next turn while the store cannot write (a full disk, a long lock)."""
        if step.job == self._runners[job_id].job and not step.actions:
            return
        try:
            self._take(self._runners[job_id], step)
        except StoreUnusableError as error:
            self._unsaved[job_id] = step
            if isinstance(error, StoreDamagedError):
                self._guard.store_is_damaged = True
            else:
                self._guard.log_exception()

    def _take(self, runner: JobRunner, step: Step) -> None:
        """Store the decision, then carry it out: after a crash between the two the new controller repeats it."""
        from ascendrun.core.jobs.inputs import Judge

        before = runner.job
        if step.job != runner.job:
            failpoint("controller.before_save")
            self._store.save(step.job, step.events, now_s=time.time())
            failpoint("controller.after_save")
            is_new_attempt = step.job.attempt != runner.job.attempt
            runner.job = step.job
            if is_new_attempt:
                runner.begin_attempt()
        for event in step.events:
            if event.code in ("restarting", "gave-up"):
                self._guard(partial(self.machines.note_failure, runner, event))
        for action in step.actions:
            if isinstance(action, Judge):
                self._guard(partial(self.judging.start, runner))
            else:
                self._guard(partial(runner.perform, action))  # the others continue if one fails
        failpoint("controller.after_actions")
        if step.transitions:
            self._fetch_artifacts(before, step)
        if step.transitions and step.job.is_terminal:
            self._fetch_outputs(runner)
            runner.drain()

    def _fetch_outputs(self, runner: JobRunner) -> None:
        if runner.spec.outputs and runner.job.go_sent_at_s is not None:
            self._guard(partial(self._outputs().request, runner.job.id))

    def _fetch_artifacts(self, before: Job, step: Step) -> None:
        """Request the files that may explain a failure immediately: logs rotate, and devices recover."""
        from ascendrun.core.jobs.draft import may_restart
        from ascendrun.head.spool.artifact_fetch import failed_attempt

        attempt = failed_attempt(before, step.job, step.transitions)
        if attempt is not None and not may_restart(before):  # else requested when it started to stop
            self._guard(partial(self._artifacts().fetch, before.id, attempt))


FileTrouble = Union[FileTruncated, FileUnreadable, FileLimited]
FILE_TROUBLE: Mapping[type[FileTrouble], tuple[str, tuple[str, ...]]] = {
    FileTruncated: ("file-truncated", ("file", "generation", "size")),
    FileUnreadable: ("file-unreadable", ("file", "generation", "error")),
    FileLimited: ("file-limited", ("file", "generation", "size", "limit")),
}
"""Events of a node about one of its files: the code of the job's event, and its values."""


def file_event(host: str, trouble: FileTrouble, *, attempt: int, now_s: float) -> Event:
    """Return the job event for a node's event of FILE_TROUBLE."""
    code, names = FILE_TROUBLE[type(trouble)]
    return Event(code, {name: getattr(trouble, name) for name in names}, (host,), (), attempt, now_s)
