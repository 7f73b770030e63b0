"""Events of an attempt on disk: JSON lines in `events.<generation>`, numbered, whatever becomes of the disk.

A generation that others shortened, lengthened or removed is left as it is: its writer continues in the next one, with
all its records again. Readers take every generation; of records with the same number and name the last one counts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time

from ascendrun.node import layout
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import make_private_dir, names_in, remove_tree, write_all, write_json
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping

RESERVE_BYTES = 1 << 20
"""Size of a placeholder file, deleted when the disk is full: space for a few thousand records."""
KEEP_BYTES = 1 << 20
"""Bytes of records that a writer keeps in memory; beyond that the oldest notes about logs are dropped."""
NOTES = frozenset({"log_dropped", "log_cut", "rank_lingers", "io_error", "forked_rank_started", "forked_rank_exited"})
"""Records that may be dropped: no decision depends on them."""

EVENTS = "events"
_GENERATION = re.compile(r"^events\.(\d+)$")
_FIELDS: dict[str, tuple[tuple[str, Any], ...]] = {
    "rank_started": (("rank", int), ("pid", int), ("start", (int, type(None)))),
    "rank_exited": (("rank", int), ("code", (int, type(None))), ("signal", (int, type(None)))),
}
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


def event_generations(folder: str) -> list[int]:
    """Return the generations of the attempt's events that exist, oldest first. Raises OSError."""
    return sorted(int(match.group(1)) for match in map(_GENERATION.match, names_in(folder)) if match)


def read_events(folder: str) -> list[dict[str, Any]]:
    """Return the attempt's records so far, in order, each once; []: none. Raises OSError.

    A line whose numbers are missing is skipped: the supervisor did not write it.
    """
    found: dict[Any, dict[str, Any]] = {}
    for generation in event_generations(folder):
        try:
            with open(os.path.join(folder, "%s.%d" % (EVENTS, generation)), "rb") as file:
                events = parse_events(file.read())
        except FileNotFoundError:
            continue
        for number, event in enumerate(events):
            if all(isinstance(event.get(name), kinds) for name, kinds in _FIELDS.get(str(event.get("event")), ())):
                seq = event.get("seq")
                found[(seq, str(event.get("event"))) if isinstance(seq, int) else (generation, number, "")] = event
    return list(found.values())


class Records:
    """Appends events. One writer at a time: the supervisor, and after its death the serving agent.

    `known`: {generation: bytes} of the head's copy. A copy that has more than this folder, which was made again, is not
    continued but followed by the next generation. `error`: why the last attempt to write failed, None: it succeeded.
    Raises OSError only when it is made.
    """

    def __init__(self, folder: str, *, known: Mapping[str, int] | None = None) -> None:
        self._folder = folder
        numbers = (event.get("seq") for event in read_events(folder))
        self._seq = max([number for number in numbers if isinstance(number, int)] or [0])
        self._kept: list[tuple[str, bytes]] = []
        self._kept_bytes = 0
        self._written = 0
        self._lost = 0
        self.error: OSError | None = None
        self.generation = max(event_generations(folder) or [0])
        self._fd, self._size = self._open()
        self._end_torn_line()
        newest = max(map(int, known or {}), default=0)
        if newest > self.generation or (known or {}).get(str(newest), 0) > self._size:
            self.close()
            self._begin_next(newest)
            self._fd, self._size = self._open()

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
        """Add one record; `durable` survives a power failure too. A record that cannot be written waits for `flush`."""
        self._seq += 1
        record = dict(seq=self._seq, at_ns=time.time_ns(), event=event, **fields)
        line = json.dumps(record, separators=(",", ":")).encode("utf-8") + b"\n"
        self._kept.append((event, line))
        self._kept_bytes += len(line)
        self._drop_notes()
        if self.flush() and durable:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self.error = error

    def flush(self) -> bool:
        """Write waiting records, if necessary on the reserve's space; False while it cannot. Continue in the next
        generation if others changed the file; call it periodically."""
        try:
            self._write_waiting()
        except OSError as error:
            self.error = error
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and free_reserve(self._folder):
                return self.flush()
            return False
        self.error = None
        return True

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:  # closed in any case
                pass

    def _write_waiting(self) -> None:
        if self._fd < 0:
            self._fd, size = self._open()
        else:
            found = os.fstat(self._fd)
            size = found.st_size if found.st_nlink else -1
        if size != self._size:
            self.close()
            self._begin_next(self.generation)
            self._fd, self._size = self._open()
        if self._written == len(self._kept):
            return
        data = b"".join(line for _, line in self._kept[self._written :])
        try:
            write_all(self._fd, data)
        except OSError:
            os.ftruncate(self._fd, self._size)  # if this fails too, the next generation follows
            raise
        self._size += len(data)
        self._written = len(self._kept)
        if self._lost:
            lost, self._lost = self._lost, 0
            self.add("records_lost", count=lost)

    def _begin_next(self, newest: int) -> None:
        """Continue after generation `newest`, and after every generation here, with all records again."""
        self.generation = max([newest, *event_generations(self._folder)]) + 1
        self._written = 0
        self._size = 0

    def _open(self) -> tuple[int, int]:
        """Open the generation; return (descriptor, size)."""
        fd = os.open(os.path.join(self._folder, "%s.%d" % (EVENTS, self.generation)), _APPEND, 0o600)
        try:
            return fd, os.fstat(fd).st_size
        except OSError:
            os.close(fd)
            raise

    def _end_torn_line(self) -> None:
        if self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n":
            write_all(self._fd, b"\n")
            self._size += 1

    def _drop_notes(self) -> None:
        at = 0
        while self._kept_bytes > KEEP_BYTES and at < len(self._kept):
            event, line = self._kept[at]
            if event not in NOTES:
                at += 1
                continue
            del self._kept[at]
            self._kept_bytes -= len(line)
            if at < self._written:
                self._written -= 1
            else:
                self._lost += 1


def free_reserve(folder: str) -> bool:
    """Delete an attempt's reserve for its records; False when there was none left."""
    try:
        os.unlink(os.path.join(folder, _RESERVE))
    except OSError:
        return False
    return True


def write_end(
    folder: str,
    records: Records,
    *,
    leftovers: list[dict[str, Any]],
    codes: dict[str, int | None],
    wait_s: float | None = None,
    **more: Any,
) -> None:
    """Write the end of an attempt: the event, then the file that makes its phase `ended`.

    After an error it is retried every `wait_s`; None: OSError is raised. `more`: further fields of the event.
    """
    with contextlib.suppress(OSError):  # no process uses it, and no later attempt
        remove_tree(layout.short_dir(folder))
    records.add("ended", durable=True, leftovers=leftovers, codes=codes, **more)
    failpoint("finish.after_event")
    end = {"at_ns": time.time_ns(), "leftovers": leftovers, "codes": codes}
    while True:
        try:
            if records.error is not None and not records.flush():
                raise records.error
            write_json(os.path.join(folder, layout.ENDED), end)
            with contextlib.suppress(OSError):  # it stays in the list of live attempts until its end is found there
                os.unlink(layout.live_mark(folder))
            return
        except OSError as error:
            if wait_s is None:
                raise
            if error.errno == errno.ENOENT:
                with contextlib.suppress(OSError, OperationError):  # tried again below
                    make_private_dir(folder)
        time.sleep(wait_s)


class IoErrors:
    """Errors of the system in a supervisor's steps, which end neither it nor a rank: each kind is recorded once, and at
    the end how often."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._found: dict[tuple[str, str], list[int]] = {}

    def guard(self, step: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Call, and record an OSError: the other steps continue."""
        try:
            call(*arguments)
        except OSError as error:
            self.note(step, error)

    def note(self, step: str, error: OSError) -> None:
        key = step, errno.errorcode.get(error.errno or 0, str(error.errno))
        entry = self._found.setdefault(key, [0, time.time_ns()])
        entry[0] += 1
        if entry[0] == 1:
            self._record(key)

    def finish(self) -> None:
        for key, (count, _) in self._found.items():
            if count > 1:
                self._record(key)

    def _record(self, key: tuple[str, str]) -> None:
        count, since_ns = self._found[key]
        self._records.add("io_error", step=key[0], errno=key[1], count=count, since_ns=since_ns)
