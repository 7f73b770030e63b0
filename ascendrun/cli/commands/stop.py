"""stop: end jobs, and report when their processes are gone. wait: return when a job has ended, with its exit code."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import Duration, cli_command
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cli.screen import Screen
    from ascendrun.cluster import JobDetail, JobView

POLL_S = 0.2


@cli_command(
    "stop",
    examples="""
    ascendrun stop j-0001                 # send the checkpoint signal, wait for the save, then end all processes
    ascendrun stop j-0001 j-0002 --now    # without time to save
""",
)
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--now", is_flag=True, help="Skip the time to save a checkpoint.")
@click.option("--no-wait", is_flag=True, help="Return when the request is stored; do not wait for the end.")
@click.pass_obj
def command(ctx: CliContext, jobs: tuple[str, ...], now: bool, no_wait: bool) -> int:
    """Stop jobs: send the checkpoint signal, wait for the save, then end every process. Waits until they are gone.

    A JOB is an id, the start of an id, or a name; a live job is chosen before an ended one of the same name. Exits 6
    when a node could not confirm that all processes are gone.
    """
    screen = ctx.screen()
    requested: list[str] = []
    try:
        code = _request_all(ctx, jobs, requested, now=now)
        for job_id in () if no_wait else requested:
            code = max(code, _print_end(ctx, _wait_until_ended(ctx, job_id, screen)))
        return code
    except KeyboardInterrupt:
        screen.close()
        if not requested:
            raise
        ctx.echo(Text("stop.detached", "detached; the stop continues"))
        ctx.hint("ascendrun ps")
        return 130


def _request_all(ctx: CliContext, refs: tuple[str, ...], requested: list[str], *, now: bool) -> int:
    """Request every stop, also when one job is unknown; add ids to `requested`. Return the first exit code, or 0."""
    import sys

    from ascendrun.cli.errors import describe_error
    from ascendrun.core.errors import AscendrunError

    code = 0
    for ref in refs:
        try:
            job = ctx.cluster.stop(ref, now=now)
        except AscendrunError as error:
            print("\n".join(describe_error(error)), file=sys.stderr)
            code = code or error.exit_code
        else:
            requested.append(job.id)
            ctx.echo(describe(job))
    return code


def describe(job: JobView) -> str:
    """Return text such as: j-0001 STOPPING: stopped on user request"""
    from ascendrun.cli.output import labelled

    return labelled(f"{job.id} {job.state}", job.reason)


def _wait_until_ended(ctx: CliContext, job_id: str, screen: Screen) -> JobDetail:
    from ascendrun.cli.output import describe_seconds
    from ascendrun.text.format import fold_hosts

    started_s = time.monotonic()
    while True:
        detail = ctx.cluster.job(job_id)
        if detail.job.ended_at_s is not None:
            screen.close()
            return detail
        left = [node.host for node in detail.nodes if node.phase not in ("ENDED", "LOST")]
        parts = [f"{job_id} {detail.job.state}", fold_hosts(left), describe_seconds(time.monotonic() - started_s)]
        screen.progress(" · ".join(part for part in parts if part))
        time.sleep(POLL_S)


def _print_end(ctx: CliContext, detail: JobDetail) -> int:
    """Return 0, or 6 when a node could not confirm that all processes are gone."""
    from ascendrun.cli.outcome import print_unconfirmed

    ctx.echo(describe(detail.job))
    if not detail.unconfirmed_hosts:
        return 0
    print_unconfirmed(ctx, detail)
    return 6


@cli_command(
    "wait",
    examples="""
    ascendrun wait j-0001 && ./publish.sh
    ascendrun wait j-0001 --timeout 2h       # exit code 124 if it still runs after 2 h
""",
)
@click.argument("job")
@click.option("--timeout", type=Duration(), metavar="TIME", help="Limit: 90s, 10m, 2h.  [default: none]")
@click.pass_obj
def wait_command(ctx: CliContext, job: str, timeout: float | None) -> int:
    """Wait until a job has ended. Exits 0 when it succeeded, 1 when it failed or was stopped, 124 on timeout."""
    from ascendrun.cli.outcome import print_outcome

    detail = ctx.cluster.wait(job, timeout_s=timeout)
    return print_outcome(ctx.cluster, detail, screen=ctx.screen())
