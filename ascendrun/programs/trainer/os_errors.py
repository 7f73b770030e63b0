"""What a fault of the machine, not of a program, says to people: a full disk, a folder that cannot be written to."""

from __future__ import annotations

import errno
import tempfile
import textwrap
from pathlib import Path

SHOWN_CHARACTERS = 200
ELSEWHERE = "name another folder"
WAYS_OUT = {
    errno.ENOSPC: "free some space there, or " + ELSEWHERE,
    errno.EDQUOT: "free some of your quota there, or " + ELSEWHERE,
    errno.EROFS: ELSEWHERE,
    errno.EACCES: "let the job's user use it, or " + ELSEWHERE,
    errno.EPERM: "let the job's user use it, or " + ELSEWHERE,
    errno.ENOTDIR: "there is a file where a folder should be; remove it, or " + ELSEWHERE,
    errno.EEXIST: "there is a file where a folder should be; remove it, or " + ELSEWHERE,
    errno.EISDIR: "there is a folder where a file should be; remove it, or " + ELSEWHERE,
    errno.EADDRINUSE: "another process listens there; stop it, or choose another port",
    errno.EADDRNOTAVAIL: "it is no address of this machine; choose another one",
}


def in_words(error: BaseException | None) -> str | None:
    """None: a fault of another kind. torch hides a full disk behind an error of its own; the cause is looked for."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in WAYS_OUT:
            where = f"{error.filename}: " if error.filename is not None else ""
            return f"{where}{error.strerror}; {WAYS_OUT[error.errno]}"
        error = error.__context__ if isinstance(error, RuntimeError) else None
    return None


def in_a_line(error: BaseException) -> str:
    """What a library says of a file, be it over many lines."""
    return textwrap.shorten(str(error) or type(error).__name__, SHOWN_CHARACTERS, placeholder=" …")


def check_writable(folder: Path) -> None:
    """Raises OSError where a file cannot be made: better told before a training than after it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"x")
