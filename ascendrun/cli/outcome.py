"""How a job ended, in words and as an exit code."""

from __future__ import annotations

from collections import deque

from ascendrun.cli.output import describe_progress, describe_seconds
from ascendrun.cli.sanitise import sanitise
from ascendrun.cli.screen import Screen
from ascendrun.cluster import Cluster, JobDetail, JobView, RankView
from ascendrun.core.names import fold_names
from ascendrun.head.spool.spool_files import find_streams
from ascendrun.head.state.settings import Settings, spool_dir
from ascendrun.query.log_reader import read_all

FAILED_TAIL_LINES = 20


def exit_code_of(job: JobView) -> int:
    """0 for SUCCEEDED, 1 for every other end."""
    return 0 if job.state == "SUCCEEDED" else 1


def print_outcome(cluster: Cluster, detail: JobDetail, *, screen: Screen) -> int:
    """Says on stderr how the job ended and what to do next; returns the exit code."""
    job = detail.job
    if job.state == "FAILED":
        _tell_failure(detail, screen, cluster.settings)
    took = ""
    if job.ended_at_s is not None:
        took = f" after {describe_seconds(job.ended_at_s - (job.started_at_s or job.created_at_s))}"
    progress = describe_progress(job.progress)
    parts = [f"{job.id} {job.state}{took}", progress if job.state == "SUCCEEDED" else job.reason]
    screen.echo(": ".join(part for part in parts if part))
    if job.state == "FAILED":
        _tell_verdict(job, screen, cluster)
    if detail.unconfirmed:
        screen.echo(f"warning: {fold_names(detail.unconfirmed)} did not confirm that the job's processes are gone")
    if job.state == "FAILED":
        rank = first_failing_rank(detail)
        choice = "" if rank is None else f" --rank {rank.rank}"
        screen.echo(f"hint: ascendrun explain {job.id}    ascendrun logs {job.id}{choice}    ascendrun show {job.id}")
    return exit_code_of(job)


def _tell_failure(detail: JobDetail, screen: Screen, settings: Settings) -> None:
    if detail.first_failure:
        screen.echo(f"first failure: {detail.first_failure}")
    rank = first_failing_rank(detail)
    if rank is None:
        return
    lines = error_tail(settings, detail.job, rank)
    if lines:
        screen.echo(f"the last lines of rank {rank.rank} on {rank.host} (stderr):")
        screen.echo("\n".join(f"    {sanitise(line)}" for line in lines))


def _tell_verdict(job: JobView, screen: Screen, cluster: Cluster) -> None:
    """Why it failed, in one line; nothing where nobody knows."""
    verdict = cluster.diagnosis(job.id)
    if verdict is not None:
        screen.echo(f"why: {verdict}")


def first_failing_rank(detail: JobDetail) -> RankView | None:
    """The rank that ended badly before any other; not those that were stopped. None: none is known."""
    failed = [rank for rank in detail.ranks if not rank.stopped and (rank.signal is not None or rank.exit_code)]
    return min(failed, key=lambda rank: (rank.exited_at_s or float("inf"), rank.rank), default=None)


def error_tail(settings: Settings, job: JobView, rank: RankView) -> tuple[str, ...]:
    """The last lines that the rank wrote to standard error; () when it wrote none."""
    folder = spool_dir(settings.state_dir, job.id, job.attempt)
    lines: deque[str] = deque(maxlen=FAILED_TAIL_LINES)
    for files in find_streams(folder, job.attempt, hosts=[rank.host], ranks=[rank.rank], streams=["err"]):
        lines.extend(line.text for line in read_all(files, tail=FAILED_TAIL_LINES))
    return tuple(lines)
