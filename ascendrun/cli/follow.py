"""Follow a job: print its lines as they come, its changes of state and its attempts, until it has ended."""

from __future__ import annotations

import time

from ascendrun.cli.errors import warning_lines
from ascendrun.cli.log_output import format_line
from ascendrun.cli.output import describe_progress, describe_seconds, labelled
from ascendrun.cli.screen import Screen
from ascendrun.cluster import Cluster, JobDetail, JobView
from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.jobs.job import TERMINAL
from ascendrun.core.logs.log_view import LogView
from ascendrun.head.spool.spool_files import is_complete
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.query.log_follow import COMPLETE_DEADLINE_S, AttemptLogs, count_ranks, pause_after
from ascendrun.text import Text

POLL_S = (0.02, 0.1)
JOB_POLL_S = 0.25
BLIND_DEADLINE_S = 60.0
"""How long following continues while the controller does not respond."""
STAGING_REPORT_S = 5.0
"""How often staging is reported where there is no line at the bottom of a terminal."""
BATCH_LINES = 2000

ENDED = frozenset(state.value for state in TERMINAL)


def has_ended(job: JobView) -> bool:
    return job.state in ENDED


def follow_job(cluster: Cluster, job_id: str, *, screen: Screen, view: LogView, shows_lines: bool = True) -> JobDetail:
    """Returns the job once it has ended and every line is shown. KeyboardInterrupt passes through."""
    try:
        return _Following(cluster, job_id, screen, view, shows_lines).run()
    finally:
        screen.close()


class _Following:
    def __init__(self, cluster: Cluster, job_id: str, screen: Screen, view: LogView, shows_lines: bool) -> None:
        self._cluster = cluster
        self._job_id = job_id
        self._screen = screen
        self._view = view
        self._shows_lines = shows_lines
        self._state: str | None = None
        self._logs: AttemptLogs | None = None
        self._attempt = 0
        self._unreachable: tuple[str, ...] = ()
        self._reason, self._reason_mono = "", 0.0
        self._blind_since_s: float | None = None

    def run(self) -> JobDetail:
        detail = self._poll()
        polled_s = time.monotonic()
        while not has_ended(detail.job):
            started_cpu_s = time.process_time()
            is_quiet = self._show_new_lines() == 0
            pause_s = pause_after(time.process_time() - started_cpu_s, POLL_S)
            if time.monotonic() - polled_s >= JOB_POLL_S:
                detail = self._poll_again(detail)
                polled_s = time.monotonic()
            elif is_quiet:
                time.sleep(pause_s)
        self._drain(ended_s=detail.job.ended_at_s)
        return detail

    def _poll(self) -> JobDetail:
        """Read the job and print what is new about it."""
        detail = self._cluster.job(self._job_id)
        job = detail.job
        if job.attempt != self._attempt and job.attempt > 0:
            self._start_attempt(job)
        if self._logs is not None:
            self._logs.expect_ranks(count_ranks(job, self._view))
        if has_ended(job):
            self._screen.progress("")
            return detail
        if job.state != self._state:
            self._state = job.state
            self._unreachable = job.unreachable_hosts
            self._screen.echo(describe_state(job))
        elif job.unreachable_hosts != self._unreachable:
            self._unreachable = job.unreachable_hosts
            self._screen.echo(labelled(f"{job.id} {job.state}", job.reason))
        elif job.state == "STAGING" and not self._screen.is_live and job.reason != self._reason:
            if time.monotonic() - self._reason_mono >= STAGING_REPORT_S:
                self._reason, self._reason_mono = job.reason, time.monotonic()
                self._screen.echo(describe_state(job))
        self._screen.progress(describe_bottom(job, time.time()))
        return detail

    def _poll_again(self, before: JobDetail) -> JobDetail:
        """As `_poll`; what was known before while the controller does not respond: the job does not depend on it."""
        try:
            detail = self._poll()
        except (UnreachableError, DeadlineExceededError) as error:
            now_s = time.monotonic()
            if self._blind_since_s is None:
                self._blind_since_s = now_s
                message = Text("follow.retrying", "{problem}; the job keeps running; retrying", problem=error.message)
                self._screen.echo("\n".join(warning_lines(message)))
            if now_s - self._blind_since_s > BLIND_DEADLINE_S:
                raise
            return before
        self._blind_since_s = None
        return detail

    def _start_attempt(self, job: JobView) -> None:
        """Show the attempt before to its end, then switch to the new one."""
        if self._attempt:
            self._drain()
            self._screen.echo(Text("follow.attempt", "attempt {attempt} started", attempt=job.attempt))
        tail = self._view.tail if self._attempt == 0 else None
        self._attempt = job.attempt
        if self._shows_lines:
            folder = spool_dir(self._cluster.settings.state_dir, job.id, job.attempt)
            self._logs = AttemptLogs(folder, job.attempt, self._view, tail=tail)

    def _show_new_lines(self, *, final: bool = False) -> int:
        if self._logs is None:
            return 0
        count = 0
        batch: list[str] = []
        for line in self._logs.new_lines(final=final):
            batch.append(format_line(self._view, line, self._screen))
            count += 1
            if len(batch) >= BATCH_LINES:
                self._screen.lines(batch)
                batch.clear()
        self._screen.lines(batch)
        return count

    def _drain(self, *, ended_s: float | None = None) -> None:
        """Show the attempt to its last byte; wait for bytes that have not arrived yet.

        `ended_s`: when the job ended; after a job that ended long ago there is no wait.
        """
        if self._logs is None:
            return
        age_s = 0.0 if ended_s is None else max(0.0, time.time() - ended_s)
        deadline_s = time.monotonic() + max(0.0, COMPLETE_DEADLINE_S - age_s)
        while self._logs.folder.is_dir() and not is_complete(self._logs.folder):
            if time.monotonic() > deadline_s:
                warning = Text("follow.incomplete", "the last lines may be missing: some logs have not arrived")
                self._screen.echo("\n".join(warning_lines(warning)))
                break
            if self._show_new_lines() == 0:
                time.sleep(POLL_S[0])
        self._show_new_lines(final=True)
        self._logs = None


def describe_state(job: JobView) -> Text | str:
    """RUNNING on npu[01-02], 16 ranks."""
    if job.state == "RUNNING" and not job.unreachable_hosts:
        return Text(
            "follow.running",
            "{state} on {hosts:hosts}, {ranks:plural rank ranks}",
            state=job.state,
            hosts=job.hosts,
            ranks=job.world_size,
        )
    return labelled(job.state, job.reason)


def describe_bottom(job: JobView, now_s: float) -> str:
    """The line at the bottom of the terminal: job, state, duration, progress, and what is not as it should be."""
    since_s = job.started_at_s if job.started_at_s is not None else job.created_at_s
    reason = job.reason if job.state != "RUNNING" or job.unreachable_hosts else ""
    parts = [f"{job.id} {job.state}", describe_seconds(now_s - since_s), reason, describe_progress(job.progress)]
    return " · ".join(part for part in parts if part)
