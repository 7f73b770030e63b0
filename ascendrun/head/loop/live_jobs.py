"""The live jobs: their events pass through the lifecycle; decisions are stored, then carried out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ascendrun.core.errors import AscendrunError
from ascendrun.core.events import Event
from ascendrun.head.loop.context import Context
from ascendrun.head.protocol.file_messages import FileData, FileLimited, FileTrouble
from ascendrun.head.protocol.messages import Message
from ascendrun.head.protocol.remote import AgentConnection, boot_s
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.state_dir import SPOOL_COMPLETE, spool_dir
from ascendrun.node.failpoint import failpoint

if TYPE_CHECKING:
    from ascendrun.core.jobs.draft import Step
    from ascendrun.core.jobs.job import Job
    from ascendrun.core.jobs.job_copy import JobCopy
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.loop.machine.allocations import Allocations
    from ascendrun.head.loop.machine.machines import Machines
    from ascendrun.head.loop.machine.placement import Placement
    from ascendrun.head.loop.machine.power import PowerSwitch
    from ascendrun.head.survey.submission import Submission

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.

GIVEN_UP = 4
"""Failed connects to a host of an allocation, which no job uses, before it is forgotten."""
SETTLING_S = 30.0
"""Seconds after a job's end during which its last bytes may still arrive."""


class LiveJobs:
    """The jobs with a runner: live jobs, and ended jobs whose last bytes are awaited.

    Use from the controller's thread, except `handle_message`. `machines` and `placement` are made when they are first
    used.
    """

    def __init__(self, context: Context) -> None:
        self.context, self._store, self._links = context, context.store, context.links
        self._state_dir, self._guard, self._post = context.state_dir, context.guard, context.post
        self.steps = context.steps
        self.steps.carry_out = self._carry_out
        self._listens_boot_s = boot_s()
        self._was_without_lease = False

    def __iter__(self) -> Iterator[JobRunner]:
        return iter(self.steps)

    def __bool__(self) -> bool:
        records = self.machines.records if "machines" in vars(self) else None
        has_more = records is not None and (records.has_found or records.has_unsaved)
        queue = self.context.queue  # a head with a standby learns of drains for it
        has_queue = queue is not None and (queue.is_open or self.context.lease is not None)
        return bool(self.steps.runners) or has_more or has_queue

    def is_busy(self, *, now_s: float) -> bool:
        """Return whether a job is live, or has ended so recently that its last bytes may still arrive."""
        return any(
            runner.job.ended_at_s is None
            or now_s - runner.job.ended_at_s < SETTLING_S
            or self.context.is_judging(runner.job.id)
            for runner in self
        )

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
                self._guard(lambda: self.context.artifacts.fetch(stored.job.id, attempt, only_missing=True))
            noted = {event.code for event in self.steps.events_of(stored.job.id) if event.attempt == stored.job.attempt}
            if not noted & {"outputs-fetched", "outputs-missing", "outputs-refused", "outputs-failed"}:
                self._guard(partial(self._request_outputs, runner))
        if runner.job.go_sent_at_s is not None:
            for host in runner.job.hosts:
                runner.copies.present.take_records(host)
                runner.link(host)

    def _adopt_found(self, copy: JobCopy, attempt: int) -> bool:
        """Take over an attempt that runs and that the store does not know, from the copy of its job on a node. Return
        False if its allocation is not known yet."""
        from ascendrun.head.loop.rescue import job_after_go
        from ascendrun.head.state.job_files import write_copy

        changes: dict[str, Any] = {}
        if copy.new_job().engine is not None:
            lost = self.allocations.of_lost(copy.run)
            if lost is None:
                return False
            key, hosts = lost
            copy = replace(copy, hosts=[asdict(host) for host in hosts])
            changes = {"allocation": key, "granted": tuple(hosts)}
        job = replace(job_after_go(self._state_dir, copy, replace(copy.new_job(), attempt=attempt)), **changes)
        copy = replace(copy, placement=())
        write_copy(self._state_dir, copy)
        found = Event("adopted", {}, job.hosts, attempt=attempt, at_s=time.time())
        with self._store.writing() as db:
            self._store.jobs.put(db, copy, job, [found], is_drained=False)
        if job.id in self.steps.runners:  # it was known as it was submitted
            self.steps.runners.pop(job.id).abandon()
        self.adopt(self._store.jobs.find(job.id))
        return True

    def add(self, job: Job, submission: Submission) -> JobRunner:
        """Give the job a runner; an existing runner is kept."""
        if job.id in self.steps.runners:
            return self.steps.runners[job.id]
        from ascendrun.head.loop.job.runner import JobRunner

        runner = self.steps.runners[job.id] = JobRunner(job, submission, self)
        return runner

    def stored(self) -> tuple[StoredJob, ...]:
        """Return the jobs with a runner as the store must have them."""
        return tuple(StoredJob(runner.job, **runner.submission.values) for runner in self)

    def adopt_missing(self) -> None:
        """Resume the live jobs of the store that have no runner, and store the machines again."""
        if "machines" in vars(self):
            self.machines.records.keep_all()
        for stored in self._store.jobs.live():
            if stored.job.id not in self.steps.runners:
                self._guard(partial(self.adopt, stored))

    def forget(self, job_id: str) -> None:
        """End the runner of an ended job of which every byte is here; its allocation first."""
        runner = self.steps.runners.get(job_id)
        if runner is None or runner.job.held_hosts or self.context.is_judging(job_id):
            return
        if runner.job.allocation is not None:
            self.allocations.drained.add(job_id)
            return
        self._store.jobs.mark_drained(job_id)
        self._store.on_change(spool_dir(self._state_dir, job_id, runner.job.attempt) / SPOOL_COMPLETE)
        if "placement" in vars(self):
            self.placement.end(runner)
        del self.steps.runners[job_id]
        if runner.job.go_sent_at_s is not None:
            self.context.judging.repeat(job_id, runner.job.attempt)

    # Connections and time

    @cached_property
    def machines(self) -> Machines:
        from ascendrun.head.loop.machine.machines import Machines

        return Machines(self._store, self._links, self.steps, self._adopt_found)

    @cached_property
    def power(self) -> PowerSwitch:
        from ascendrun.head.loop.machine.power import PowerSwitch

        return PowerSwitch(self.context, self.machines)

    @cached_property
    def placement(self) -> Placement:
        from ascendrun.head.loop.machine.placement import Placement

        return Placement(self.machines, self._links, self.steps, self._store, self.context.queue)

    @cached_property
    def allocations(self) -> Allocations:
        from ascendrun.head.loop.machine.allocations import Allocations

        return Allocations(self.steps, self.context, self.machines, changed=self.schedule)

    def on_up(self, link: AgentConnection) -> None:
        if link.info.live or self.steps.runners:  # else a node without attempts, before the first job
            self._guard(lambda: self.machines.reconciler.on_up(link))
        users = [(runner, host) for runner in self if (host := runner.uses(link)) is not None]
        for runner, host in users:
            self.context.replica.after(partial(runner.on_up, host))  # it repeats what was decided
        if not users and not link.info.live and "allocations" in vars(self):
            self.allocations.drop_empty(link.host)

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        if link.host.engine is not None:
            self.allocations.look_soon()
        users = [(runner, host) for runner in self if (host := runner.uses(link)) is not None]
        for runner, host in users:
            runner.on_down(host, link, error)
        if link.host.allocation is not None and not users and link.failures >= GIVEN_UP:
            self._links.forget(link.host)  # of a check that has ended

    def tick(self, *, was_away: bool) -> None:
        """Handle time. `was_away`: this process was suspended, so missing messages mean nothing about the nodes."""
        from ascendrun.core.jobs.inputs import Tick

        if self._waits_for_lease():
            return
        was_away, self._was_without_lease = was_away or self._was_without_lease, False
        now_boot_s = boot_s()
        if was_away:
            self._listens_boot_s = now_boot_s
        reachable = frozenset(link.host.name for link in self._links if link.is_up)
        quiet_s = {
            link.host.name: now_boot_s - max(self._listens_boot_s, link.heard_boot_s or 0.0)
            for link in self._links
            if not link.is_up
        }
        has_bmc = any(host.bmc for runner in self for host in runner.hosts)
        for runner in self:
            self._guard(runner.tick)
            self._guard(partial(self.context.judging.tick, runner, quiet_s))
            if runner.job.is_terminal:
                self._guard(runner.copies.drain)
                if runner.job.engine is not None and runner.job.allocation is None:
                    self._guard(partial(self.forget, runner.job.id))  # nothing can arrive any more
                continue
            if was_away:
                self.steps.restart_timers(runner.job.id)
            is_ending = has_bmc and runner.job.state.value == "STOPPING"
            switchable = frozenset(self.power.hosts_of(runner)) if is_ending else frozenset()
            self.steps.feed(runner.job.id, Tick(reachable, runner.leases.expired(), quiet_s, switchable))
        if has_bmc:
            self._guard(partial(self.power.tick, quiet_s))
        self._guard(self.machines.tick)
        self.schedule()

    def _waits_for_lease(self) -> bool:
        """Return whether this head may change nothing on nodes: no time passes for jobs, and queued ones show why."""
        lease = self.context.lease
        if lease is None or lease.is_held:
            return False
        from ascendrun.core.jobs.inputs import WaitingForNodes

        self._was_without_lease = True
        for runner in self:
            self._guard(runner.tick)
            if runner.job.state.value == "QUEUED":
                self.steps.feed(runner.job.id, WaitingForNodes(lease.why_waiting()))
        return True

    def schedule(self) -> None:
        """Request hosts, and decide again where queued jobs start, if something has changed."""
        if self.context.lease is not None and not self.context.lease.is_held:
            return
        if any(runner.job.engine is not None for runner in self):
            self._guard(self.allocations.tick)
        is_shared = self.context.queue is not None
        if is_shared or any(runner.job.state.value == "QUEUED" or runner.job.lacks_hosts for runner in self):
            self.placement.schedule()

    def _record_trouble(self, runner: JobRunner, host: str, trouble: FileTrouble) -> None:
        from ascendrun.head.protocol.agent_events import file_event

        event = file_event(host, trouble, now_s=time.time())
        told = self.steps.events_of(runner.job.id) if isinstance(trouble, FileLimited) else ()  # at each connection
        if any(_file_of(one) == _file_of(event) for one in told if one.code == event.code):
            return
        self.steps.record(runner.job.id, [event])

    # What a step decided

    def _carry_out(self, runner: JobRunner, before: Job, step: Step) -> None:
        from ascendrun.core.jobs.actions import Judge

        if step.job.granted != before.granted:
            runner.set_hosts(replace(runner.submission, hosts=step.job.granted))
        for event in step.events:
            if event.code in ("restarting", "gave-up"):
                self._guard(partial(self.machines.note_failure, runner, event))
        for action in step.actions:
            is_judging = isinstance(action, Judge)
            call = partial(self.context.judging.start, runner) if is_judging else partial(runner.perform, action)
            self._guard(call)  # the others continue if one fails
        failpoint("controller.after_actions")
        if step.transitions:
            self._guard(partial(self._request_artifacts, before, step))
        if step.transitions and step.job.is_terminal:
            self._guard(partial(self._request_outputs, runner))
            runner.copies.drain()

    def _request_outputs(self, runner: JobRunner) -> None:
        """Request the outputs of an ended job that was started."""
        if runner.spec.outputs and runner.job.go_sent_at_s is not None:
            self.context.outputs.request(runner.job.id)

    def _request_artifacts(self, before: Job, step: Step) -> None:
        """Request the files that may explain a failure immediately: logs rotate, and devices recover."""
        from ascendrun.core.jobs.draft import may_restart
        from ascendrun.head.spool.artifact_fetch import failed_attempt

        attempt = failed_attempt(before, step.job, step.transitions)
        if attempt is not None and not may_restart(before):  # else requested when it started to stop
            self.context.artifacts.fetch(before.id, attempt)


def _file_of(event: Event) -> tuple[object, ...]:
    """Return which file an event about one concerns."""
    return event.hosts, event.attempt, event.values["file"], event.values["generation"]
