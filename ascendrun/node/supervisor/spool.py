"""One stream of one rank on disk: its bytes unchanged, and their arrival times in a second file.

`NAME.<generation>` holds the bytes, `NAME.times.<generation>` 16 bytes a chunk: end offset, arrival (ns UTC). A
generation at the limit is closed after a complete line, if one ends within the slack; all are kept (later
agent/log_prune.py may delete what the head has). If the file is truncated or removed meanwhile, the stream continues in
the next generation, and the supervisor records it: nothing that follows is lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct

from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass

ROTATE_BYTES = 256 << 20
SLACK_BYTES = 1 << 20
"""Bytes that a generation may exceed the limit by while it waits for the end of a line."""

TIMES = struct.Struct("!QQ")
_OPEN = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def split_at_limit(chunk: bytes, size: int, *, limit: int, slack: int) -> tuple[bytes, bytes]:
    """Split a chunk into bytes for a generation of `size` bytes and bytes for the next.

    Preferred: at the last line end before the limit, then the first after it, then, beyond the slack, anywhere.
    """
    room = limit - size
    if len(chunk) <= room:
        return chunk, b""
    cut = chunk.rfind(b"\n", 0, max(room, 0)) + 1
    if cut == 0:
        cut = chunk.find(b"\n", max(room, 0)) + 1
    if cut == 0 or cut > room + slack:
        cut = max(room + slack, 0)
    return chunk[:cut], chunk[cut:]


class Spool:
    """The writer. Files appear with the first byte. On a full disk log bytes are lost, counted in `dropped_bytes`.

    `cuts`: (generation, previous bytes) of files that others truncated or removed; the caller empties it.
    """

    def __init__(self, folder: str, name: str, *, limit: int = ROTATE_BYTES) -> None:
        self._folder = folder
        self._name = name
        self._limit = limit
        self._slack = min(SLACK_BYTES, limit)
        self._files: list[int] = []
        self._size = 0
        self.generation = 0
        self.total_bytes = 0
        self.dropped_bytes = 0
        self.drop_reason = ""
        self.cuts: list[tuple[int, int]] = []

    def write(self, chunk: bytes, at_ns: int) -> None:
        """Write the bytes; never raises for a disk that is full or broken."""
        self.total_bytes += len(chunk)
        self.check_truncated()
        while chunk:
            mine, chunk = split_at_limit(chunk, self._size, limit=self._limit, slack=self._slack)
            if mine:
                self._append(mine, at_ns)
            if chunk:
                self._next_generation()

    def check_truncated(self) -> None:
        """Check for truncation or removal by the user: new bytes must not go to a file that is not read."""
        if not self._files or not self._size:
            return
        try:
            facts = os.fstat(self._files[0])
        except OSError:  # an unreachable file server: rejected bytes count as dropped
            return
        if facts.st_size < self._size or facts.st_nlink == 0:
            self.cuts.append((self.generation, self._size))
            self._next_generation()

    def tail(self, count: int) -> bytes:
        """Return the last bytes of the newest generation."""
        try:
            with open(self._path(self._name), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - count))
                return file.read(count)
        except OSError:
            return b""

    def close(self) -> None:
        files, self._files = self._files, []
        for fd in files:
            with contextlib.suppress(OSError):  # closed in any case
                os.close(fd)

    def _append(self, chunk: bytes, at_ns: int) -> None:
        view = memoryview(chunk)
        try:
            if not self._files:
                self._open()
            while view:
                view = view[os.write(self._files[0], view) :]
        except OSError as error:
            self._drop(len(view), error)
        if self._files and len(view) < len(chunk):
            self._stamp(at_ns, len(chunk) - len(view))

    def _open(self) -> None:
        for name in (self._name, self._name + ".times"):
            try:
                self._files.append(os.open(self._path(name), _OPEN, 0o600))
            except OSError:
                self.close()
                raise

    def _stamp(self, at_ns: int, written: int) -> None:
        try:
            size = os.fstat(self._files[0]).st_size
        except OSError:
            size = self._size + written
        if size < self._size + written:  # truncated since the check
            self.cuts.append((self.generation, self._size + written))
            self._next_generation()
            return
        self._size = size
        try:
            write_all(self._files[1], TIMES.pack(self._size, at_ns))
        except OSError:
            self._repair_times()

    def _repair_times(self) -> None:
        """Remove an incomplete record, which would shift all later records."""
        with contextlib.suppress(OSError):  # none of it was written
            size = os.fstat(self._files[1]).st_size
            os.ftruncate(self._files[1], size - size % TIMES.size)

    def _drop(self, count: int, error: OSError) -> None:
        self.dropped_bytes += count
        self.drop_reason = errno.errorcode.get(error.errno or 0, "") + " " + (error.strerror or "")

    def _next_generation(self) -> None:
        failpoint("rotate.before_new")
        self.close()
        self.generation += 1
        self._size = 0

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, "%s.%d" % (name, self.generation))
