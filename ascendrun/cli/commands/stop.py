"""stop: end jobs, and say when they are gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cli.screen import Screen
    from ascendrun.cluster import JobDetail

POLL_S = 0.2


@cli_command(
    "stop",
    examples="""
    ascendrun stop j-0001                 # the checkpoint signal, time to save, then the end
    ascendrun stop j-0001 j-0002 --now    # no time to save
""",
)
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--now", is_flag=True, help="Skip the time to save.")
@click.option("--no-wait", is_flag=True, help="Return when the stop is stored; it goes on without this command.")
@click.pass_obj
def command(ctx: CliContext, jobs: tuple[str, ...], now: bool, no_wait: bool) -> int:
    """Stop jobs: signal, time to save a checkpoint, then the end of every process. Waits until they are gone."""
    screen = ctx.screen()
    asked: list[str] = []
    try:
        code = _ask_all(ctx, jobs, asked, now=now)
        for job_id in () if no_wait else asked:
            code = max(code, _tell_end(_wait_until_ended(ctx, job_id, screen), screen))
        return code
    except KeyboardInterrupt:
        screen.close()
        if not asked:
            raise
        screen.echo("the stop goes on without this command — ascendrun ps")
        return 130


def _ask_all(ctx: CliContext, refs: tuple[str, ...], asked: list[str], *, now: bool) -> int:
    """Every job is asked, also when one of them is unknown; `asked` gets the ids that stop.

    Returns the exit code of the first error, or 0.
    """
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
            asked.append(job.id)
            ctx.echo(f"{job.id} {job.state}: {job.reason}" if job.reason else f"{job.id} {job.state}")
    return code


def _wait_until_ended(ctx: CliContext, job_id: str, screen: Screen) -> JobDetail:
    from ascendrun.cli.follow import has_ended
    from ascendrun.cli.output import describe_seconds
    from ascendrun.core.names import fold_names

    began_s = time.monotonic()
    while True:
        detail = ctx.cluster.job(job_id)
        if has_ended(detail.job):
            screen.close()
            return detail
        left = [node.host for node in detail.nodes if node.phase not in ("ENDED", "LOST")]
        on = f" on {fold_names(left)}" if left else ""
        screen.progress(f"{job_id} {detail.job.state}{on} · {describe_seconds(time.monotonic() - began_s)}")
        time.sleep(POLL_S)


def _tell_end(detail: JobDetail, screen: Screen) -> int:
    """0, or 6 when a node could not confirm that everything is gone."""
    from ascendrun.core.names import fold_names

    job = detail.job
    screen.echo(f"{job.id} {job.state}: {job.reason}" if job.reason else f"{job.id} {job.state}")
    if not detail.unconfirmed:
        return 0
    screen.echo(f"error: {fold_names(detail.unconfirmed)} did not confirm that the job's processes are gone")
    screen.echo(f"hint: they end when the node is reached again; ascendrun show {job.id}")
    return 6
