"""controller: run the controller, show its status, stop it, and have the machine start it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command
from ascendrun.cluster.controller import revive_controller
from ascendrun.cluster.install import install, installed, uninstall
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster.install import Installation


@cli_command(
    "controller",
    examples="""
    ascendrun controller status
    ascendrun controller install    # start it after a crash or a reboot
    ascendrun controller run        # in the foreground
    ascendrun controller stop       # jobs keep running; the next command starts it again
""",
)
@click.argument("action", type=click.Choice(["run", "status", "stop", "install", "uninstall", "ensure"]))
@click.pass_obj
def command(ctx: CliContext, action: str) -> int:
    """Run, query, stop or install the controller, the background process that monitors jobs.

    Other commands start it when they need it. Running jobs do not depend on it. `install` makes systemd or cron of this
    user start it again after a crash or a reboot; `uninstall` ends that. `ensure` is what they run.
    """
    actions = {
        "run": _run,
        "status": _status,
        "stop": _stop,
        "install": _install,
        "uninstall": _uninstall,
        "ensure": _ensure,
    }
    return actions[action](ctx)


def _run(ctx: CliContext) -> int:
    ctx.cluster.controller.run()
    return 0


def _status(ctx: CliContext) -> int:
    """Return 0 when a controller runs, else 4."""
    status = ctx.cluster.controller.status()
    if status is None:
        print(Text("controller.not-running", "not running"))
    else:
        print(Text("controller.running", "running (pid {pid})", pid=status.pid))
        if status.jobs:
            print(Text("controller.jobs", "live jobs: {jobs}", jobs=list(status.jobs)))
        if status.guard_pid is None:
            print(Text("controller.no-guard", "guard: none; it is not started again after a crash"))
        else:
            print(Text("controller.guard", "guard: pid {pid} starts it again after a crash", pid=status.guard_pid))
    found = installed(ctx.settings.state_dir)
    if found is None:
        hint = Text(
            "controller.not-installed", "installed: no (`ascendrun controller install` starts it after a reboot)"
        )
        print(hint)
    else:
        print(_installation(found))
        if found.warning is not None:
            ctx.warn(found.warning)
    return 4 if status is None else 0


def _installation(found: Installation) -> Text:
    return Text("controller.installed", "installed: {kind} ({place})", kind=found.kind, place=found.place)


def _stop(ctx: CliContext) -> int:
    ctx.cluster.controller.stop()
    ctx.echo(Text("controller.stopped", "controller stopped; jobs keep running"))
    return 0


def _install(ctx: CliContext) -> int:
    found = install(ctx.settings.state_dir)
    print(_installation(found))
    if found.warning is not None:
        ctx.warn(found.warning)
    return 0


def _uninstall(ctx: CliContext) -> int:
    if uninstall(ctx.settings.state_dir):
        ctx.echo(Text("controller.uninstalled", "entry removed"))
    else:
        ctx.echo(Text("controller.nothing-installed", "no entry for {path}", path=str(ctx.settings.state_dir)))
    return 0


def _ensure(ctx: CliContext) -> int:
    revive_controller(ctx.settings)
    return 0
