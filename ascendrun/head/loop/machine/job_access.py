"""What the machines use of the live jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.job import Job
from ascendrun.core.jobs.job_copy import JobCopy

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner


@dataclass(frozen=True)
class JobAccess:
    """What the comparison uses of the live jobs. `runners` iterates over a copy; `find` returns a job by its id, None:
    unknown; `feed` and `record` give an input or events to a job with a runner; `settle` handles and stores all inputs.
    `adopt` makes a job of the copy and the number of an attempt that runs."""

    runners: Callable[[], Iterator[JobRunner]]
    find: Callable[[str], Job | None]
    feed: Callable[[str, inputs.JobInput], None]
    record: Callable[[str, Sequence[Event]], None]
    settle: Callable[[], None]
    adopt: Callable[[JobCopy, int], None]
