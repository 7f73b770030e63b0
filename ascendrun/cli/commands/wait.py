"""wait: return when a job has ended, with its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import Duration, cli_command

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext


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
def command(ctx: CliContext, job: str, timeout: float | None) -> int:
    """Wait until a job has ended. Exits 0 when it succeeded, 1 when it failed or was stopped, 124 on timeout."""
    from ascendrun.cli.outcome import print_outcome

    detail = ctx.cluster.wait(job, timeout_s=timeout)
    return print_outcome(ctx.cluster, detail, screen=ctx.screen())
