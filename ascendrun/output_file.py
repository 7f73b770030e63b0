"""Output files named by a user: written completely or not at all, through links, never in place of a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO, Callable, TypeVar

Result = TypeVar("Result")


def write_output(path: Path, write: Callable[[IO[bytes]], Result], *, mode: int = 0o666) -> Result:
    """Call `write` with a file, and store its output at `path`. Raises OSError.

    A regular or new file is replaced when the new file is complete; for a symbolic link, its target. A device or a pipe
    is written directly: renaming over it would destroy it. `mode`: of a new file, before the umask.
    """
    target = _regular_target(path)
    if target is None:
        import shutil
        import tempfile

        with tempfile.TemporaryFile() as complete, open(path, "wb", buffering=0) as out:
            result = write(complete)
            complete.seek(0)
            shutil.copyfileobj(complete, out)
        return result
    part = target.with_name(f".{target.name[:100]}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode), "w+b") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return result


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` as `write_output` does."""
    write_output(path, lambda file: file.write(content))


def _regular_target(path: Path) -> Path | None:
    """Return the file that may be replaced, links followed; None: it must be written directly."""
    target = Path(os.path.realpath(path))
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return target  # new, or a link with a missing target, which is created
    if not stat.S_ISREG(found.st_mode):
        return None
    try:
        return target if os.path.samestat(found, os.stat(target)) else None
    except OSError:  # /dev/stdout of a deleted file
        return None
