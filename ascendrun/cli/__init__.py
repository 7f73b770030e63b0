"""Command line: parse the arguments, call `cluster`, print. Every error becomes a message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import Cluster
    from ascendrun.core.settings import Settings

PROGRAM = "ascendrun"
COMPLETE_VARIABLE = "_ASCENDRUN_COMPLETE"

INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None, *, make_cluster: Callable[[Settings], Cluster] | None = None) -> int:
    """Run one command line and return its exit code. `make_cluster`: a substitute for `Cluster`, for tests."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        from ascendrun import __version__

        print(f"{PROGRAM} {__version__}")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names that the locale cannot encode
    from ascendrun.cli.context import CliContext
    from ascendrun.cli.language import choose_language, lang_flag
    from ascendrun.text import use_language

    ctx = CliContext(environ=os.environ, make_cluster=make_cluster)
    flag = lang_flag(arguments)
    if flag is not None:
        ctx.flags["lang"] = flag
    use_language(flag or choose_language(os.environ))
    try:
        code = _run_over_damage(arguments, ctx)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        from ascendrun.text import Text

        print(Text("cli.interrupted", "interrupted"), file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # the message is for the terminal, the traceback for a file
        from ascendrun.cli.errors import print_error

        try:
            return print_error(error, lambda: ctx.settings.state_dir)
        except BrokenPipeError:
            _discard_output()
            return PIPE_CLOSED


def _run_over_damage(arguments: list[str], ctx: CliContext) -> int:
    """Run the command; run it again if the job list was damaged and is repaired now."""
    try:
        return _run(arguments, ctx)
    except Exception as error:  # any other error is passed on
        if getattr(error, "code", None) != "state-damaged" or arguments == ["controller", "run"]:
            raise
        ctx.cluster.controller.check_store()
        return _run(arguments, ctx)
    finally:
        ctx.report_rebuilt()


def _run(arguments: list[str], ctx: CliContext) -> int:
    if arguments == ["controller", "run"]:
        from ascendrun.cluster.controller import run_controller  # without click: a command waits for its start

        run_controller(ctx.settings)
        return 0
    import click

    from ascendrun.cli.app import cli
    from ascendrun.cli.language import translate_click

    translate_click()
    instruction = os.environ.get(COMPLETE_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
    try:
        with cli.make_context(PROGRAM, arguments or ["--help"], obj=ctx) as context:
            result = cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    return result if isinstance(result, int) else 0


def _discard_output() -> None:
    """Redirect closed streams to the null device, so that Python's flush at exit reports nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            try:
                os.dup2(nowhere, stream.fileno())
            except (OSError, ValueError):
                continue
    os.close(nowhere)
