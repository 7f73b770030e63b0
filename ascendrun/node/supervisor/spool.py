"""One stream of one rank on disk: its bytes as they came, and in a second file when they came.

`NAME.<generation>` holds the bytes, `NAME.times.<generation>` 16 bytes a chunk: end offset, arrival (ns UTC).
A generation that has reached the limit is closed after a whole line, where one ends within the slack; all are kept
(what the head has whole may go later: agent/log_prune.py). When the file is truncated or removed meanwhile, the stream
continues in the next generation, and the supervisor records it: nothing that comes after is lost.
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
"""How far a generation may outgrow the limit while it waits for the end of a line."""

TIMES = struct.Struct("!QQ")
_OPEN = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def split_at_limit(chunk: bytes, size: int, *, limit: int, slack: int) -> tuple[bytes, bytes]:
    """What still belongs to a generation of `size` bytes, and what to the next one.

    The last line end before the limit is best, then the first one after it, then, beyond the slack, any place.
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
    """The writer. Files appear with the first byte. A full disk costs log bytes, counted in `dropped_bytes`.

    `cuts`: (generation, bytes that it had) of files that were cut or removed under us; the caller empties it.
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
        """Takes the bytes over; never raises for a disk that is full or broken."""
        self.total_bytes += len(chunk)
        self.check_truncated()
        while chunk:
            mine, chunk = split_at_limit(chunk, self._size, limit=self._limit, slack=self._slack)
            if mine:
                self._append(mine, at_ns)
            if chunk:
                self._next_generation()

    def check_truncated(self) -> None:
        """The user may truncate or remove the file: what follows must not be written to a file that is not read."""
        if not self._files or not self._size:
            return
        try:
            facts = os.fstat(self._files[0])
        except OSError:  # a server of files that is gone: what it does not take is counted as dropped
            return
        if facts.st_size < self._size or facts.st_nlink == 0:
            self.cuts.append((self.generation, self._size))
            self._next_generation()

    def tail(self, count: int) -> bytes:
        """The last bytes of the newest generation."""
        try:
            with open(self._path(self._name), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - count))
                return file.read(count)
        except OSError:
            return b""

    def close(self) -> None:
        files, self._files = self._files, []
        for fd in files:
            with contextlib.suppress(OSError):  # it is closed all the same
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
        if size < self._size + written:  # it was cut since we looked
            self.cuts.append((self.generation, self._size + written))
            self._next_generation()
            return
        self._size = size
        try:
            write_all(self._files[1], TIMES.pack(self._size, at_ns))
        except OSError:
            self._repair_times()

    def _repair_times(self) -> None:
        """Half a record would shift all later ones."""
        with contextlib.suppress(OSError):  # nothing of it was written, then
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
