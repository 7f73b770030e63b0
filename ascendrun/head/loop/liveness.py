"""Watches which hosts of running jobs answer, and tells their story when that changes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Callable

from ascendrun.core.reachability import ReachabilityWatch, unreachable_hosts

if TYPE_CHECKING:
    from ascendrun.head.loop.job_runner import JobRunner

LOOK_S = 1.0
"""How often hosts are looked at: who is silent is told after many seconds, and a thousand looks cost milliseconds."""

Lines = Sequence[tuple[str, str]]


class Listening:
    """Of one controller, in its thread. `story(job id)`: the lines so far; `tell(job id, lines)`: adds some."""

    def __init__(self, *, story: Callable[[str], Lines], tell: Callable[[str, Lines], None]) -> None:
        self._story, self._tell = story, tell
        self._watches: dict[str, ReachabilityWatch] = {}
        self._due_s = float("-inf")

    def tick(self, runners: Iterable[JobRunner], *, now_s: float | None = None) -> None:
        """As often as one likes. `now_s`: monotonic, None: now."""
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
                watch = self._watches[job_id] = ReachabilityWatch(unreachable_hosts(self._story(job_id)))
            lines = watch.look(_liveness(runner), now_s=now_s)
            if lines:
                self._tell(job_id, lines)


def _liveness(runner: JobRunner) -> Mapping[str, str]:
    """By host. A new link counts as alive before it was ever up: of that host nothing is said."""
    links = [(host, runner.link(host)) for host in runner.job.hosts]
    return {host: link.liveness() for host, link in links if link.is_up or link.liveness() != "ALIVE"}
