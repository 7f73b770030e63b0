"""controller: the background loop by hand: run it in the foreground, look at it, end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import verb

if TYPE_CHECKING:
    from ascendrun.cli.context import Face


@verb(
    "controller",
    examples="""
    ascendrun controller status
    ascendrun controller run        # in the foreground; shows why it ends
    ascendrun controller stop       # jobs go on; the next command starts it again
""",
)
@click.argument("action", type=click.Choice(["run", "status", "stop"]))
@click.pass_obj
def command(face: Face, action: str) -> int:
    """The background loop that watches jobs. Other verbs start it when they need it; jobs do not depend on it."""
    return {"run": _run, "status": _status, "stop": _stop}[action](face)


def _run(face: Face) -> int:
    from ascendrun.cli.controller_run import run_controller

    return run_controller(face.settings)


def _status(face: Face) -> int:
    """0 when one runs, 4 when none does."""
    status = face.cluster.controller_status()
    if status is None:
        print("not running")
        return 4
    print(f"running, pid {status['pid']}: {', '.join(status['jobs']) or 'no live jobs'}")
    return 0


def _stop(face: Face) -> int:
    face.cluster.stop_controller()
    face.say("no controller runs; jobs go on, the next command that needs one starts it")
    return 0
