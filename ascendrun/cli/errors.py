"""Output and exit codes of errors."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ascendrun.cli.output import sanitise, sanitise_line, screen_columns, width_of, wrap
from ascendrun.core.errors import AscendrunError, InvalidInputError, Problem
from ascendrun.text import Text, enumerate_texts

EXCERPT_CHARACTERS = 100
SOURCE_LIMIT_BYTES = 4 * 1024 * 1024


class UsageError(click.UsageError):
    """An invalid command line: exit code 2. `hint`: None: the command that prints the help."""

    def __init__(self, message: Text, *, hint: Text | str | None = None, ctx: click.Context | None = None) -> None:
        super().__init__(str(message), ctx)
        self.text, self.hint = message, hint

    @classmethod
    def of(cls, key: str, english: str, hint: str | None = None, /, **values: Any) -> UsageError:
        """Make an error as `AscendrunError.of`."""
        return cls(Text(key, english, **values), hint=None if hint is None else Text(f"{key}.hint", hint, **values))


def exclusive(one: str, other: str) -> Text:
    """Return the message that two flags exclude each other."""
    return Text("cli.exclusive", "{one} cannot be combined with {other}", one=one, other=other)


def print_error(error: Exception, state_dir: Callable[[], Path]) -> int:
    """Print the error to stderr and return its exit code. `state_dir`: directory for the traceback of a crash; it may
    raise InvalidInputError."""
    if isinstance(error, click.Abort):
        lines, code = [str(Text("cli.interrupted", "interrupted"))], 130
    elif isinstance(error, click.ClickException):
        lines, code = _describe_usage(error), error.exit_code
    elif isinstance(error, AscendrunError):
        lines, code = describe_error(error), error.exit_code
    else:
        lines, code = _describe_crash(error, state_dir), 8
    print("\n".join(lines), file=sys.stderr)
    return code


def describe_error(error: AscendrunError) -> list[str]:
    """Return `error: LOCATION: WHAT`, then `hint: …`; of an invalid input all problems with their source lines."""
    is_list = isinstance(error, InvalidInputError) and error.problems
    lines = [] if is_list else error_lines(error.message)
    lines += describe_problems(error.problems)
    if is_list and len(error.problems) > 1:
        lines.append(str(Text("cli.problems", "{count} problems", count=len(error.problems))))
    return [*lines, *hint_lines(error.hint)]


def error_lines(message: Text | str) -> list[str]:
    return wrapped(Text("cli.error", "error: {message}", message=sanitise(str(message))))


def warning_lines(message: Text | str) -> list[str]:
    return wrapped(Text("cli.warning", "warning: {message}", message=sanitise(str(message))))


def hint_lines(hint: Text | str | None) -> list[str]:
    """Return a hint; a command stays on one line, so that it can be copied."""
    if not hint:
        return []
    shown = Text("cli.hint", "hint: {hint}", hint=sanitise(str(hint)))
    return str(shown).split("\n") if str(hint).startswith("ascendrun ") else wrapped(shown)


def wrapped(text: Text | str) -> list[str]:
    """Return lines for stderr: as wide as the terminal, later lines indented; without a terminal not wrapped."""
    lines = str(text).split("\n")
    if not sys.stderr.isatty():
        return lines
    width = screen_columns()
    return [part for line in lines for part in wrap(line, width)]


def describe_problems(problems: Sequence[Problem]) -> list[str]:
    """Return one problem per line, then its source line; consecutive problems with one hint print it once."""
    lines = []
    sources: dict[str, list[str]] = {}
    for number, problem in enumerate(problems):
        message = Text("cli.at", "{place}: {message}", place=problem.place, message=problem.message)
        lines += error_lines(message if problem.place else problem.message)
        if problem.line is not None and not problem.is_private:
            if problem.file not in sources:
                sources[problem.file] = _read_source(problem.file)
            lines += excerpt(problem, sources[problem.file])
        if number + 1 == len(problems) or problems[number + 1].hint != problem.hint:
            lines += hint_lines(problem.hint)
    return lines


def excerpt(problem: Problem, source: list[str]) -> list[str]:
    """Return the source line and a caret under the place; [] when the source has no such line."""
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
        lines.append(" " * (width_of(lead) + width_of(shown_before)) + "^")
    return lines


def _read_source(name: str) -> list[str]:
    """Return the lines of the file; [] when the name is not a readable file (a flag, for example)."""
    try:
        if not os.path.isfile(name):
            return []
        with open(name, "rb") as opened:
            raw = opened.read(SOURCE_LIMIT_BYTES)
    except (OSError, ValueError):
        return []
    return raw.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")


def _describe_usage(error: click.ClickException) -> list[str]:
    """Return click's errors in ascendrun's form: the problem, and the command that prints the help."""
    context = getattr(error, "ctx", None)
    hint: Text | str = f"{context.command_path if context else 'ascendrun'} --help"
    if isinstance(error, UsageError):
        message: Text | str = error.text
        hint = error.hint or hint
    elif isinstance(error, click.NoSuchOption):
        message = Text("cli.unknown-option", "unknown option {flag}", flag=error.option_name)
        if error.possibilities:
            flags = sorted(error.possibilities)
            hint = Text("cli.did-you-mean", "did you mean {flags}?", flags=flags)
    elif isinstance(error, click.MissingParameter):
        message = Text("cli.missing", "missing {name}", name=_name_of(error) or "?")
    elif isinstance(error, click.BadParameter):
        name = _name_of(error)
        message = Text("cli.at", "{place}: {message}", place=name, message=_plain(error.message))
        message = message if name else _plain(error.message)
    else:
        message = _plain(error.format_message())
    return [*error_lines(message), *hint_lines(hint)]


def _name_of(error: click.BadParameter) -> str | None:
    """Return the invalid flag (its longest name) or argument."""
    given = error.param_hint
    if given is not None:
        return given if isinstance(given, str) else " / ".join(given)
    if error.param is None:
        return None
    is_option = error.param.param_type_name == "option"
    return max(error.param.opts, key=len) if is_option else error.param.human_readable_name


def _plain(message: object) -> Text | str:
    """Return a message of click in ascendrun's form: lower case, without its final period."""
    if isinstance(message, Text):
        return message
    short = str(message).removesuffix(".").replace("', '", enumerate_texts("''"))
    return short[:1].lower() + short[1:] if short[1:2].islower() else short


def _describe_crash(error: Exception, state_dir: Callable[[], Path]) -> list[str]:
    path = _write_crash(error, state_dir)
    what = sanitise_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    saved = Text("cli.crash-saved", "the traceback is in {path}", path=str(path))
    unsaved = Text("cli.crash-unsaved", "the traceback could not be written")
    return [
        *error_lines(Text("cli.crash", "internal error: {what}", what=what[:300])),
        *hint_lines(saved if path else unsaved),
    ]


def _write_crash(error: Exception, state_dir: Callable[[], Path]) -> Path | None:
    """Write the traceback to a private file; None when no directory is writable."""
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.txt"
    for directory in _crash_dirs(state_dir):
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as opened:
                opened.write(text)
            return directory / name
        except OSError:
            continue
    return None


def _crash_dirs(state_dir: Callable[[], Path]) -> list[Path]:
    import tempfile

    temporary = Path(tempfile.gettempdir()) / f"ascendrun-crashes-{os.getuid()}"
    try:
        return [state_dir() / "crashes", temporary]
    except InvalidInputError:
        return [temporary]
