"""Writer of the controller's pulse: once in 5 s, and within a second after a change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.pulse import PULSE_S, Clock, HostPulse, JobPulse, Pulse, Sight
from ascendrun.core.reachability import UNKNOWN
from ascendrun.head.state.pulse_file import PULSE_NAME, clock_now, read_pulse

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner

LOOK_S = 1.0
"""Interval at which changes are looked for: a thousand hosts cost milliseconds."""


class PulseWriter:
    """Use from the controller's thread: a loop that stands still leaves an old pulse."""

    def __init__(self, state_dir: Path, release: str) -> None:
        self._path = state_dir / PULSE_NAME
        self._release = release
        self._before = Sight(read_pulse(state_dir), clock_now())
        self._written: tuple[Any, ...] | None = None
        self._look_s = self._due_s = float("-inf")

    def make(self, runners: Iterable[JobRunner], now: Clock) -> Pulse:
        jobs = {runner.job.id: self._job(runner, now) for runner in runners if not runner.job.is_terminal}
        return Pulse(now.at_s, now.boot_s, now.boot_id, os.getpid(), self._release, jobs)

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
            self._write(pulse)
            self._written, self._due_s = shown, now.boot_s + PULSE_S - LOOK_S / 2

    def _write(self, pulse: Pulse) -> None:
        unfinished = self._path.with_name(f".{PULSE_NAME}")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
            json.dump(pulse.to_json(), opened)
        os.replace(unfinished, self._path)

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
