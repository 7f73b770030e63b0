"""Placement of queued jobs on the machines, and of a job that is not submitted yet."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from ascendrun.core.hosts import Host
    from ascendrun.core.jobs.inputs import JobInput
    from ascendrun.core.jobs.job import Job
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.loop.machines import Machines
    from ascendrun.head.survey.submission import Submission

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.


class Placing:
    """Use from the controller's thread. `find` returns a job by its id, None: unknown."""

    def __init__(self, find: Callable[[str], Job | None], feed: Callable[[str, JobInput], None]) -> None:
        self._find, self._feed = find, feed
        self._seen: tuple[object, ...] = ()
        self.changes = 0
        """Connections that came up or went down."""

    def schedule(self, runners: Collection[JobRunner], machines: Machines) -> None:
        """Decide again where queued jobs start: when a job or a machine has changed, else once a second."""
        jobs = [runner.job for runner in runners]
        seen = (jobs, machines.records.version, self.changes, int(time.time()))
        if seen == self._seen or all(job.state.value != "QUEUED" for job in jobs):
            return
        self._seen = seen
        from ascendrun.core.jobs.schedule import schedule

        claims = {runner.job.id: runner.claims for runner in runners}
        contenders = machines.contenders.of([(runner.job, runner.hosts) for runner in runners], claims)
        for job_id, decision in schedule(contenders, self._find, now_s=time.time()).items():
            self._feed(job_id, decision)

    def place(self, submission: Submission, runners: Collection[JobRunner], machines: Machines) -> tuple[Host, ...]:
        """Return the hosts on which a job would start now; if it would wait, those of its pool that come first."""
        from ascendrun.core.jobs.inputs import NodesFree
        from ascendrun.core.jobs.schedule import schedule
        from ascendrun.head.survey.submission import claims_of, make_job

        job = make_job(submission, "j-new", "dry-run", time.time())
        claims = {runner.job.id: runner.claims for runner in runners}
        claims[job.id] = claims_of(submission.spec, submission.hosts)
        jobs = [(runner.job, runner.hosts) for runner in runners]
        contenders = machines.contenders.of([*jobs, (job, submission.hosts)], claims)
        decision = schedule(contenders, self._find, now_s=time.time())[job.id]
        names = decision.hosts if isinstance(decision, NodesFree) else job.pool[: job.request.nodes]
        return tuple(host for name in names for host in submission.hosts if host.name == name)
