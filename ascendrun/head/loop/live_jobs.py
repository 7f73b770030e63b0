"""The live jobs: their events pass through the lifecycle; decisions are stored, then carried out."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.head.agents.connections import Connections
from ascendrun.head.protocol.agent_messages import FileData, FileTruncated, FileUnreadable, FollowFailed
from ascendrun.head.protocol.messages import Message
from ascendrun.head.protocol.remote import AgentConnection
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import LostLeaseError, Store, StoredJob
from ascendrun.node.failpoint import failpoint

if TYPE_CHECKING:
    from ascendrun.core.jobs.inputs import JobInput
    from ascendrun.core.jobs.job import Job
    from ascendrun.core.jobs.lifecycle import Step
    from ascendrun.core.jobs.schedule import Claim
    from ascendrun.head.loop.job_runner import JobRunner
    from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
    from ascendrun.head.spool.sample_ingest import SampleIngest
    from ascendrun.head.survey.submission import Submission

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.

SETTLING_S = 30.0
"""Seconds after a job's end during which its last bytes may still arrive."""


class Guard:
    """Runs calls; their internal errors are logged and do not end the controller. Use from one thread.

    Raises LostLeaseError only: a controller that has lost its lease must do nothing more.
    """

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, call: Callable[[], object]) -> None:
        try:
            call()
        except LostLeaseError:
            raise
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

    Use from the controller's thread, except `handle_message`. `artifacts` and `samples` create their object at the
    first call.
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
        samples: Callable[[], SampleIngest],
    ) -> None:
        self._state_dir, self._store, self._links = state_dir, store, links
        self._post, self._guard, self._artifacts, self._samples = post, guard, artifacts, samples
        self._runners: dict[str, JobRunner] = {}
        self._claims: dict[str, tuple[Claim, ...]] = {}
        self._events: deque[tuple[str, JobInput]] = deque()
        self._unsaved: dict[str, Step] = {}

    def __iter__(self) -> Iterator[JobRunner]:
        """Iterate over a copy: a runner may be removed during the loop."""
        return iter(tuple(self._runners.values()))

    def __bool__(self) -> bool:
        return bool(self._runners)

    def is_busy(self, *, now_s: float) -> bool:
        """Return whether a job is live, or has ended so recently that its last bytes may still arrive."""
        return any(runner.job.ended_at_s is None or now_s - runner.job.ended_at_s < SETTLING_S for runner in self)

    # From any thread

    def handle_message(self, link: AgentConnection, event: Message, body: bytes) -> None:
        """Handle an event of a node: bytes of an attempt's files, or that they cannot be followed."""
        if not isinstance(event, (FileData, FileTruncated, FileUnreadable, FollowFailed)):
            return
        for runner in self:
            host = runner.uses(link) if runner.job.run_id == event.tag else None
            if host is None:
                continue
            if isinstance(event, FileData):
                runner.take_data(host, event, body)
            elif isinstance(event, FollowFailed):
                self._post(partial(runner.follow_later, host))
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
        if runner.job.go_sent_at_s is not None:
            for host in runner.job.hosts:
                runner.take_events(host)
                runner.link(host)

    def add(self, job: Job, submission: Submission) -> JobRunner:
        """Give the job a runner; an existing runner is kept."""
        if job.id in self._runners:
            return self._runners[job.id]
        from ascendrun.head.loop.job_runner import JobRunner, RunnerContext
        from ascendrun.head.survey.submission import claims_of

        context = RunnerContext(
            self._state_dir, self._links, post=self._post, feed=self.feed, drained=self._forget, samples=self._samples()
        )
        runner = JobRunner(job, spec=submission.spec, hosts=submission.hosts, trees=submission.trees, context=context)
        self._runners[job.id] = runner
        self._claims[job.id] = claims_of(submission.spec, submission.hosts)
        return runner

    def _forget(self, job_id: str) -> None:
        runner = self._runners[job_id]
        if runner.job.unconfirmed:
            return
        self._store.mark_drained(job_id)
        del self._runners[job_id], self._claims[job_id]

    # Connections and time

    def on_up(self, link: AgentConnection) -> None:
        for runner in self:
            host = runner.uses(link)
            if host is not None:
                runner.on_up(host)

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        for runner in self:
            host = runner.uses(link)
            if host is not None:
                runner.on_down(host, link, error)

    def tick(self, *, was_away: bool) -> None:
        """Handle time. `was_away`: this process was suspended, so missing messages mean nothing about the nodes."""
        from ascendrun.core.jobs.inputs import Tick
        from ascendrun.core.jobs.lifecycle import Step, restart_timers

        reachable = frozenset(link.host.name for link in self._links if link.is_up)
        for runner in self:
            self._guard(runner.tick)
            if runner.job.is_terminal:
                self._guard(runner.drain)
                continue
            if was_away:
                unsaved = self._unsaved.pop(runner.job.id, None) or Step(runner.job)
                self._settle(runner.job.id, unsaved.then(Step(restart_timers(unsaved.job, now_s=time.time()))))
            self.feed(runner.job.id, Tick(reachable))
        self.schedule()

    def schedule(self) -> None:
        """Decide again which jobs may start."""
        from ascendrun.core.jobs.schedule import schedule_all

        jobs = [(runner.job, self._claims[job_id]) for job_id, runner in self._runners.items()]
        for job_id, verdict in schedule_all(jobs, self._job).items():
            self.feed(job_id, verdict)

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
        """Store events that do not change the job."""
        if job_id in self._runners:
            self._store.save(self._runners[job_id].job, events, now_s=time.time())

    def _record_trouble(self, runner: JobRunner, host: str, trouble: FileTruncated | FileUnreadable) -> None:
        self.record(runner.job.id, [file_event(host, trouble, attempt=runner.job.attempt, now_s=time.time())])

    # Events, decisions, actions

    def feed(self, job_id: str, event: JobInput) -> None:
        """Give an event to a job's lifecycle; handled before anything else that arrives."""
        self._events.append((job_id, event))

    def work_off_events(self) -> None:
        """Handle queued events; all events of one job are one step of it, stored once."""
        if not self._events:
            return
        from ascendrun.core.jobs.lifecycle import Step

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
        from ascendrun.core.jobs.lifecycle import InvalidTransitionError, Step, advance

        def recent() -> list[str]:
            return [f"{event.code} {event.values}" for event in self._store.events(job.id)[-20:]]

        try:
            return advance(job, event, now_s=time.time(), recent=recent)
        except InvalidTransitionError:
            self._guard.log_exception()  # the job stays as it was; the others must not suffer
            return Step(job)

    def _settle(self, job_id: str, step: Step) -> None:
        """Take the step, or keep it for the next turn while the store cannot write (a full disk, a long lock)."""
        if step.job == self._runners[job_id].job and not step.actions:
            return
        try:
            self._take(self._runners[job_id], step)
        except StoreUnusableError:
            self._unsaved[job_id] = step
            self._guard.log_exception()

    def _take(self, runner: JobRunner, step: Step) -> None:
        """Store the decision, then carry it out: after a crash between the two the new controller repeats it."""
        before = runner.job
        if step.job != runner.job:
            failpoint("controller.before_save")
            self._store.save(step.job, step.events, now_s=time.time())
            failpoint("controller.after_save")
            is_new_attempt = step.job.attempt != runner.job.attempt
            runner.job = step.job
            if is_new_attempt:
                runner.begin_attempt()
        for action in step.actions:
            self._guard(partial(runner.perform, action))  # the others continue if one fails
        failpoint("controller.after_actions")
        if step.transitions:
            self._fetch_artifacts(before, step)
        if step.transitions and step.job.is_terminal:
            runner.drain()

    def _fetch_artifacts(self, before: Job, step: Step) -> None:
        """Request the files that may explain a failure immediately: logs rotate, and devices recover."""
        from ascendrun.head.spool.artifact_fetch import failed_attempt

        attempt = failed_attempt(before, step.job, step.transitions)
        if attempt is not None:
            self._guard(partial(self._artifacts().fetch, before.id, attempt))


def file_event(host: str, trouble: FileTruncated | FileUnreadable, *, attempt: int, now_s: float) -> Event:
    """Return the job event for a node's event about one of its files."""
    values = {"file": trouble.file, "generation": trouble.generation}
    if isinstance(trouble, FileTruncated):
        return Event("file-truncated", {**values, "size": trouble.size}, (host,), (), attempt, now_s)
    return Event("file-unreadable", {**values, "error": trouble.error}, (host,), (), attempt, now_s)
