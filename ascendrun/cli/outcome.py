"""Outcome of a job, as text and as an exit code."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ascendrun.cli.context import CliContext
from ascendrun.cli.errors import hint_lines, warning_lines
from ascendrun.cli.output import describe_progress, describe_seconds, labelled
from ascendrun.cli.outputs import fetch_outputs, output_lines
from ascendrun.cli.sanitise import sanitise
from ascendrun.cli.screen import Screen
from ascendrun.core.jobs.reasons import CONFIDENCE
from ascendrun.core.logs.log_view import LogView
from ascendrun.core.rank_env import forks_ranks
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ascendrun.cluster import Cluster, JobDetail, JobView
    from ascendrun.core.jobs.reasons import Reason
    from ascendrun.core.machines import Hold

FAILED_TAIL_LINES = 20
DIAGNOSIS_S, POLL_S = 10.0, 0.2
"""Seconds that the outcome of a failed job waits for its diagnosis, and between two looks."""


def exit_code_of(job: JobView) -> int:
    """Return 0 for SUCCEEDED, 3 if the plan of its training refused the start, 1 for every other end."""
    is_refused = job.state == "FAILED" and job.reason.code == "training-refused"
    return 3 if is_refused else 0 if job.state == "SUCCEEDED" else 1


def print_outcome(cluster: Cluster, detail: JobDetail, *, screen: Screen) -> int:
    """Print the outcome of the job and the next step on stderr; return the exit code."""
    has_failed = detail.job.state == "FAILED"
    if has_failed:
        detail = _diagnosed(cluster, detail)
        _print_failure(cluster, detail, screen)
    job = detail.job
    head = f"{job.id} {job.state}"
    duration = ""
    if job.ended_at_s is not None:
        duration = describe_seconds(job.ended_at_s - (job.started_at_s or job.created_at_s))
    after = Text("outcome.after", "{job} after {duration}", job=head, duration=duration)
    more = describe_progress(job.progress) if job.state == "SUCCEEDED" else job.reason
    screen.echo(labelled(after if duration else head, more))
    is_diagnosed = has_failed and job.confidence != "preliminary"
    diagnosis = cluster.diagnosis.summary(job.id) if is_diagnosed else None
    if diagnosis is not None:
        screen.echo(Text("outcome.cause", "cause: {diagnosis}", diagnosis=diagnosis))
    print_left(screen, detail)
    if has_failed:
        first = detail.first_failure
        by_rank = first is not None and first.ranks and not forks_ranks(detail.spec)
        choice = "" if first is None or not first.hosts else f" --hosts {first.hosts[0]}"
        choice = f" --rank {first.ranks[0]}" if first is not None and by_rank else choice
        for command in (f"explain {job.id}", f"logs {job.id}{choice}", f"show {job.id}"):
            screen.echo("\n".join(hint_lines(f"ascendrun {command}")))
    return exit_code_of(job)


def print_outputs(cluster: Cluster, job: JobView, screen: Screen) -> None:
    """Wait for the declared outputs of an ended job or pipeline, and name their directory.

    ^C leaves the rest to the controller."""
    try:
        replies = fetch_outputs(cluster.files.fetch(job.id), screen)
    except KeyboardInterrupt:
        screen.close()
        screen.echo(Text("outputs.detached", "detached; the outputs of {job} are still being fetched", job=job.id))
        screen.echo("\n".join(hint_lines(f"ascendrun fetch {job.id}")))
        return
    for line in output_lines(job.id, replies):
        screen.echo(line)


def print_left(screen: Screen | CliContext, detail: JobDetail) -> bool:
    """Print on which hosts processes of an ended job may live; return whether there are any."""
    if detail.unconfirmed_hosts:
        _print_unconfirmed(screen, detail)
    print_held(screen, [hold for hold in detail.job.holds if hold.processes])
    return bool(detail.unconfirmed_hosts or detail.job.holds)


def _print_unconfirmed(screen: Screen | CliContext, detail: JobDetail) -> None:
    warning = Text(
        "outcome.unconfirmed",
        "cannot confirm that all processes exited on {hosts:hosts}",
        hosts=detail.unconfirmed_hosts,
    )
    hint = Text(
        "outcome.unconfirmed-hint",
        "they are stopped when {hosts:hosts} is reachable again; ascendrun show {job}",
        hosts=detail.unconfirmed_hosts,
        job=detail.job.id,
    )
    screen.echo("\n".join([*warning_lines(warning), *hint_lines(hint)]))


def print_held(screen: Screen | CliContext, holds: Iterable[Hold]) -> None:
    """Print why no job may use some hosts, each with what a user can do."""
    for hold in holds:
        held = Text("outcome.held", "no job starts on {host}: {why}", host=hold.host, why=hold.reason())
        fix = f"ascendrun stop {hold.tag}" if hold.is_found else f"ascendrun release {hold.host}"
        screen.echo("\n".join([*warning_lines(held), *hint_lines(fix)]))


def _print_failure(cluster: Cluster, detail: JobDetail, screen: Screen) -> None:
    first = detail.first_failure
    if first is None:
        return
    screen.echo(labelled(Text("outcome.first-failure", "first failure"), first_failure_line(first, detail.job)))
    host = next(iter(first.hosts), None)
    if host is None:
        return

    ranks = None if forks_ranks(detail.spec) or not first.ranks else list(first.ranks[:1])
    view = LogView(hosts=[host], ranks=ranks, streams=["err"], tail=FAILED_TAIL_LINES)
    lines = [line.text for line in cluster.logs.lines(detail, view)]
    if lines:
        last = Text("outcome.last-output-of-host", "last error output on {host}:", host=host)
        if ranks is not None:
            last = Text("outcome.last-output", "last error output of rank {rank} on {host}:", rank=ranks[0], host=host)
        screen.echo(last)
        screen.echo("\n".join(f"    {sanitise(line)}" for line in lines))


def first_failure_line(first: Reason, job: JobView) -> Text | Reason:
    """Return what failed first, with its confidence."""
    if job.confidence is None:
        return first
    sure = CONFIDENCE.get(job.confidence, job.confidence)
    return Text("outcome.what-failed", "{what} [{confidence}]", what=first, confidence=sure)


def _diagnosed(cluster: Cluster, detail: JobDetail) -> JobDetail:
    """Return the job with its diagnosis, which follows the end after seconds; after DIAGNOSIS_S without it."""
    until_mono = time.monotonic() + DIAGNOSIS_S
    while detail.job.confidence == "preliminary" and time.monotonic() < until_mono:
        time.sleep(POLL_S)
        detail = cluster.jobs.detail(detail.job.id)
    return detail
