"""Bytes of files between this node and the head: in blocks from an offset, resumable, verified by their hash.

The other side is head/spool/transfer.py. Of all files that move, this is the contract:

    from the node   `read_block`: bytes of FILE from OFFSET, at most BLOCK_BYTES, with the size and the time of the file
                    after the read, by which the head notices a change; `hash_of`: SHA-256 of the whole file.
    to the node     `take_block`: the bytes go to a part, a file whose name the source and this machine decide. The
                    reply says how many bytes the part has; the sender continues there. The last request has the hash:
                    the complete part gets its place, or is removed and sent again.

Each request is bounded, and repeatable after a lost reply. Nothing has its final name before it is verified. What
differs stays with the callers: outputs.py says which files, trees.py what a tree is; artifacts.py sends excerpts of
files and commands, which have no hash, and follow.py files that grow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from ascendrun.node import layout
from ascendrun.node.files import BLOCK_BYTES, hash_start, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


def open_file(path: str, flags: int = 0) -> int:
    """Open a regular file for reading. Raises OSError, for anything else too: a FIFO must not block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def read_block(path: str, offset: int) -> tuple[dict[str, Any], bytes]:
    """Return ({"size_bytes", "mtime_ns"} of the file now, at most BLOCK_BYTES from `offset` on). Raises OSError."""
    fd = open_file(path)
    try:
        data = os.pread(fd, BLOCK_BYTES, offset)
        facts = os.fstat(fd)
    finally:
        os.close(fd)
    return {"size_bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns}, data


def hash_of(path: str) -> dict[str, Any]:
    """Return {"sha256"} of the whole file. Raises OSError."""
    fd = open_file(path)
    try:
        return {"sha256": hash_start(fd).hexdigest()}
    finally:
        os.close(fd)


def is_complete(path: str, size: int, mtime_ns: int) -> bool:
    """Return whether a file was received and verified before: only then it has the time of its source. Raises
    IsADirectoryError."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return stat.S_ISREG(facts.st_mode) and (facts.st_size, facts.st_mtime_ns) == (size, mtime_ns)


def part_name(*source: object) -> str:
    """Return the name of the part of a source, for this machine only: hosts may share the directory."""
    text = " ".join(map(str, (layout.machine_key(), *source)))
    return "part-" + str(layout.sha256(os.fsencode(text)).hexdigest()[:24])


def take_block(part: str, request: dict[str, Any], body: bytes, complete: Callable[[int], bool]) -> dict[str, Any]:
    """{size_bytes, offset, sha256} and the bytes -> {"have", "done"}: the bytes in the part, whether it has its place.

    Without `offset` nothing is written. With it the body is written there, if the part ends there. With `sha256` the
    part is complete: `complete(descriptor)` gives it its place; False: it is damaged, and removed. Raises OSError.
    """
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        have = os.fstat(fd).st_size
        if request.get("offset") == have and body:
            os.lseek(fd, have, os.SEEK_SET)
            write_all(fd, body)
            have += len(body)
        if request.get("sha256") is None:
            return {"have": have, "done": False}
        os.fsync(fd)
        is_done = have == int(request["size_bytes"]) and complete(fd)
    finally:
        os.close(fd)
    if not is_done:
        with contextlib.suppress(FileNotFoundError):  # another transfer of the same file removed it
            os.unlink(part)
    return {"have": have if is_done else 0, "done": is_done}
