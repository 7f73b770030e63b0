"""Events of an attempt on disk: JSON lines in `events.0`, numbered, also when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import time

from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import write_all, write_json
from ascendrun.node.layout import ENDED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RESERVE_BYTES = 1 << 20
"""Size of a placeholder file, deleted when the disk is full: space for a few thousand records."""

EVENTS = "events.0"
_RESERVE = "reserve"
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def parse_events(data: bytes) -> list[dict[str, Any]]:
    """Return the complete records in `data`; a torn line (power loss, full disk) is skipped."""
    found = []
    for line in data.split(b"\n"):
        try:
            event = json.loads(line.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def read_events(folder: str) -> list[dict[str, Any]]:
    """Return the attempt's records so far, in order; []: none."""
    try:
        with open(os.path.join(folder, EVENTS), "rb") as file:
            return parse_events(file.read())
    except FileNotFoundError:
        return []


class Records:
    """Appends events. One writer at a time: the supervisor, and after its death the serving agent."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._seq = max([int(event.get("seq", 0)) for event in read_events(folder)] or [0])
        self._fd = os.open(os.path.join(folder, EVENTS), _APPEND, 0o600)
        self._waiting = b"\n" if self._ends_torn() else b""

    def hold_reserve(self) -> None:
        """Write the reserve. Raises OSError: the disk is full already."""
        fd = os.open(
            os.path.join(self._folder, _RESERVE), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            write_all(fd, b"\0" * RESERVE_BYTES)
        finally:
            os.close(fd)

    def add(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        """Add one record; `durable` also survives a power failure. A record that finds no space waits for `flush`."""
        self._seq += 1
        record = dict(seq=self._seq, at_ns=time.time_ns(), event=event, **fields)
        self._waiting += json.dumps(record, separators=(",", ":")).encode("utf-8") + b"\n"
        if self.flush() and durable:
            os.fsync(self._fd)

    def flush(self) -> bool:
        """Write waiting records, if necessary on the reserve's space; False while it cannot."""
        if not self._waiting:
            return True
        try:
            self._append(self._waiting)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not free_reserve(self._folder):
                return False
            return self.flush()
        self._waiting = b""
        return True

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, line)
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def _ends_torn(self) -> bool:
        size = os.fstat(self._fd).st_size
        return size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"


def free_reserve(folder: str) -> bool:
    """Delete an attempt's reserve for its records; False when there was none left."""
    try:
        os.unlink(os.path.join(folder, _RESERVE))
    except OSError:
        return False
    return True


def write_end(
    folder: str, records: Records, *, leftovers: list[int], codes: dict[str, int | None], wait_s: float | None = None
) -> None:
    """Write the end of an attempt: the event, then the file that makes its phase `ended`.

    While the disk is full it is retried every `wait_s`; None: OSError is raised.
    """
    records.add("ended", durable=True, leftovers=leftovers, codes=codes)
    failpoint("finish.after_event")
    while True:
        try:
            if not records.flush():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
            write_json(os.path.join(folder, ENDED), {"at_ns": time.time_ns(), "leftovers": leftovers, "codes": codes})
            return
        except OSError as error:
            if wait_s is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        time.sleep(wait_s)
