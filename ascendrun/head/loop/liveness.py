"""Monitor that records when hosts of running jobs become unreachable, and when they respond again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Callable

from ascendrun.core.events import Event
from ascendrun.core.reachability import ReachabilityWatch, unreachable_hosts

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner

LOOK_S = 1.0
"""Interval of host checks: a change is reported after many seconds, and a thousand hosts cost milliseconds."""


class ReachabilityMonitor:
    """Monitor in the controller's thread. `events_of(job id)`: past events; `record(job id, events)`: adds some."""

    def __init__(
        self, *, events_of: Callable[[str], Sequence[Event]], record: Callable[[str, Sequence[Event]], None]
    ) -> None:
        self._events_of, self._record = events_of, record
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
                watch = self._watches[job_id] = ReachabilityWatch(unreachable_hosts(self._events_of(job_id)))
            changes = watch.update(_liveness(runner), now_s=now_s)
            if changes:
                attempt, at_s = runner.job.attempt, time.time()
                self._record(job_id, [Event(code, hosts=hosts, attempt=attempt, at_s=at_s) for code, hosts in changes])


def _liveness(runner: JobRunner) -> Mapping[str, str]:
    """Return liveness by host. A connection that was never up counts as alive, so its host is omitted."""
    links = [(host, runner.link(host)) for host in runner.job.hosts]
    return {host: link.liveness() for host, link in links if link.is_up or link.liveness() != "ALIVE"}
