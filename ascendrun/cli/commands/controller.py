"""controller: run the controller, show its status, stop it, and have the machine start it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ascendrun.cli.context import CliContext
from ascendrun.cli.options import UsageError, cli_command, output_option
from ascendrun.cli.output import PEOPLE, describe_time, print_record
from ascendrun.cluster.controller import revive_controller
from ascendrun.cluster.install import Installation, install, installed, uninstall
from ascendrun.core.errors import NotFoundError
from ascendrun.text import Text

ACTIONS = ("run", "status", "stop", "install", "uninstall", "ensure", "move", "standby")


@cli_command("controller")
@click.argument("action", type=click.Choice([*ACTIONS, "role", "relay"]), metavar=f"{{{'|'.join(ACTIONS)}}}")
@click.option(
    "--take-over", "takes_over", is_flag=True, help="standby: Become the head now, also with an incomplete copy."
)
@click.option("--shared", metavar="DIR", help="run: Decide for all users of this machine, over a socket in DIR.")
@click.option("--group", help="run --shared: Only members of this group may connect.")
@click.option(
    "--admin", "admins", metavar="USER", multiple=True, help="run --shared: May change jobs of others; or @GROUP."
)
@output_option
def command(
    ctx: CliContext,
    action: str,
    takes_over: bool,
    shared: str | None,
    group: str | None,
    admins: tuple[str, ...],
    output: str | None,
) -> int:
    """Run, query, stop or install the controller, the background process that monitors jobs.

    Other commands start it when they need it. Running jobs do not depend on it. `install` makes systemd or cron of this
    user start it again after a crash or a reboot; `uninstall` ends that. `ensure` is what they run.
    `move` brings the jobs of a user with a shared home to this login node. `run --shared` decides where the jobs of all
    users start whose settings have `queue: DIR`; each keeps a controller. `standby` copies the head of the `standby`
    settings to this machine, and continues here when that one is lost.

    Examples:
    ascendrun controller status
    ascendrun controller status -o json    # with the last time that its loop was held
    ascendrun controller install    # start it after a crash or a reboot
    ascendrun controller run        # in the foreground
    ascendrun controller stop       # jobs keep running; the next command starts it again
    ascendrun controller move       # on this login node, when another one is taken out of use
    ascendrun controller standby    # on a second machine, see docs/standby.md
    ascendrun controller run --shared /srv/ascendrun --group npu --admin alice
    """
    if action != "status" and output is not None:
        raise UsageError.of("controller.output", "`-o` is for `controller status`")
    if (shared is None and (group or admins)) or (shared is not None and action != "run"):
        raise UsageError.of("controller.shared", "`--shared DIR` is for `controller run`, the others for `--shared`")
    if takes_over and action != "standby":
        raise UsageError.of("controller.take-over", "`--take-over` is for `controller standby`")
    if shared is not None:
        ctx.cluster.controller.run_shared(Path(shared).absolute(), admins=admins, group=group)
        return 0
    if action in ("standby", "role", "relay"):
        from ascendrun.cluster import standby

        return standby.serve(ctx.settings, action, take_over=takes_over)
    if action == "status":
        return _print_status(ctx, output)
    _act(ctx, action)
    return 0


def _act(ctx: CliContext, action: str) -> None:
    controller = ctx.cluster.controller
    if action == "run":
        controller.run()
    elif action == "ensure":
        revive_controller(ctx.settings)
    elif action == "stop":
        controller.stop()
        ctx.say("controller.stopped", "controller stopped; jobs keep running")
    elif action == "install":
        _print_installation(ctx, install(ctx.settings.state_dir))
    elif action == "uninstall":
        if uninstall(ctx.settings.state_dir):
            ctx.say("controller.uninstalled", "entry removed")
        else:
            ctx.say("controller.nothing-installed", "no entry for {path}", path=str(ctx.settings.state_dir))
    else:
        _move(ctx)


def _move(ctx: CliContext) -> None:
    from ascendrun.cluster.forward import take_over

    gone = take_over(ctx.settings)
    ctx.say("controller.moved", "commands run on this machine now")
    if gone is not None:
        lost = Text("controller.moved-without", "{host} is gone with its list of jobs", host=gone)
        hint = Text("controller.moved-without.hint", "`ascendrun nodes -H FILE` finds the jobs on its hosts")
        ctx.warn(lost, hint)


def _print_status(ctx: CliContext, output: str | None) -> int:
    """Return 0 when a controller runs, else 4."""
    status = ctx.cluster.controller.status()
    if status is not None and print_record(status, output):
        return 0
    stopped = Text("controller.not-running", "not running")
    if output not in PEOPLE:
        raise NotFoundError(stopped)
    if status is None:
        print(stopped)
    else:
        print(Text("controller.running", "running (pid {pid})", pid=status.pid))
        if status.jobs:
            print(Text("controller.jobs", "live jobs: {jobs}", jobs=list(status.jobs)))
        if status.guard_pid is None:
            print(Text("controller.no-guard", "guard: none; it is not started again after a crash"))
        else:
            print(Text("controller.guard", "guard: pid {pid} starts it again after a crash", pid=status.guard_pid))
        if status.standby is not None:
            _print_lease(status.standby)
        if status.pulse is not None and status.pulse.stall is not None:
            stall = status.pulse.stall
            print(f"{describe_time(stall.at_s)} {stall.describe()}")
    found = installed(ctx.settings.state_dir)
    if found is None:
        print(
            Text("controller.not-installed", "installed: no (`ascendrun controller install` starts it after a reboot)")
        )
    else:
        _print_installation(ctx, found)
    return 4 if status is None else 0


def _print_lease(standby: Mapping[str, Any]) -> None:
    voters, held = standby["voters"], standby["lease"]
    granted = [name for name, age_s in voters.items() if age_s is not None]
    names = {"term": standby["term"], "voters": granted or "-", "count": len(voters)}
    if held:
        print(Text("controller.lease", "lease: term {term}, granted by {voters} (of {count})", **names))
    else:
        without = "lease: term {term}, not held; nothing is started (last granted by {voters}, of {count})"
        print(Text("controller.no-lease", without, **names))
    if standby["in_sync"]:
        print(Text("controller.in-sync", "standby: in sync"))
    else:
        print(Text("controller.out-of-sync", "standby: not in sync; it does not take over by itself"))


def _print_installation(ctx: CliContext, found: Installation) -> None:
    print(Text("controller.installed", "installed: {kind} ({place})", kind=found.kind, place=found.place))
    if found.warning is not None:
        ctx.warn(found.warning)
