"""Messages for errors of the machine, not of a program: a full disk, a directory that is not writable."""

from __future__ import annotations

import errno
import tempfile
import textwrap
from pathlib import Path

from ascendrun.text import Text

SHOWN_CHARACTERS = 200
FIXES = {
    errno.ENOSPC: Text("program.no-space", "free space there, or choose another directory"),
    errno.EDQUOT: Text("program.quota", "free space in the quota, or choose another directory"),
    errno.EROFS: Text("program.read-only", "choose another directory"),
    errno.EACCES: Text("program.no-access", "allow the user of the job to write there, or choose another directory"),
    errno.EPERM: Text("program.no-permission", "allow the user of the job to write there, or choose another directory"),
    errno.ENOTDIR: Text("program.not-a-directory", "expected a directory, found a file; remove it, or choose another"),
    errno.EEXIST: Text("program.file-exists", "expected a directory, found a file; remove it, or choose another"),
    errno.EISDIR: Text("program.is-a-directory", "expected a file, found a directory; remove it, or choose another"),
    errno.EADDRINUSE: Text("program.address-in-use", "another process listens there; stop it, or choose another port"),
    errno.EADDRNOTAVAIL: Text("program.address-unknown", "not an address of this machine; choose another one"),
}


def in_words(error: BaseException | None) -> str | None:
    """Return the message for an error of the machine, None for other errors. torch hides a full disk behind its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FIXES:
            where = f"{error.filename}: " if error.filename is not None else ""
            return f"{where}{error.strerror}\n{hint_line(FIXES[error.errno])}"
        error = error.__context__ if isinstance(error, RuntimeError) else None
    return None


def hint_line(hint: Text) -> str:
    return str(Text("program.hint", "hint: {hint}", hint=hint))


def in_a_line(error: BaseException) -> str:
    """Return the message of a library as one line."""
    return textwrap.shorten(str(error) or type(error).__name__, SHOWN_CHARACTERS, placeholder=" …")


def check_writable(folder: Path) -> None:
    """Raise OSError where a file cannot be created: before a training rather than after it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"x")
