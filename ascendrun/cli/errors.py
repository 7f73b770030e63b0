"""An error in words for a person, and the exit code that goes with it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.cli.sanitise import sanitise, sanitise_line

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.core.errors import AscendrunError, InvalidInputError, Problem

EXCERPT_CHARACTERS = 100
SOURCE_LIMIT_BYTES = 4 * 1024 * 1024


def print_error(error: Exception, ctx: CliContext) -> int:
    """Prints the error to stderr and returns its exit code."""
    import click

    from ascendrun.core.errors import AscendrunError

    if isinstance(error, click.ClickException):
        print(_describe_usage(error), file=sys.stderr)
        return error.exit_code
    if isinstance(error, click.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, AscendrunError):
        print(describe_error(error), file=sys.stderr)
        return error.exit_code
    path = _write_crash(error, ctx)
    what = sanitise_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    print(f"error: this is a fault of ascendrun: {what[:300]}", file=sys.stderr)
    print(f"hint: the traceback is in {path}" if path else "hint: the traceback could not be written", file=sys.stderr)
    return 8


def describe_error(error: AscendrunError) -> str:
    """One sentence and the way out; for an invalid input every problem with its place in the source."""
    from ascendrun.core.errors import InvalidInputError

    if isinstance(error, InvalidInputError) and error.problems:
        lines = describe_problems(error)
    else:
        lines = [f"error: {sanitise(str(error.message))}"]
    if error.hint:
        lines.append(f"hint: {sanitise(str(error.hint))}")
    return "\n".join(lines)


def describe_problems(error: InvalidInputError) -> list[str]:
    lines = []
    sources: dict[str, list[str]] = {}
    for problem in error.problems:
        lines.append(f"error: {sanitise(str(problem))}")
        if problem.line is not None:
            if problem.file not in sources:
                sources[problem.file] = _read_source(problem.file)
            lines.extend(excerpt(problem, sources[problem.file]))
    count = len(error.problems)
    if count > 1:
        lines.append(f"{count} problems")
    return lines


def excerpt(problem: Problem, source: list[str]) -> list[str]:
    """The line of the source and a caret under the place; [] when the source has no such line."""
    assert problem.line is not None
    if not 1 <= problem.line <= len(source):
        return []
    text = source[problem.line - 1]
    at = min(max((problem.column or 1) - 1, 0), len(text))
    start = max(0, at - EXCERPT_CHARACTERS // 2)
    shown_before = sanitise_line(text[start:at])
    shown = shown_before + sanitise_line(text[at : start + EXCERPT_CHARACTERS])
    lead = f"{problem.line:5d} | " + ("..." if start else "")
    lines = [lead + shown]
    if problem.column is not None:
        from ascendrun.cli.output import width_of

        lines.append(" " * (width_of(lead) + width_of(shown_before)) + "^")
    return lines


def _read_source(name: str) -> list[str]:
    """The lines of the file; [] when the name is no readable file (a flag, say)."""
    try:
        if not os.path.isfile(name):
            return []
        with open(name, "rb") as opened:
            raw = opened.read(SOURCE_LIMIT_BYTES)
    except (OSError, ValueError):
        return []
    return raw.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")


def _describe_usage(error: object) -> str:
    import click

    assert isinstance(error, click.ClickException)
    lines = [f"error: {sanitise(error.format_message())}"]
    context = getattr(error, "ctx", None)
    lines.append(f"hint: {context.command_path if context else 'ascendrun'} --help")
    return "\n".join(lines)


def _write_crash(error: Exception, ctx: CliContext) -> Path | None:
    """The traceback in a file that only the user can read; None when no folder took it."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.txt"
    for folder in _crash_folders(ctx):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as opened:
                opened.write(text)
            return folder / name
        except OSError:
            continue
    return None


def _crash_folders(ctx: CliContext) -> list[Path]:
    from ascendrun.core.errors import InvalidInputError

    temporary = Path(tempfile.gettempdir()) / f"ascendrun-crashes-{os.getuid()}"
    try:
        return [ctx.settings.state_dir / "crashes", temporary]
    except InvalidInputError:
        return [temporary]
