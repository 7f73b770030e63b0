"""controller: run the controller in the foreground, show its status, stop it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext


@cli_command(
    "controller",
    examples="""
    ascendrun controller status
    ascendrun controller run        # in the foreground
    ascendrun controller stop       # jobs keep running; the next command starts it again
""",
)
@click.argument("action", type=click.Choice(["run", "status", "stop"]))
@click.pass_obj
def command(ctx: CliContext, action: str) -> int:
    """Run, query or stop the controller, the background process that monitors jobs.

    Other commands start it when they need it. Running jobs do not depend on it.
    """
    return {"run": _run, "status": _status, "stop": _stop}[action](ctx)


def _run(ctx: CliContext) -> int:
    ctx.cluster.run_controller()
    return 0


def _status(ctx: CliContext) -> int:
    """Return 0 when a controller runs, else 4."""
    status = ctx.cluster.controller_status()
    if status is None:
        print(Text("controller.not-running", "not running"))
        return 4
    print(Text("controller.running", "running (pid {pid})", pid=status.pid))
    if status.jobs:
        print(Text("controller.jobs", "live jobs: {jobs}", jobs=list(status.jobs)))
    return 0


def _stop(ctx: CliContext) -> int:
    ctx.cluster.stop_controller()
    ctx.echo(Text("controller.stopped", "controller stopped; jobs keep running"))
    return 0
