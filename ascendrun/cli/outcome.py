"""Outcome of a job, as text and as an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascendrun.cli.context import CliContext
from ascendrun.cli.errors import hint_lines, warning_lines
from ascendrun.cli.output import describe_progress, describe_seconds, labelled
from ascendrun.cli.sanitise import sanitise
from ascendrun.cli.screen import Screen
from ascendrun.core.rank_env import forks_ranks
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ascendrun.cluster import Cluster, JobDetail, JobView, RankView
    from ascendrun.core.machines import Hold

FAILED_TAIL_LINES = 20


def exit_code_of(job: JobView) -> int:
    """Return 0 for SUCCEEDED, 3 if the plan of its training refused the start, 1 for every other end."""
    is_refused = job.state == "FAILED" and job.reason.code == "training-refused"
    return 3 if is_refused else 0 if job.state == "SUCCEEDED" else 1


def print_outcome(cluster: Cluster, detail: JobDetail, *, screen: Screen) -> int:
    """Print the outcome of the job and the next step on stderr; return the exit code."""
    job = detail.job
    has_failed = job.state == "FAILED"
    if has_failed:
        _print_failure(cluster, detail, screen)
    head = f"{job.id} {job.state}"
    duration = ""
    if job.ended_at_s is not None:
        duration = describe_seconds(job.ended_at_s - (job.started_at_s or job.created_at_s))
    after = Text("outcome.after", "{job} after {duration}", job=head, duration=duration)
    more = describe_progress(job.progress) if job.state == "SUCCEEDED" else job.reason
    screen.echo(labelled(after if duration else head, more))
    diagnosis = cluster.diagnosis.summary(job.id) if has_failed else None
    if diagnosis is not None:
        screen.echo(Text("outcome.cause", "cause: {diagnosis}", diagnosis=diagnosis))
    print_left(screen, detail)
    if has_failed:
        rank = first_failing_rank(detail)
        is_one_file = forks_ranks(detail.spec)
        choice = "" if rank is None else f" --hosts {rank.host}" if is_one_file else f" --rank {rank.rank}"
        for command in (f"explain {job.id}", f"logs {job.id}{choice}", f"show {job.id}"):
            screen.echo("\n".join(hint_lines(f"ascendrun {command}")))
    return exit_code_of(job)


def print_outputs(cluster: Cluster, job: JobView, screen: Screen) -> None:
    """Wait for the declared outputs of an ended job or pipeline, and name their directory.

    ^C leaves the rest to the controller."""
    from ascendrun.cli.outputs import fetch_outputs, output_lines

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
    if detail.first_failure:
        screen.echo(Text("outcome.first-failure", "first failure: {what}", what=detail.first_failure))
    rank = first_failing_rank(detail)
    if rank is None:
        return
    from ascendrun.core.logs.log_view import LogView

    ranks = None if forks_ranks(detail.spec) else [rank.rank]
    view = LogView(hosts=[rank.host], ranks=ranks, streams=["err"], tail=FAILED_TAIL_LINES)
    lines = [line.text for line in cluster.logs.lines(detail, view)]
    if lines:
        last = Text(
            "outcome.last-output", "last error output of rank {rank} on {host}:", rank=rank.rank, host=rank.host
        )
        if ranks is None:
            last = Text("outcome.last-output-of-host", "last error output on {host}:", host=rank.host)
        screen.echo(last)
        screen.echo("\n".join(f"    {sanitise(line)}" for line in lines))


def first_failing_rank(detail: JobDetail) -> RankView | None:
    """Return the rank that failed first, stopped ranks excluded. None: not known."""
    failed = [rank for rank in detail.ranks if not rank.stopped and (rank.signal is not None or rank.exit_code)]
    return min(failed, key=lambda rank: (rank.exited_at_s or float("inf"), rank.rank), default=None)
