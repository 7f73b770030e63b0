"""Examination in the background, with the light checks of every start: idle hosts and spares, never a host in use.

What a check finds is noted with the machine; a finding that blames one machine is a strike. Spares also get the code
of their job: a replacement then starts without staging.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ascendrun.core.events import Event
from ascendrun.core.findings import Finding, Severity
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.machines import address_of
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.control_messages import Survey, SurveyReply
from ascendrun.head.survey.survey_reader import PASSING
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.loop.context import Context
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.loop.live_jobs import LiveJobs
    from ascendrun.head.loop.operations import Operations
    from ascendrun.health.survey.check_context import CheckContext

LOOK_S = 5.0
SPARES_S = 300.0
"""Seconds between two examinations of a spare."""
UNREACHED_S = 30.0
"""Seconds until a spare that did not respond is examined again: it may be starting."""
AT_ONCE = 16
"""Hosts of one round: more would keep the controller from its jobs while it reads the results."""


class Examiner:
    """Use from the controller's thread. `idle_every_s`: seconds between two examinations of an idle host; None: never
    examine one."""

    def __init__(
        self, context: Context, jobs: LiveJobs, operations: Operations, *, idle_every_s: float | None = None
    ) -> None:
        self._jobs, self._operations = jobs, operations
        self.idle_every_s = idle_every_s
        self._due_mono = 0.0
        self._is_waiting = False
        self._tried: dict[tuple[str, str], float] = {}
        self._noted: dict[tuple[str, str], Event] = {}

    def tick(self) -> None:
        """Start a round if one is due; at most one runs at a time. Call at any rate."""
        if self._is_waiting or time.monotonic() < self._due_mono:
            return
        self._due_mono = time.monotonic() + LOOK_S
        for runner in self._jobs:
            if runner.job.state is State.RUNNING and runner.job.spares:
                spares = [host for host in runner.hosts if host.name in runner.job.spares]
                due = self._due(runner.job.run_id, spares, SPARES_S)
                if due:
                    self._examine(due, runner)
                    return
        if self.idle_every_s is not None:
            due = self._due("", self._jobs.machines.idle_hosts(), self.idle_every_s)
            if due:
                self._examine(due, None)

    def ready_spares(self, job: Job) -> tuple[str, ...]:
        """Return the spares of a running job that could start now."""
        notes = {host: self._noted.get((job.id, host)) for host in job.spares}
        return tuple(
            host for host, one in notes.items() if one and one.code == "spare-ready" and one.attempt == job.attempt
        )

    def _due(self, owner: str, hosts: Sequence[Host], every_s: float) -> Sequence[Host]:
        now = time.monotonic()
        tried = [self._tried.get((owner, address_of(host)), float("-inf")) for host in hosts]
        due = [host for host, at in zip(hosts, tried) if now - at >= every_s][:AT_ONCE]
        self._tried = {key: at for key, at in self._tried.items() if now - at < max(SPARES_S, self.idle_every_s or 0.0)}
        self._tried.update({(owner, address_of(host)): now for host in due})
        return due

    def _examine(self, hosts: Sequence[Host], runner: JobRunner | None) -> None:
        from ascendrun.head.survey.submission import Submission

        submission = None
        if runner is not None:
            submission = Submission("examination", runner.spec, tuple(hosts), runner.trees, None)
        self._is_waiting = True
        request = Survey(tuple(hosts), None if submission is None else submission.to_json(), is_full=False)
        self._operations.examine(request, partial(self._take, hosts, submission, runner))

    def _take(
        self, hosts: Sequence[Host], submission: Any, runner: JobRunner | None, replies: Sequence[SurveyReply]
    ) -> None:
        from ascendrun.head.survey.survey_reader import read_world

        self._is_waiting = False
        context = read_world(replies, submission, device_type=None, now_s=time.time())
        has_peers = len(self._jobs.machines.records) > 1
        # Unrelated hosts need not reach each other, but the jobs of several hosts need the ports of each.
        alone = replace(context, job=None, plan=None, unreached={}, has_peers=has_peers)
        found_alone = [failures(replace(alone, facts={host: one})) for host, one in context.facts.items()]
        own = {host: finding for found in found_alone for host, finding in found.items()}
        codes = Counter(finding.code for finding in own.values())
        of_job = failures(context) if runner is not None else {}
        idle = {address_of(host) for host in self._jobs.machines.idle_hosts()} if runner is None else set()
        for host in hosts:
            is_spare = runner is not None and host.name in runner.job.spares and runner.job.state is State.RUNNING
            if not is_spare and address_of(host) not in idle:
                continue  # a job took it meanwhile: its own checks count
            if host.name not in context.unreached:
                found = own.get(host.name)
                finding = None if found is None else found.message
                count = 0 if found is None else codes[found.code]
                is_own = count == 1 or 2 * count <= len(context.facts)  # else the fault of what they share
                self._jobs.machines.take_examination(host, finding, is_strike=is_own)
            if runner is None or not is_spare:
                continue
            missed, found = context.unreached.get(host.name), own.get(host.name) or of_job.get(host.name)
            if missed is not None:
                self._tried[runner.job.run_id, address_of(host)] = time.monotonic() - SPARES_S + UNREACHED_S
                self._note_spare(runner, host, missed.message)
            elif found is not None:
                self._note_spare(runner, host, found.message)
            else:
                runner.start.send_trees(host.name, partial(self._staged, runner, host))

    def _staged(self, runner: JobRunner, host: Host, failure: Failure | None) -> None:
        self._note_spare(runner, host, None if failure is None else failure.line())

    def _note_spare(self, runner: JobRunner, host: Host, finding: Text | str | None) -> None:
        """Record whether a spare is ready, if that has changed."""
        values = {} if finding is None else {"finding": finding}
        code = "spare-ready" if finding is None else "spare-not-ready"
        event = Event(code, values, (host.name,), attempt=runner.job.attempt)
        if host.name in runner.job.spares and self._noted.get((runner.job.id, host.name)) != event:
            self._noted[runner.job.id, host.name] = event
            self._jobs.steps.record(runner.job.id, [replace(event, at_s=time.time())])


def failures(context: CheckContext) -> Mapping[str, Finding]:
    """Return the first finding of each host that would prevent a start there; not those of other users of devices and
    ports, which pass."""
    from ascendrun.health.checks import run_checks

    checks = context.job.checks if context.job is not None else None
    skip, require = (checks.skip, checks.require) if checks is not None else ((), ())
    found: dict[str, Finding] = {}
    for finding in run_checks(context, is_full=False, skip=skip, require=require):
        for host in finding.hosts if finding.severity is Severity.FAIL and finding.code not in PASSING else ():
            if host in context.facts:
                found.setdefault(host, finding)
    return found
