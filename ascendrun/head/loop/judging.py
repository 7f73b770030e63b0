"""Diagnosis of failed attempts in a child process, so that a thousand logs neither stall nor end the controller."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.jobs.checkpoints import Listings, choose
from ascendrun.core.jobs.endings import Diagnosed
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.outcome import judge_quickly
from ascendrun.core.jobs.reasons import FirstFailure
from ascendrun.core.jobs.restart import Failure, set_aside
from ascendrun.head.agents.node_query import query_checkpoints
from ascendrun.head.command import run_module
from ascendrun.head.spool.artifact_store import is_outdated
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.head.waiting import in_background
from ascendrun.node.failpoint import failpoint

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.spool.artifact_fetch import ArtifactFetcher

GATHER_WAIT_S = 20.0
"""Seconds after the last proof of the end during which logs and artifacts may still arrive."""
CHILD_S = 120.0
"""Seconds for the diagnosis, which takes a few, and more on a busy machine: the decision without it may be wrong."""


@dataclass
class _Case:
    attempt: int
    proven_mono: float | None = None
    is_running: bool = False


class Judging:
    """Use from the controller's thread. Every `start` is followed by one Diagnosed, unless the job moves on."""

    def __init__(
        self,
        state_dir: Path,
        artifacts: Callable[[], ArtifactFetcher],
        feed: Callable[[str, JobInput], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._state_dir, self._artifacts, self._feed, self._post = state_dir, artifacts, feed, post
        self._cases: dict[str, _Case] = {}

    def is_open(self, job_id: str) -> bool:
        """Return whether a diagnosis of the job is awaited."""
        return job_id in self._cases

    def start(self, runner: JobRunner) -> None:
        """Request the files that may explain the failure, and diagnose when they are here."""
        job = runner.job
        if job.id not in self._cases or self._cases[job.id].attempt != job.attempt:
            self._cases[job.id] = _Case(job.attempt)
            if job.go_sent_at_s is not None:
                self._artifacts().fetch(job.id, job.attempt, only_missing=True)

    def tick(self, runner: JobRunner, quiet_s: Mapping[str, float]) -> None:
        """Diagnose the attempt of a stopping or failed job when its evidence is complete, or has had its time to
        arrive; a host that has been silent for so long, by `quiet_s`, is not waited for again."""
        job = runner.job
        case = self._cases.get(job.id)
        if case is None:
            return
        is_over = job.state not in (State.STOPPING, State.FAILED)
        if is_over or job.attempt != case.attempt or job.failure is not None:
            del self._cases[job.id]
            return
        now = time.monotonic()
        if any(node.may_run_processes and node.host not in job.unconfirmed for node in job.nodes) or case.is_running:
            return
        case.proven_mono = case.proven_mono or now
        gone = {host for host, seconds in quiet_s.items() if seconds > GATHER_WAIT_S}
        is_complete = runner.copies.has_all(but=gone) and not self._artifacts().is_waiting(job.id, job.attempt)
        if is_complete or now - case.proven_mono > GATHER_WAIT_S or job.go_sent_at_s is None:
            case.is_running = True
            judge = partial(self._judge, job.id, job.attempt, lambda: Diagnosed(job.attempt, judge_quickly(runner.job)))
            self.list_saved(runner, judge)

    @staticmethod
    def list_saved(runner: JobRunner, then: Callable[[int | None], None]) -> None:
        """Give `then` the step of the newest complete checkpoint on the hosts that respond, 0: there is none; None:
        unknown, or no restart depends on it."""
        job = runner.job
        hosts = [host for host in runner.placed if runner.link(host.name).is_up]
        names = [host.name for host in hosts]

        def take(listings: Listings) -> None:
            chosen = choose(listings, names, skip=set_aside(job.past)) if set(names) <= set(listings) else None
            then(chosen.step if chosen is not None else None)

        if not hosts or job.policy.max_restarts <= 0:
            then(None)
            return
        query_checkpoints(runner.spec, job, hosts, links=runner.context.links, done=take)

    def repeat(self, job_id: str, attempt: int) -> None:
        """Diagnose an attempt again if more evidence has arrived since its diagnosis."""
        if job_id not in self._cases and is_outdated(spool_dir(self._state_dir, job_id, attempt)):
            self._judge(job_id, attempt, lambda: None, None)

    def _judge(
        self, job_id: str, attempt: int, without: Callable[[], Diagnosed | None], saved_step: int | None
    ) -> None:
        """Run the child in a thread, and feed its answer; `without` gives the answer if there is none."""

        def take(result: Diagnosed | None) -> None:
            result = result or without()
            if result is not None:
                self._feed(job_id, replace(result, saved_step=saved_step))

        def run() -> None:
            result = self._run_child(job_id, attempt)
            self._post(lambda: take(result))

        in_background(run, "judging")

    def _run_child(self, job_id: str, attempt: int) -> Diagnosed | None:
        try:
            failpoint("judge.before_child")
            arguments = str(self._state_dir), job_id, str(attempt)
            values = json.loads(run_module("ascendrun.query.explain", *arguments, timeout_s=CHILD_S))
            first = load_dataclass(FirstFailure, values["first"])
            return Diagnosed(attempt, load_dataclass(Failure, values["failure"]), values["last_step"], first)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            print(f"controller: {job_id}: no diagnosis of attempt {attempt}: {error}", file=sys.stderr, flush=True)
            return None
