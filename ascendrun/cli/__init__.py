"""The command line: parse, call cluster.py, print. Every error becomes words and an exit code here, once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import Cluster
    from ascendrun.head.state.settings import Settings

PROGRAM = "ascendrun"
COMPLETE_VARIABLE = "_ASCENDRUN_COMPLETE"

INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None, *, make_cluster: Callable[[Settings], Cluster] | None = None) -> int:
    """Runs one command line and returns its exit code. `make_cluster`: another world to stand on, for tests."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        from ascendrun import __version__

        print(f"{PROGRAM} {__version__}")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the locale cannot write is no reason to fail
    from ascendrun.cli.context import CliContext

    ctx = CliContext(environ=os.environ, make_cluster=make_cluster)
    try:
        code = _run(arguments, ctx)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _forget_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # whatever it is, a person gets a sentence; the traceback goes to a file
        from ascendrun.cli.errors import print_error

        try:
            return print_error(error, ctx)
        except BrokenPipeError:
            _forget_output()
            return PIPE_CLOSED


def _run(arguments: list[str], ctx: CliContext) -> int:
    if arguments == ["controller", "run"]:
        from ascendrun.cli.controller_run import (
            run_controller,  # for whom somebody waits: without click, in half the time
        )

        return run_controller(ctx.settings)
    import click

    from ascendrun.cli.app import cli

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


def _forget_output() -> None:
    """The reader has gone: nothing is to be said when Python flushes at its end."""
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
