"""Inputs of live jobs pass through the lifecycle; each decision is stored, then carried out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Callable

from ascendrun.head.loop.call_guard import Guard
from ascendrun.head.state.state_dir import StoreDamagedError, StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.node.failpoint import failpoint

if TYPE_CHECKING:
    from ascendrun.core.jobs.draft import Step
    from ascendrun.core.jobs.inputs import JobInput
    from ascendrun.core.jobs.job import Job
    from ascendrun.head.loop.job.runner import JobRunner

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.


class JobSteps:
    """Use from the controller's thread. `runners`: by job id, read at each call. `carry_out(runner, before, step)`:
    performs what a stored step decided; `before` is the job before it."""

    def __init__(
        self,
        store: Store,
        guard: Guard,
        runners: Mapping[str, JobRunner],
        carry_out: Callable[[JobRunner, Job, Step], None],
    ) -> None:
        self._store, self._guard, self._runners, self._carry_out = store, guard, runners, carry_out
        self._inputs: deque[tuple[str, JobInput]] = deque()
        self._unsaved: dict[str, Step] = {}

    def feed(self, job_id: str, event: JobInput) -> None:
        """Give an input to a job's lifecycle; handled before anything else that arrives."""
        self._inputs.append((job_id, event))

    def work_off(self) -> None:
        """Handle queued inputs; all inputs of one job are one step of it, stored once."""
        if not self._inputs:
            return
        from ascendrun.core.jobs.draft import Step

        while self._inputs:
            steps, self._unsaved = self._unsaved, {}
            while self._inputs:
                job_id, event = self._inputs.popleft()
                if job_id in self._runners:
                    before = steps.get(job_id) or Step(self._runners[job_id].job)
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

        unsaved = self._unsaved.pop(job_id, None) or Step(self._runners[job_id].job)
        self.settle(job_id, unsaved.then(Step(restart_timers(unsaved.job, now_s=time.time()))))

    def settle(self, job_id: str, step: Step) -> None:
        """Take the step, or keep it for the next turn while the store cannot write (a full disk, a long lock)."""
        runner = self._runners[job_id]
        if step.job == runner.job and not step.actions:
            return
        try:
            self._take(runner, step)
        except StoreUnusableError as error:
            self._unsaved[job_id] = step
            if isinstance(error, StoreDamagedError):
                self._guard.store_is_damaged = True
            else:
                self._guard.log_exception()

    def _take(self, runner: JobRunner, step: Step) -> None:
        """Store the decision, then carry it out: after a crash between the two the new controller repeats it."""
        before = runner.job
        if step.job != before:
            failpoint("controller.before_save")
            self._store.jobs.save(step.job, step.events, now_s=time.time())
            failpoint("controller.after_save")
            runner.job = step.job
            if step.job.attempt != before.attempt:
                runner.begin_attempt()
        self._carry_out(runner, before, step)
