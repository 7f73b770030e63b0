"""Which commands run on another machine, and what they need of this one, or as another user; the end of a command whose
sender is gone."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ascendrun.cluster.heads import other_head
from ascendrun.core.settings import FORWARDED_VARIABLE
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster.forward import Errand

WORDS = "ascendrun.words"
"""In the `meta` of a context: the words of the command line after the name of the command."""
RUN_HERE = ("help", "completion", "man", "schema", "init", "demo", "sim", "config")
"""Commands that always run on the machine on which they were typed."""
WRITES = ("fetch", "cp", "bundle", "report", "export", "verify", "metrics")
"""Commands that leave files in the working directory, or where an option names it."""
OF_A_MACHINE = ("run", "ensure", "move")
"""Actions of `controller` that are about the machine on which they were typed."""
OF_A_STANDBY = (*OF_A_MACHINE, "standby", "role", "relay", "install", "uninstall")
"""The same on a machine that is not the head of its `standby` settings."""


def run_elsewhere(ctx: click.Context) -> int | None:
    """Run a command where it belongs and return its exit code; None: that is here, for this user. Raises
    AscendrunError."""
    name, settings, forwarded = str(ctx.command.name), ctx.obj.settings, ctx.obj.environ.get(FORWARDED_VARIABLE)
    action = ctx.params.get("action") if name == "controller" else None
    if action == "status":
        _warn_superseded(ctx.obj)
    other = None if forwarded else other_head(settings, is_of_machine=action in OF_A_STANDBY)
    host = other or settings.owner
    has_home = host == settings.owner
    if host is None or forwarded == "store" or (has_home and action in OF_A_MACHINE):
        if forwarded and not os.isatty(1):
            _end_with_sender()
        return _run_at_other(ctx)
    from ascendrun.cluster.forward import Errand, run

    flags = [
        f"--{flag.replace('_', '-')}={ctx.obj.flags[flag]}" for flag in ("color", "state_dir") if flag in ctx.obj.flags
    ]
    errand = Errand(host, has_home, [*flags, name], writes=name in WRITES)
    if not has_home:
        _add_files(errand, ctx)
    errand.words = [*errand.words, *ctx.meta[WORDS]]
    return run(errand)


def _warn_superseded(ctx: CliContext) -> None:
    """Warn that the controller whose status follows is not that of this machine, or that none starts here."""
    from ascendrun.cluster.standby import why_superseded

    why = why_superseded(ctx.settings.state_dir)
    if why is not None:
        hint = Text("standby.superseded.hint", "run `ascendrun controller standby` to make this machine the standby")
        ctx.warn(Text("standby.superseded", "no controller starts on this machine: {why}", why=why), hint)


def _run_at_other(ctx: click.Context) -> int | None:
    """Run a command for jobs of another user, USER/JOB, as that user's controller does; None: the jobs are of this
    user. Raises AscendrunError."""
    named = [str(one.name) for one in ctx.command.params if isinstance(one, click.Argument)]
    refs = [str(ref) for name in named if name in ("job", "jobs") for ref in _listed(ctx.params[name])]
    users = {ref.rpartition("/")[0] for ref in refs}
    if users <= {""}:
        return None
    from ascendrun.cli.output import sanitise

    def write(text: str, is_error: bool) -> None:
        target = sys.stderr if is_error else sys.stdout
        target.write(sanitise(text))
        target.flush()

    if len(users) > 1:
        raise click.UsageError(str(Text("cli.jobs-of-one", "the jobs of one command must be of one user")))
    given: dict[str, Any] = {}
    for one in ctx.command.params:
        name = str(one.name)
        if isinstance(one, click.Option) and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            given[max(one.opts, key=len)] = _as_word(ctx.params[name])
    given.pop("--output-dir", None)
    jobs = [ref.rpartition("/")[2] for ref in refs]
    into = (ctx.params["output_dir"] or jobs[0]) if ctx.command.name == "fetch" else ""
    words = ctx.params.get("paths", ())
    [user], command = users, str(ctx.command.name)
    return int(ctx.obj.cluster.queue.run(user, command, jobs, write, options=given, words=words, into=into))


def _as_word(value: object) -> object:
    """Return a parsed value as it is written on a command line; a flag as it is."""
    if isinstance(value, float):
        return datetime.fromtimestamp(value, timezone.utc).isoformat()
    return ",".join(map(str, sorted(value))) if isinstance(value, (set, frozenset, tuple)) else value


def _add_files(errand: Errand, ctx: click.Context) -> None:
    """Add the files of this machine that the arguments and options of a command name."""
    from ascendrun.cluster.forward import files_of

    name = ctx.command.name
    named = [one.name for one in ctx.command.params if isinstance(one.type, click.Path) or one.name == "hostfile"]
    named += ["sources", "destination"] if name == "cp" else []
    if name == "fetch" and ctx.params["output_dir"] is None:
        errand.words = [*errand.words, f"--output-dir={ctx.params['job']}"]
    paths = [(key, str(path)) for key in named for path in _listed(ctx.params[str(key)])]
    errand.paths = [path for _, path in paths]
    for key, path in paths:
        if key in ("file", "files") and os.path.isfile(path) and not path.endswith(".hosts"):
            errand.reads.update(files_of(Path(path), ctx.params.get("overrides") or ()))
        elif os.path.exists(path) and key not in ("destination", "output_dir"):
            errand.reads[os.path.abspath(path)] = ()


def _listed(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _end_with_sender() -> None:
    """Interrupt this process when the connection that it was sent through is gone: without a terminal sshd tells it
    only by its closed output."""
    import select
    import signal
    import threading

    def wait() -> None:
        poll = select.poll()
        poll.register(1, 0)  # errors and hang-ups only
        poll.poll()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True, name="sender").start()
