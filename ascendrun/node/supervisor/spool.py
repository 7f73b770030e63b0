"""One stream of one rank on disk: its bytes unchanged, and their arrival times in a second file.

`NAME.<generation>` holds the bytes, `NAME.times.<generation>` 16 bytes a chunk: end offset, arrival (ns UTC). A
generation at the limit is closed after a complete line, if one ends within the slack; all are kept (later
agent/prune.py may delete what the head has). If the file is truncated or removed meanwhile, the stream continues in
the next generation, and the supervisor records it: nothing that follows is lost.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import struct
import time

from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import write_all

ROTATE_BYTES = 256 << 20
SLACK_BYTES = 1 << 20
"""Bytes that a generation may exceed the limit by while it waits for the end of a line."""

WAIT_BYTES = 4 << 20
"""Bytes of one stream that wait in memory while they cannot be written."""
RETRY_S = 0.2

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
    """The writer. Files appear with the first byte. Bytes that cannot be written wait, up to WAIT_BYTES; beyond it the
    oldest are lost, counted in `dropped_bytes`, and their places are in `holes`.

    Each write opens the files again after an error: a file server that restarted rejects the old descriptors.
    `cuts`: (generation, previous bytes) of files that others truncated or removed; the caller empties it.
    `holes`: [generation, offset, bytes] of lost bytes, before the byte at the offset; the caller empties it.
    `error`: why bytes wait, None: none wait.
    """

    def __init__(self, folder: str, name: str, *, limit: int = ROTATE_BYTES) -> None:
        self._folder = folder
        self._name = name
        self._limit = limit
        self._slack = min(SLACK_BYTES, limit)
        self._files: list[int] = []
        self._size = 0
        self._waiting: collections.deque[tuple[bytes, int]] = collections.deque()
        self._waiting_bytes = 0
        self._retry_s = 0.0
        self.generation = 0
        self.total_bytes = 0
        self.dropped_bytes = 0
        self.drop_reason = ""
        self.error: OSError | None = None
        self.cuts: list[tuple[int, int]] = []
        self.holes: list[list[int]] = []

    def write(self, chunk: bytes, at_ns: int) -> None:
        """Write the bytes; never raises for a disk that is full or broken."""
        self.total_bytes += len(chunk)
        self._waiting.append((chunk, at_ns))
        self._waiting_bytes += len(chunk)
        self.flush()

    def flush(self, *, now: bool = False) -> bool:
        """Write the bytes that wait; False while it cannot. `now`: also directly after a failure."""
        if self.error is not None and not now and time.monotonic() < self._retry_s:
            self._drop_beyond(WAIT_BYTES)
            return False
        try:
            self.check_truncated()
            while self._waiting:
                self._write_next()
        except OSError as error:
            self.error = error
            self._retry_s = time.monotonic() + RETRY_S
            self._close_files()
            self._drop_beyond(WAIT_BYTES)
            return False
        self.error = None
        return True

    def check_truncated(self) -> None:
        """Check for truncation or removal by the user: new bytes must not go to a file that is not read."""
        if not self._files or not self._size:
            return
        try:
            facts = os.fstat(self._files[0])
        except OSError:  # an unreachable file server: the next write opens it again
            return
        if facts.st_size < self._size or facts.st_nlink == 0:
            self._cut(self._size)

    def tail(self, count: int) -> bytes:
        """Return the last bytes of the newest generation."""
        try:
            with open(self._path(self._name), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - count))
                return file.read(count)
        except OSError:
            return b""

    def close(self) -> None:
        """Write what waits, or lose it."""
        if not self.flush(now=True):
            self._drop_beyond(0)
        self._close_files()

    def _write_next(self) -> None:
        """Write the first chunk that waits, as far as it fits into the generation. Raises OSError."""
        if not self._files:
            self._open()
        chunk, at_ns = self._waiting[0]
        mine, rest = split_at_limit(chunk, self._size, limit=self._limit, slack=self._slack)
        generation = self.generation
        written = os.write(self._files[0], mine) if mine else 0
        self._pop(written)
        if written:
            self._stamp(at_ns, written)
        if rest and written == len(mine) and self.generation == generation:
            self._next_generation()

    def _pop(self, count: int) -> None:
        """Remove bytes of the first chunk that waits."""
        chunk, at_ns = self._waiting.popleft()
        if count < len(chunk):
            self._waiting.appendleft((chunk[count:], at_ns))
        self._waiting_bytes -= count

    def _drop_beyond(self, limit: int) -> None:
        """Lose the oldest waiting bytes beyond `limit`: the last words of a program are the more useful ones."""
        count = self._waiting_bytes - limit
        if count <= 0 or self.error is None:
            return
        self.dropped_bytes += count
        self.drop_reason = errno.errorcode.get(self.error.errno or 0, "") + " " + (self.error.strerror or "")
        if self.holes and self.holes[-1][:2] == [self.generation, self._size]:
            self.holes[-1][2] += count
        else:
            self.holes.append([self.generation, self._size, count])
        while count > 0:
            part = min(count, len(self._waiting[0][0]))
            self._pop(part)
            count -= part

    def _open(self) -> None:
        """Open the generation, or the next one if it has lost bytes since it was closed. Raises OSError."""
        for name in (self._name, self._name + ".times"):
            try:
                self._files.append(os.open(self._path(name), _OPEN, 0o600))
            except OSError:
                self._close_files()
                raise
        size = os.fstat(self._files[0]).st_size
        if size < self._size:
            self._cut(self._size)
            self._open()
            return
        self._size = size
        self._repair_times()

    def _stamp(self, at_ns: int, written: int) -> None:
        try:
            size = os.fstat(self._files[0]).st_size
        except OSError:
            size = self._size + written
        if size < self._size + written:  # truncated since the check
            self._cut(self._size + written)
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

    def _cut(self, had: int) -> None:
        self.cuts.append((self.generation, had))
        self._next_generation()

    def _next_generation(self) -> None:
        failpoint("rotate.before_new")
        self._close_files()
        self.generation += 1
        self._size = 0

    def _close_files(self) -> None:
        files, self._files = self._files, []
        for fd in files:
            with contextlib.suppress(OSError):  # closed in any case
                os.close(fd)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, "%s.%d" % (name, self.generation))
