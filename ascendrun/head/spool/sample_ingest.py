"""Stores the output of the nodes' samplers in the sample store, in a separate thread: the controller never waits.

    take(source, generation, offset, data), any thread         bytes of a followed file, in any pieces
    a batch a second: lines -> samples -> store, with the read offset in the same transaction

If the store cannot write (a full disk, a lock, a damaged file), this is logged once, new data is dropped, and the store
is retried periodically. Then the offset of each file is reset to that in the store, so the next bytes do not fit, and
the file is followed again from there: nothing is lost that the node still has.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.core.samples import DeviceDetail, Newest, RawText, Sample
from ascendrun.head.state.sample_store import KNOWN_GENERATIONS, SampleStore
from ascendrun.head.state.state_dir import StoreDamagedError, set_aside
from ascendrun.node.failpoint import failpoint

if TYPE_CHECKING:
    from ascendrun.health.samples.sample_lines import LineReader

GATHER_S = 0.5
"""Seconds after the first bytes during which further bytes go into the same transaction."""
TEND_S = 30.0
RETRY_S = 15.0
START_BUSY_S = 0.2
"""Seconds for SQLite's locks at the start: the controller waits for it."""
MOST_WAITING_BYTES = 32 << 20
LINE_BYTES = 4 << 20
"""Longer lines are not from the sampler."""
UNREAD = "sampler"
"""Name in place of the tool for an unreadable line."""
WHY_CHARS = 200
MOST_UNREAD = 100
STEP_PAUSE_S = 0.02
"""Seconds between two steps of summing up: arriving samples take precedence."""


@dataclass(frozen=True)
class Source:
    """The samples of one attempt on one host. `every_s`: interval of the samples."""

    tag: str
    host: str
    job: str
    attempt: int
    every_s: float

    @property
    def name(self) -> str:
        return f"{self.tag}/{self.host}"


@dataclass(frozen=True)
class _Piece:
    source: Source
    generation: int
    data: bytes
    end: int
    ahead_s: float


@dataclass(frozen=True)
class _Lines:
    """Reply of a host without a job."""

    host: str
    lines: Sequence[Any]
    ahead_s: float
    done: Callable[[Newest], None]


@dataclass(frozen=True)
class _Batch:
    """What was read for one transaction. `progress`: up to where, by source and generation."""

    samples: list[Sample] = field(default_factory=list)
    raw: list[RawText] = field(default_factory=list)
    details: list[DeviceDetail] = field(default_factory=list)
    progress: dict[tuple[str, int], int] = field(default_factory=dict)


class SampleIngest:
    """One for each controller; `start` before use, `close` at the end. `alone(source, bool)`: whether rank 0 has no
    connection to another rank, at each change. `separate(source, world size)` is called in the
    class's thread when processes of a host first train without the other hosts of their job; None: not reported."""

    def __init__(
        self,
        state_dir: Path,
        *,
        separate: Callable[[Source, int], None] | None = None,
        alone: Callable[[Source, bool], None] | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._separate = separate
        self._separated: set[str] = set()
        self._alone, self._are_alone = alone, dict[str, bool]()
        self._changed = threading.Condition()
        self._waiting: list[_Piece] = []
        self._requested: list[_Lines] = []
        self._finished: list[str] = []
        self._waiting_bytes = 0
        self._received: dict[str, dict[int, int]] = {}
        self._known: Mapping[str, Mapping[int, int]] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        # State of the thread
        self._store: SampleStore | None = None
        self._readers: dict[str, LineReader] = {}
        self._tails: dict[tuple[str, int], bytes] = {}
        self._last_fault = ""
        self._unread: set[tuple[str, str]] = set()
        self._retry_mono = 0.0

    def start(self) -> None:
        """Read the offsets up to which the files were read before; an unreadable store counts as empty."""
        try:
            with SampleStore.open_for_reading(self._state_dir, busy_s=START_BUSY_S) as store:
                self._known = store.all_progress()
        except AscendrunError as error:
            self._log_error(error)
        self._thread.start()

    def close(self) -> None:
        """Store the received data; wait a little for that."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(5.0)

    # From any thread

    def offsets(self, source: Source) -> dict[str, int]:
        """Return {generation: bytes that were received}, as the agent's `follow` expects it."""
        with self._changed:
            return {str(generation): offset for generation, offset in self._places(source.name).items()}

    def take(self, source: Source, generation: int, offset: int, data: bytes, *, ahead_s: float) -> bool:
        """Take bytes. False: earlier bytes are missing, or there is no room now; follow again from `offsets`."""
        with self._changed:
            places = self._places(source.name)
            place = places.get(generation, 0)
            if offset > place or self._waiting_bytes > MOST_WAITING_BYTES:
                return False
            new = data[place - offset :]
            if new:
                places[generation] = place + len(new)
                places.pop(generation - KNOWN_GENERATIONS, None)
                self._waiting.append(_Piece(source, generation, new, place + len(new), ahead_s))
                self._waiting_bytes += len(new)
                self._changed.notify()
            return True

    def lacks(self, source: Source, sizes: Mapping[str, int]) -> bool:
        """Return whether the node has bytes that were not received, given the sizes of its files."""
        with self._changed:
            places = self._places(source.name)
            return any(size > places.get(int(generation), 0) for generation, size in sizes.items())

    def finish(self, source: Source) -> None:
        """Note that every byte has arrived, and none will follow."""
        with self._changed:
            self._finished.append(source.name)
            self._changed.notify()

    def take_lines(self, host: str, lines: Sequence[Any], *, ahead_s: float, done: Callable[[Newest], None]) -> None:
        """Take the reply of a host without a job; `done` gets its samples, in this class's thread."""
        with self._changed:
            self._requested.append(_Lines(host, lines, ahead_s, done))
            self._changed.notify()

    def _places(self, name: str) -> dict[int, int]:
        return self._received.setdefault(name, dict(self._known.get(name, {})))

    # The thread

    def _run(self) -> None:
        next_tend_mono = time.monotonic() + TEND_S
        while True:
            pieces, asked, finished = self._next(next_tend_mono)
            try:
                self._work(pieces, asked, finished)
                if time.monotonic() >= next_tend_mono:
                    next_tend_mono = time.monotonic() + (STEP_PAUSE_S if self._tend() else TEND_S)
            except Exception as error:  # costs samples, never the thread: each request must get a reply; the log has it
                self._log_error(error)
                next_tend_mono = time.monotonic() + TEND_S
            with self._changed:
                if self._is_over and not (self._waiting or self._requested):
                    break
        if self._store is not None:
            self._store.close()

    def _next(self, until_mono: float) -> tuple[list[_Piece], list[_Lines], list[str]]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._waiting or self._requested or self._finished,
                max(0.0, until_mono - time.monotonic()),
            )
            if not (self._is_over or self._requested):
                self._changed.wait_for(lambda: self._is_over or self._requested, GATHER_S if self._waiting else 0.0)
            taken = self._waiting, self._requested, self._finished
            self._waiting, self._requested, self._finished, self._waiting_bytes = [], [], [], 0
            return taken

    def _work(self, pieces: Sequence[_Piece], asked: Sequence[_Lines], finished: Sequence[str]) -> None:
        batch = _Batch()
        is_well = self._store is not None or not self._last_fault
        store = self._open() if pieces or asked else None
        for piece in pieces if is_well and store is not None else ():  # after a fault they are requested again
            self._read(piece, batch)
        answers = [(one, self._read_lines(one, batch)) for one in asked]
        for one, newest in answers:
            one.done(newest)
        if store is not None and (batch.samples or batch.raw or batch.progress):
            failpoint("samples.before_add")
            try:
                store.add(batch.samples, raw=batch.raw, details=batch.details, progress=batch.progress)
            except AscendrunError as error:
                self._give_up(error)
            failpoint("samples.after_add")
        for name in finished:
            self._forget(name)

    def _read(self, piece: _Piece, batch: _Batch) -> None:
        key = piece.source.name, piece.generation
        whole, separator, tail = (self._tails.pop(key, b"") + piece.data).rpartition(b"\n")
        if len(tail) > LINE_BYTES:
            tail = b""
        self._tails[key] = tail
        self._tails.pop((piece.source.name, piece.generation - KNOWN_GENERATIONS), None)
        batch.progress[key] = piece.end - len(tail)
        for line in whole.split(b"\n") if separator else ():
            values = _values(line)
            self._read_line(self._reader(piece.source), values, piece.ahead_s, batch)
            world, tag = values.get("own_world"), piece.source.tag
            is_world = isinstance(world, int) and 0 < world < 10**7  # the job can write the file
            if world is not None and is_world and self._separate is not None and tag not in self._separated:
                self._separated.add(tag)
                self._separate(piece.source, world)
            alone = values.get("is_alone")
            if isinstance(alone, bool) and self._alone is not None and self._are_alone.get(tag) is not alone:
                self._are_alone[tag] = alone
                self._alone(piece.source, alone)

    def _read_line(self, reader: LineReader, line: Mapping[str, Any], ahead_s: float, batch: _Batch) -> None:
        """Read a line. If the reader fails on it, only this line is lost; it is kept raw and logged."""
        try:
            read = reader.read(line, ahead_s=ahead_s)
        except Exception as error:  # an internal error: the lines around it are not affected
            why = f"reading it failed: {type(error).__name__}: {error}"
            batch.raw.append(RawText(time.time(), reader.host, UNREAD, json.dumps(line), why[:WHY_CHARS]))
            self._log_unread(reader.host, why)
            return
        batch.samples.extend(read.samples)
        batch.raw.extend(read.raw)
        batch.details.extend(read.details)

    def _reader(self, source: Source) -> LineReader:
        from ascendrun.health.samples.sample_lines import LineReader

        if source.name not in self._readers:
            self._readers[source.name] = LineReader(
                source.host, job=source.job, attempt=source.attempt, every_s=source.every_s
            )
        return self._readers[source.name]

    def _read_lines(self, asked: _Lines, batch: _Batch) -> Newest:
        """Read details first, so that the samples of the device tables contain them."""
        from ascendrun.core.samples import DeviceSample, HostSample
        from ascendrun.health.samples.device_samples import GPUS, TABLE
        from ascendrun.health.samples.sample_lines import LineReader

        reader = LineReader(asked.host)
        read = _Batch()
        unread: dict[tuple[str, str, str], RawText] = {}
        lines = [line for line in asked.lines if isinstance(line, dict)]
        for _ in range(2):  # the table maps chips to devices; the chips' values are then in its samples
            read = _Batch(details=batch.details)
            for line in sorted(lines, key=lambda line: line.get("tool") in (TABLE, GPUS)):
                self._read_line(reader, line, asked.ahead_s, read)
            unread.update({(one.tool, one.text, one.why): one for one in read.raw})
        batch.samples.extend(read.samples)
        batch.raw.extend(unread.values())
        return Newest(
            devices=tuple(one for one in read.samples if isinstance(one, DeviceSample)),
            hosts=tuple(one for one in read.samples if isinstance(one, HostSample)),
        )

    def _forget(self, name: str) -> None:
        self._readers.pop(name, None)
        for key in [key for key in self._tails if key[0] == name]:
            del self._tails[key]
        with self._changed:
            self._received.pop(name, None)
            self._known = {other: places for other, places in self._known.items() if other != name}
        if self._store is not None:
            with suppress(AscendrunError):  # an extra row does no harm
                self._store.forget_progress(name)

    # The store

    def _tend(self) -> bool:
        is_there = self._store or self._last_fault or (self._state_dir / SampleStore.FILE_NAME).exists()
        store = self._open() if is_there else None
        try:
            return store is not None and store.tend(now_s=time.time())
        except AscendrunError as error:
            self._give_up(error)
            return False

    def _open(self) -> SampleStore | None:
        """Open the store. None: it failed a moment ago, and new data is dropped."""
        if self._store is None and time.monotonic() >= self._retry_mono:
            try:
                store = SampleStore.open(self._state_dir)
                known = store.all_progress()
            except AscendrunError as error:
                self._give_up(error)
                return None
            self._store = store
            if self._last_fault:
                self._go_back(known)
        return self._store

    def _give_up(self, error: AscendrunError) -> None:
        self._log_error(error)
        self._retry_mono = time.monotonic() + RETRY_S
        if self._store is not None:
            self._store.close()
            self._store = None
        if isinstance(error, StoreDamagedError):
            with suppress(OSError):
                set_aside(self._state_dir / SampleStore.FILE_NAME)

    def _go_back(self, known: Mapping[str, Mapping[int, int]]) -> None:
        """Reset offsets to those of the store: dropped data will be requested again."""
        self._tails.clear()
        with self._changed:
            self._known = known
            self._received.clear()
            self._waiting, self._waiting_bytes = [], 0
        self._last_fault = ""
        _print("samples are kept again")

    def _log_unread(self, host: str, why: str) -> None:
        """Log once for each host and fault: a line arrives every few seconds."""
        if (host, why) not in self._unread and len(self._unread) < MOST_UNREAD:
            self._unread.add((host, why))
            _print(f"a line of the samples of {host} could not be read and is kept as it came: {why[:WHY_CHARS]}")

    def _log_error(self, error: Exception) -> None:
        """Log a repeated error once; the log's own disk may be full."""
        hint = getattr(error, "hint", None)
        text = f"no samples are kept for now: {error}" + (f" ({hint})" if hint else "")
        if text != self._last_fault:
            self._last_fault = text
            _print(text)


def _print(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _values(line: bytes) -> Mapping[str, Any]:
    """Return the values; {} for a line that is not a JSON object."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
