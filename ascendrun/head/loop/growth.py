"""Jobs that run on fewer hosts than they requested: they restart with spares that are ready, after a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ascendrun.core.jobs.inputs import GrowthPossible

if TYPE_CHECKING:
    from ascendrun.head.loop.context import Context
    from ascendrun.head.loop.examiner import Examiner
    from ascendrun.head.loop.job.runner import JobRunner

LOOK_S = 5.0
"""Seconds between two lists of the checkpoints of a job that waits for its next one."""


class Growth:
    """Use from the controller's thread."""

    def __init__(self, context: Context, examiner: Examiner) -> None:
        self._context, self._examiner = context, examiner
        self._due_mono = 0.0

    def tick(self, runners: Iterable[JobRunner]) -> None:
        """May be called at any rate."""
        if time.monotonic() < self._due_mono:
            return
        self._due_mono = time.monotonic() + LOOK_S
        for runner in [one for one in runners if one.job.lacks_hosts]:
            self._look(runner)

    def _look(self, runner: JobRunner) -> None:
        job, ready = runner.job, self._examiner.ready_spares(runner.job)

        def take(step: int | None) -> None:
            if step is not None and runner.job.run_id == job.run_id:
                self._context.steps.feed(job.id, GrowthPossible(ready, step))

        if ready or job.grows_after is not None:
            self._context.judging.list_saved(runner, take)
