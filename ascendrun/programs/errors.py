"""Errors that a program reports in one line: those of its options and data, and those of the machine."""

from __future__ import annotations

import errno
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ascendrun.text import Text, listed

SHOWN_CHARACTERS = 200
SHOWN_PROBLEMS = 8
FIXES = {
    errno.ENOSPC: listed("program.no-space"),
    errno.EDQUOT: listed("program.quota"),
    errno.EROFS: listed("program.read-only"),
    errno.EACCES: listed("program.no-access"),
    errno.EPERM: listed("program.no-permission"),
    errno.ENOTDIR: listed("program.not-a-directory"),
    errno.EEXIST: listed("program.file-exists"),
    errno.EISDIR: listed("program.is-a-directory"),
    errno.EADDRINUSE: listed("program.address-in-use"),
    errno.EADDRNOTAVAIL: listed("program.address-unknown"),
}


Error = TypeVar("Error", bound="ProgramError")


class ProgramError(Exception):
    """An error with a sufficient message: `runtime.run` prints it without a traceback."""

    @classmethod
    def of(cls: type[Error], problems: Sequence[Text | str], *, most: int = SHOWN_PROBLEMS) -> Error:
        """Return an error of several problems, one per line: the first of them, and the number of the others."""
        more = len(problems) - most
        lines = [*problems[:most], *([listed("program.more", n=more)] if more > 0 else [])]
        return cls("\n".join(map(str, lines)))


class InvalidDataError(ProgramError):
    """Data or options cannot be used; the message has the problem and the expected value."""


class ModelTooLargeError(ProgramError):
    """The model does not fit in memory; the message has the estimate and possible changes."""


def in_words(error: BaseException | None) -> str | None:
    """Return the message of an error of the machine, None for other errors. torch wraps the error of a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FIXES:
            where = f"{error.filename}: " if error.filename is not None else ""
            hint = listed("program.hint", hint=FIXES[error.errno])
            return f"{where}{error.strerror}\n{hint}"
        error = error.__context__ if isinstance(error, RuntimeError) else None
    return None


def in_a_line(error: BaseException) -> str:
    """Return the message of a library as one line."""
    return textwrap.shorten(str(error) or type(error).__name__, SHOWN_CHARACTERS, placeholder=" …")


def check_given(data_path: str, form: Text) -> None:
    """Raise InvalidDataError where no data is named: generated data must be asked for. `form`: what is expected."""
    if not data_path:
        raise InvalidDataError(listed("program.no-data-path", form=form))


def check_writable(folder: Path) -> None:
    """Raise OSError where a file cannot be created: before a training rather than after it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"x")
