"""What watches running jobs and idle machines: reachability, stragglers, hangs, examinations."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ascendrun.head.loop.call_guard import Guard
from ascendrun.head.loop.context import ControllerContext
from ascendrun.head.loop.liveness import ReachabilityMonitor

if TYPE_CHECKING:
    from ascendrun.head.loop.examiner import Examiner
    from ascendrun.head.loop.hang import HangMonitor
    from ascendrun.head.loop.stragglers import StragglerMonitor


class Monitors:
    """Use from the controller's thread. `idle_check_s`: seconds between two examinations of an idle host, None: never.
    All but reachability are imported when there is something to watch."""

    def __init__(self, context: ControllerContext, guard: Guard, idle_check_s: float | None) -> None:
        self._context, self._guard, self._idle_check_s = context, guard, idle_check_s
        self._reachability = ReachabilityMonitor(events_of=context.jobs.events_of, record=context.jobs.record)

    @cached_property
    def _stragglers(self) -> StragglerMonitor:
        from ascendrun.head.loop.stragglers import StragglerMonitor

        jobs = self._context.jobs
        return StragglerMonitor(
            self._context.state_dir, post=self._context.post, record=jobs.record, events_of=jobs.events_of
        )

    @cached_property
    def _hangs(self) -> HangMonitor:
        from ascendrun.head.loop.hang import HangMonitor

        jobs = self._context.jobs
        return HangMonitor(
            self._context.state_dir,
            post=self._context.post,
            record=jobs.record,
            events_of=jobs.events_of,
            feed=jobs.steps.feed,
            separate=lambda job, host, world: jobs.note_separate(job.id, job.attempt, host, world),
        )

    @cached_property
    def _examiner(self) -> Examiner:
        from ascendrun.head.loop.examiner import Examiner

        one = self._context
        return Examiner(one.jobs, one.links, one.operations, post=one.post, idle_every_s=self._idle_check_s)

    def tick(self) -> None:
        """Look at what is due; may be called at any rate."""
        jobs = self._context.jobs
        if jobs:
            self._guard(lambda: self._reachability.tick(jobs))
            self._guard(lambda: self._stragglers.tick(runner.job for runner in jobs))
            self._guard(lambda: self._hangs.tick(jobs))
        has_spares = any(runner.job.spares and runner.job.state.value == "RUNNING" for runner in jobs)
        if has_spares or self._idle_check_s is not None:
            self._guard(lambda: self._examiner.tick())
