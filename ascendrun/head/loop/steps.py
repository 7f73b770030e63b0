"""Inputs of live jobs pass through the lifecycle; each decision is stored, then carried out."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Callable

from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.events import SEPARATE, Event
from ascendrun.head.state.state_dir import StoreDamagedError, StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import LostLeaseError
from ascendrun.node.failpoint import failpoint

if TYPE_CHECKING:
    from ascendrun.core.jobs.draft import Step
    from ascendrun.core.jobs.inputs import JobInput
    from ascendrun.core.jobs.job import Job
    from ascendrun.head.loop.job.runner import JobRunner

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.


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


class JobSteps:
    """Use from the controller's thread. `runners`: by job id. `carry_out(runner, before, step)`: performs what a
    stored step decided; `before` is the job before it. `after`: calls when what is stored is on the standby too.
    `may_act`: whether this head has its lease."""

    def __init__(self, store: Store, guard: Guard) -> None:
        self._store, self._guard = store, guard
        self.runners: dict[str, JobRunner] = {}
        self.carry_out: Callable[[JobRunner, Job, Step], None] = lambda runner, before, step: None
        self.after: Callable[[Callable[[], None]], None] = lambda call: call()
        self.may_act: Callable[[], bool] = lambda: True
        self._inputs: deque[tuple[str, JobInput]] = deque()
        self._unsaved: dict[str, Step] = {}
        self._alone: dict[str, tuple[int, str, float]] = {}

    def __iter__(self) -> Iterator[JobRunner]:
        """Iterate over a copy: a runner may be removed during the loop."""
        return iter(tuple(self.runners.values()))

    def find(self, job_id: str) -> Job | None:
        """Return a job by its id, live or not; None: unknown."""
        runner = self.runners.get(job_id)
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
        job = self.find(job_id)
        if job is not None:
            self._store.jobs.save(job, events, now_s=time.time())

    def note_separate(self, job_id: str, attempt: int, host: str, world_size: int) -> None:
        """Record once for each attempt that ranks train without the others, and end the job; an earlier controller may
        have done so. The job continues if its `checks.skip` names the event. Each role has a world by itself."""
        from ascendrun.core.jobs.endings import TrainsSeparately

        if any(one.attempt == attempt and one.code == SEPARATE for one in self.events_of(job_id)):
            return
        spec = self._store.jobs.find(job_id).spec
        if spec.get("roles"):
            return
        values = {"world_size": world_size}
        self.record(job_id, [Event(SEPARATE, values, (host,), attempt=attempt, at_s=time.time())])
        if SEPARATE not in ((spec.get("checks") or {}).get("skip") or ()):
            self.feed(job_id, TrainsSeparately(attempt, host, world_size))

    def note_alone(self, job_id: str, attempt: int, host: str, is_alone: bool) -> None:
        """Note that rank 0 has no connection to another rank, or has one."""
        self._alone.pop(job_id, None)
        if is_alone and job_id in self.runners:
            self._alone[job_id] = attempt, host, time.monotonic()

    def alone_on(self, job_id: str, attempt: int, *, for_s: float) -> str | None:
        """Return the host of a rank 0 without a connection to another rank for so long; None: it has one, or it is not
        known. Any thread."""
        noted, host, since_s = self._alone.get(job_id, (0, "", 0.0))
        return host if noted == attempt and time.monotonic() - since_s >= for_s else None

    # Inputs

    def feed(self, job_id: str, event: JobInput) -> None:
        """Give an input to a job's lifecycle; handled before anything else that arrives."""
        self._inputs.append((job_id, event))

    def feed_diagnosis(self, job_id: str, event: JobInput) -> None:
        """Feed a diagnosis, also to a job that has no runner any more."""
        from ascendrun.core.jobs.lifecycle import advance

        if job_id in self.runners:
            self.feed(job_id, event)
            return
        job = self.find(job_id)
        if job is not None:
            step = advance(job, event, now_s=time.time())
            self._store.jobs.save(step.job, step.events, now_s=time.time())

    def work_off(self) -> None:
        """Handle queued inputs; all inputs of one job are one step of it, stored once."""
        if not self._inputs:
            return
        from ascendrun.core.jobs.draft import Step

        while self._inputs:
            steps, self._unsaved = self._unsaved, {}
            while self._inputs:
                job_id, event = self._inputs.popleft()
                if job_id in self.runners:
                    before = steps.get(job_id) or Step(self.runners[job_id].job)
                    steps[job_id] = before.then(self._advance(before.job, event))
            for job_id, step in steps.items():
                self._guard(partial(self.settle, job_id, step))

    def _advance(self, job: Job, event: JobInput) -> Step:
        from ascendrun.core.jobs.draft import Step
        from ascendrun.core.jobs.lifecycle import advance

        def recent() -> list[str]:
            return [f"{event.code} {event.values}" for event in self._store.events.of(job.id)[-20:]]

        try:
            return advance(job, event, now_s=time.time(), recent=recent)
        except Exception:
            self._guard.log_exception()  # the job stays as it was; the others must not suffer
            return Step(job)

    def restart_timers(self, job_id: str) -> None:
        """Count the times of a job from now: this process was suspended."""
        from ascendrun.core.jobs.draft import Step
        from ascendrun.core.jobs.lifecycle import restart_timers

        unsaved = self._unsaved.pop(job_id, None) or Step(self.runners[job_id].job)
        self.settle(job_id, unsaved.then(Step(restart_timers(unsaved.job, now_s=time.time()))))

    def settle(self, job_id: str, step: Step) -> None:
        """Store the step, then carry it out: after a crash between the two the new controller repeats it. It is kept
        for the next turn while the store cannot write (a full disk, a long lock), or while it may not act."""
        runner = self.runners[job_id]
        before = runner.job
        if step.job == before and not step.actions:
            return
        if step.actions and not self.may_act():
            self._unsaved[job_id] = step
            return
        try:
            if step.job != before:
                failpoint("controller.before_save")
                self._store.jobs.save(step.job, step.events, now_s=time.time())
                failpoint("controller.after_save")
                runner.job = step.job
                if step.job.attempt != before.attempt:
                    runner.begin_attempt()
        except StoreUnusableError as error:
            self._keep(job_id, step, error)
            return
        self.after(partial(self._perform, runner, before, step))

    def _perform(self, runner: JobRunner, before: Job, step: Step) -> None:
        try:
            self.carry_out(runner, before, step)
        except StoreUnusableError as error:
            self._keep(runner.job.id, step, error)

    def _keep(self, job_id: str, step: Step, error: StoreUnusableError) -> None:
        later = self._unsaved.get(job_id)
        self._unsaved[job_id] = step if later is None else step.then(later)
        if isinstance(error, StoreDamagedError):
            self._guard.store_is_damaged = True
        else:
            self._guard.log_exception()
