"""Following of a job: print its lines as they arrive, its state changes and its attempts, until it has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ascendrun.cli.errors import warning_lines
from ascendrun.cli.log_output import format_line
from ascendrun.cli.output import describe_progress, describe_seconds, labelled
from ascendrun.cli.screen import Screen
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster, JobDetail, JobView, LogView

STAGING_REPORT_S = 5.0
"""Seconds between reports of staging without a progress line at the bottom of a terminal."""


def follow_job(cluster: Cluster, job_id: str, *, screen: Screen, view: LogView, shows_lines: bool = True) -> JobDetail:
    """Return the job after it has ended and every line is shown. KeyboardInterrupt passes through."""
    states = _States(screen)
    try:
        for update in cluster.logs.follow(job_id, view, with_lines=shows_lines):
            if update.detail is not None:
                states.show(update.detail)
            if update.lines:
                screen.lines([format_line(view, line, screen) for line in update.lines])
            if update.problem is not None:
                retrying = Text("follow.retrying", "{problem}; the job keeps running; retrying", problem=update.problem)
                screen.echo("\n".join(warning_lines(retrying)))
            if update.is_incomplete:
                warning = Text("follow.incomplete", "the last lines may be missing: some logs have not arrived")
                screen.echo("\n".join(warning_lines(warning)))
    finally:
        screen.close()
    assert states.detail is not None
    return states.detail


class _States:
    """Prints changes of the job itself. `detail`: its newest state."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.detail: JobDetail | None = None
        self._staging, self._staging_mono = "", 0.0

    def show(self, detail: JobDetail) -> None:
        screen, job = self._screen, detail.job
        before, self.detail = self.detail.job if self.detail is not None else None, detail
        if before is not None and before.attempt and job.attempt != before.attempt:
            screen.echo(attempt_line(job.attempt))
        if job.ended_at_s is not None:
            screen.progress("")
            return
        if before is None or job.state != before.state:
            screen.echo(describe_state(job))
        elif job.unreachable_hosts != before.unreachable_hosts:
            screen.echo(labelled(f"{job.id} {job.state}", job.reason))
        elif job.state == "STAGING" and not screen.is_live and str(job.reason) != self._staging:
            if time.monotonic() - self._staging_mono >= STAGING_REPORT_S:
                self._staging, self._staging_mono = str(job.reason), time.monotonic()
                screen.echo(describe_state(job))
        screen.progress(describe_bottom(job, time.time()))


def attempt_line(attempt: int) -> Text:
    """Return the line between the output of two attempts."""
    return Text("follow.attempt", "── attempt {attempt} ──", attempt=attempt)


def describe_state(job: JobView) -> Text | str:
    """Return text such as: RUNNING on npu[01-02], 16 ranks."""
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
    """Return the line at the bottom of the terminal: job, state, duration, progress, and problems."""
    since_s = job.started_at_s if job.started_at_s is not None else job.created_at_s
    reason = str(job.reason) if job.state != "RUNNING" or job.unreachable_hosts else ""
    parts = [f"{job.id} {job.state}", describe_seconds(now_s - since_s), reason, describe_progress(job.progress)]
    return " · ".join(part for part in parts if part)
