"""controller: the background loop by hand: run it in the foreground, look at it, end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext


@cli_command(
    "controller",
    examples="""
    ascendrun controller status
    ascendrun controller run        # in the foreground; shows why it ends
    ascendrun controller stop       # jobs go on; the next command starts it again
""",
)
@click.argument("action", type=click.Choice(["run", "status", "stop"]))
@click.pass_obj
def command(ctx: CliContext, action: str) -> int:
    """The background loop that watches jobs. Other verbs start it when they need it; jobs do not depend on it."""
    return {"run": _run, "status": _status, "stop": _stop}[action](ctx)


def _run(ctx: CliContext) -> int:
    from ascendrun.cli.controller_run import run_controller

    return run_controller(ctx.settings)


def _status(ctx: CliContext) -> int:
    """0 when one runs, 4 when none does."""
    status = ctx.cluster.controller_status()
    if status is None:
        print("not running")
        return 4
    print(f"running, pid {status['pid']}: {', '.join(status['jobs']) or 'no live jobs'}")
    return 0


def _stop(ctx: CliContext) -> int:
    ctx.cluster.stop_controller()
    ctx.echo("no controller runs; jobs go on, the next command that needs one starts it")
    return 0
