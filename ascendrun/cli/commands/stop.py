"""stop: end jobs and confirm it. retry: start an ended job again. wait: return when a job has ended."""

from __future__ import annotations

import sys
import time

import click

from ascendrun.cli.commands.sweep import jobs_of
from ascendrun.cli.context import CliContext, print_held
from ascendrun.cli.errors import describe_error
from ascendrun.cli.options import DURATIONS, cli_command, output_option
from ascendrun.cli.outcome import print_left, print_outcome
from ascendrun.cli.output import describe_seconds, labelled, print_for_programs, print_record
from ascendrun.cluster import JobDetail, JobView
from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import TERMINAL, State
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts

POLL_S = 0.2
FOUND_S = 90.0
"""Seconds in which a found attempt ends: its grace period, and twice the time to confirm an end."""


@cli_command("stop")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--now", is_flag=True, help="Skip the time to save a checkpoint.")
@click.option("--no-wait", is_flag=True, help="Return when the request is stored; do not wait for the end.")
@output_option
def command(ctx: CliContext, jobs: tuple[str, ...], now: bool, no_wait: bool, output: str | None) -> int:
    """Stop jobs: send the checkpoint signal, wait for the save, then end every process. Waits until they are gone.

    A JOB is an id, the start of an id, or a name; a live job is chosen before an ended one of the same name. It may be
    the id or name of an attempt that `ps` lists as FOUND. Exits 6 when processes are left on a node, or when it could
    not confirm that all are gone. USER/ID is a job of `ps --all-users`, for administrators of the shared queue; its
    user sees by whom it was stopped.

    Examples:
    ascendrun stop j-0001                 # send the checkpoint signal, wait for the save, then end all processes
    ascendrun stop j-0001 j-0002 --now    # without time to save
    ascendrun stop alice/j-0001           # as an administrator of the shared queue
    """
    requested: list[JobView] = []
    live = {state.value for state in State if state not in TERMINAL}
    try:
        code = _request_all(ctx, jobs_of(ctx, jobs, live), requested, now=now)
        ended = [(job, 0) if no_wait else _await_end(ctx, job) for job in requested]
        print_for_programs([job for job, _ in ended], output, name="jobs", kind=JobView)
        return max([code, *(left for _, left in ended)])
    except KeyboardInterrupt:
        if not requested:
            ctx.screen.close()
            raise
        return ctx.detach(Text("stop.detached", "detached; the stop continues"), "ps")


def _request_all(ctx: CliContext, refs: tuple[str, ...], requested: list[JobView], *, now: bool) -> int:
    """Request every stop, also when one job is unknown; add them to `requested`. Return the first exit code, or 0."""
    code = 0
    for ref in refs:
        try:
            job = ctx.cluster.jobs.stop(ref, now=now)
        except AscendrunError as error:
            print("\n".join(describe_error(error)), file=sys.stderr)
            code = code or error.exit_code
        else:
            requested.append(job)
            ctx.echo(describe(job))
    return code


def describe(job: JobView) -> str:
    """Return text such as: j-0001 STOPPING: stopped on request of me@login1"""
    return labelled(f"{job.id} {job.state}", job.reason)


def _await_end(ctx: CliContext, job: JobView) -> tuple[JobView, int]:
    """Return the job as it ended, and 6 if processes may be left, else 0."""
    if job.state == "FOUND":
        return job, _await_found(ctx, job)
    detail = _wait_until_ended(ctx, job.id)
    ctx.echo(describe(detail.job))
    return detail.job, 6 if print_left(ctx, detail) else 0


def _wait_until_ended(ctx: CliContext, job_id: str) -> JobDetail:
    started_s = time.monotonic()
    while True:
        detail = ctx.cluster.jobs.detail(job_id)
        if detail.job.ended_at_s is not None:
            ctx.screen.close()
            return detail
        left = [node.host for node in detail.nodes if node.phase not in ("ENDED", "LOST")]
        parts = [f"{job_id} {detail.job.state}", fold_hosts(left), describe_seconds(time.monotonic() - started_s)]
        ctx.screen.progress(" · ".join(part for part in parts if part))
        time.sleep(POLL_S)


def _await_found(ctx: CliContext, job: JobView) -> int:
    """Wait until a found attempt is gone; return 6 when it is not after FOUND_S."""
    deadline = time.monotonic() + FOUND_S
    while any(one.name == job.name for one in ctx.cluster.jobs.found_attempts()):
        if time.monotonic() > deadline:
            ctx.screen.close()
            print_held(ctx, job.holds)
            return 6
        ctx.screen.progress(describe(job))
        time.sleep(POLL_S)
    ctx.screen.close()
    ctx.say("stop.found-gone", "{tag} ended", tag=job.name)
    return 0


@cli_command("retry")
@click.argument("job")
@output_option
def retry_command(ctx: CliContext, job: str, output: str | None) -> None:
    """Start the next attempt of a job that failed or was stopped, with a new budget of restarts.

    The job keeps its id, code, settings and checkpoints. A pipeline is resumed as with `submit --resume`. Exits 7 if
    the job has not ended, or succeeded.

    Examples:
    ascendrun retry j-0001                # the same job again, from its newest checkpoint
    ascendrun retry train                 # the newest job of this name
    """
    views = []
    for one in jobs_of(ctx, [job], ("FAILED", "STOPPED")):
        views.append(ctx.cluster.jobs.retry(one))
        ctx.echo(describe(views[-1]))
    print_for_programs(views, output, name="jobs", kind=JobView)
    ctx.hint(f"ascendrun logs -f {views[-1].id}")


@cli_command("wait")
@click.argument("job")
@click.option("--timeout", type=DURATIONS, help="Limit: 90s, 10m, 2h.  [default: none]")
@output_option
def wait_command(ctx: CliContext, job: str, timeout: float | None, output: str | None) -> int:
    """Wait until a job has ended.

    Exits 0 when it succeeded, 1 when it failed or was stopped, 3 when its training would fail, 124 on timeout.

    Examples:
    ascendrun wait j-0001 && ./publish.sh
    ascendrun wait j-0001 --timeout 2h       # exit code 124 if it still runs after 2 h
    """
    detail = ctx.cluster.jobs.wait(job, timeout_s=timeout)
    code = print_outcome(ctx, detail)
    print_record(detail.job, output)
    return code


@cli_command("hold")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@output_option
def hold_command(ctx: CliContext, jobs: tuple[str, ...], output: str | None) -> None:
    """Keep queued jobs from starting, until `unhold`. A job that has started is refused (exit code 7).

    Examples:
    ascendrun hold j-0004          # it keeps its place in the queue, and does not start
    ascendrun hold j-0004 j-0005
    """
    views = []
    for ref in jobs:
        views.append(ctx.cluster.jobs.hold(ref))
        ctx.say("hold.done", "{job} held", job=views[-1].id)
    print_for_programs(views, output, name="jobs", kind=JobView)


@cli_command("unhold")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@output_option
def unhold_command(ctx: CliContext, jobs: tuple[str, ...], output: str | None) -> None:
    """Let held jobs start.

    Examples:
    ascendrun unhold j-0004
    ascendrun unhold j-0004 j-0005
    """
    views = []
    for ref in jobs:
        views.append(ctx.cluster.jobs.unhold(ref))
        ctx.say("unhold.done", "{job} may start", job=views[-1].id)
    print_for_programs(views, output, name="jobs", kind=JobView)
