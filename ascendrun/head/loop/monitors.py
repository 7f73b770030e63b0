"""What watches running jobs and idle machines, and the pulse that tells commands what is known of them now."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.events import Event
from ascendrun.core.pulse import PULSE_S, Clock, HostPulse, JobPulse, Pulse, Sight
from ascendrun.core.reachability import UNKNOWN, ReachabilityWatch, unreachable_hosts
from ascendrun.head.loop.context import Context
from ascendrun.head.loop.live_jobs import LiveJobs
from ascendrun.head.loop.operations import Operations
from ascendrun.head.loop.steps import JobSteps
from ascendrun.head.loop.watch import LoopWatch
from ascendrun.head.protocol.agent_bootstrap import why_lost
from ascendrun.head.state.state_dir import PULSE_NAME, clock_now, read_pulse
from ascendrun.node.files import write_json
from ascendrun.text.format import grouped

if TYPE_CHECKING:
    from ascendrun.head.loop.examiner import Examiner
    from ascendrun.head.loop.growth import Growth
    from ascendrun.head.loop.hang import HangMonitor
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.loop.stragglers import StragglerMonitor

LOOK_S = 1.0
"""Interval of host checks: a change is reported after many seconds, and a thousand hosts cost milliseconds."""


class Monitors:
    """Use from the controller's thread. `idle_check_s`: seconds between two examinations of an idle host, None: never.
    All but reachability are imported when there is something to watch."""

    def __init__(self, context: Context, jobs: LiveJobs, operations: Operations, idle_check_s: float | None) -> None:
        self._context, self._jobs = context, jobs
        self._operations, self._idle_check_s = operations, idle_check_s
        self._reachability = ReachabilityMonitor(context.steps)

    @cached_property
    def _stragglers(self) -> StragglerMonitor:
        from ascendrun.head.loop.stragglers import StragglerMonitor

        return StragglerMonitor(self._context)

    @cached_property
    def _hangs(self) -> HangMonitor:
        from ascendrun.head.loop.hang import HangMonitor

        return HangMonitor(self._context)

    @cached_property
    def _examiner(self) -> Examiner:
        from ascendrun.head.loop.examiner import Examiner

        return Examiner(self._context, self._jobs, self._operations, idle_every_s=self._idle_check_s)

    @cached_property
    def _growth(self) -> Growth:
        from ascendrun.head.loop.growth import Growth

        return Growth(self._context, self._examiner)

    def tick(self) -> None:
        """Look at what is due; may be called at any rate."""
        guard, jobs = self._context.guard, self._jobs
        if jobs:
            guard(lambda: self._reachability.tick(jobs))
            guard(lambda: self._stragglers.tick(runner.job for runner in jobs))
            guard(lambda: self._hangs.tick(jobs))
        has_spares = any(runner.job.spares and runner.job.state.value == "RUNNING" for runner in jobs)
        if has_spares or self._idle_check_s is not None:
            guard(lambda: self._examiner.tick())
        if has_spares:
            guard(lambda: self._growth.tick(jobs))


class ReachabilityMonitor:
    """Monitor in the controller's thread of the hosts that respond."""

    def __init__(self, steps: JobSteps) -> None:
        self._steps = steps
        self._watches: dict[str, ReachabilityWatch] = {}
        self._due_s = float("-inf")

    def tick(self, runners: Iterable[JobRunner], *, now_s: float | None = None) -> None:
        """Check the hosts; may be called at any rate. `now_s`: monotonic, None: now."""
        now_s = time.monotonic() if now_s is None else now_s
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_S
        started = {
            runner.job.id: runner
            for runner in runners
            if runner.job.go_sent_at_s is not None and not runner.job.is_terminal
        }
        for job_id in tuple(self._watches):
            if job_id not in started:
                del self._watches[job_id]
        for job_id, runner in started.items():
            watch = self._watches.get(job_id)
            if watch is None:
                watch = self._watches[job_id] = ReachabilityWatch(unreachable_hosts(self._steps.events_of(job_id)))
            changes = watch.update(_liveness(runner), now_s=now_s)
            if changes:
                self._steps.record(job_id, [event for change in changes for event in _events(runner, *change)])


def _liveness(runner: JobRunner) -> Mapping[str, str]:
    """Return liveness by host. A connection that was never up counts as alive, so its host is omitted."""
    links = [(host, runner.link(host)) for host in runner.job.hosts]
    return {host: link.liveness() for host, link in links if link.is_up or link.liveness() != "ALIVE"}


def _events(runner: JobRunner, code: str, hosts: tuple[str, ...]) -> Iterator[Event]:
    """Return the events of one change: one for each reason."""
    is_lost = code == "unreachable"
    reasons = grouped((why_lost(runner.link(host).first_error) if is_lost else "", host) for host in hosts)
    at_s = time.time()
    for why, alike in reasons.items():
        yield Event(code, {"why": why} if is_lost else {}, tuple(alike), attempt=runner.job.attempt, at_s=at_s)


class PulseWriter:
    """Use from the controller's thread: a loop that stands still leaves an old pulse."""

    def __init__(self, state_dir: Path, release: str, watch: LoopWatch) -> None:
        self._path = str(state_dir / PULSE_NAME)
        self._release, self._watch = release, watch
        self._before = Sight(read_pulse(state_dir), clock_now())
        self._written: tuple[Any, ...] | None = None
        self._look_s = self._due_s = float("-inf")

    def make(self, runners: Iterable[JobRunner], now: Clock) -> Pulse:
        jobs = {runner.job.id: self._job(runner, now) for runner in runners if not runner.job.is_terminal}
        late_s, stall = self._watch.recent_s(), self._watch.stall
        return Pulse(now.at_s, now.boot_s, now.boot_id, os.getpid(), self._release, jobs, late_s, stall)

    def tick(self, runners: Iterable[JobRunner], now: Clock | None = None) -> None:
        """Write when it is due; may be called at any rate."""
        now = now or clock_now()
        if now.boot_s < self._look_s:
            return
        self._look_s = now.boot_s + LOOK_S
        pulse = self.make(runners, now)
        shown = tuple(
            (
                job_id,
                job.state,
                tuple((host, one.liveness, one.ranks_alive) for host, one in job.hosts.items()),
                job.staged,
            )
            for job_id, job in pulse.jobs.items()
        )
        if now.boot_s < self._due_s and shown == self._written:
            return
        with suppress(OSError):  # a full disk: commands find an old pulse and ask the controller itself
            write_json(self._path, pulse.to_json(), durable=False)
            self._written, self._due_s = shown, now.boot_s + PULSE_S - LOOK_S / 2

    def _job(self, runner: JobRunner, now: Clock) -> JobPulse:
        job = runner.job
        if job.state.value == "QUEUED":
            return JobPulse(job.state.value)
        before = self._before.job(job.id)
        ranks = {node.host: sum(rank not in node.exits for rank in node.ranks) for node in job.nodes}
        hosts = {}
        for host in job.hosts:
            link = runner.link(host)
            heard_s = link.heard_boot_s
            heard_at_s = before.heard_at_s.get(host) if heard_s is None else now.at_s - (now.boot_s - heard_s)
            liveness = UNKNOWN if heard_s is None and not link.failures else link.liveness()
            hosts[host] = HostPulse(liveness, heard_at_s, ranks.get(host, 0))
        return JobPulse(job.state.value, hosts, runner.start.staged_bytes() if job.state.value == "STAGING" else {})
