"""Stores the output of the nodes' samplers in the sample store, in a separate thread: the controller never waits.

    take(source, generation, offset, data), any thread         bytes of a followed file, in any pieces
    a batch a second: lines -> samples -> store, with the read offset in the same transaction

If the store cannot write (a full disk, a lock, a damaged file), this is logged once, new data is dropped, and the store
is retried periodically. Then the offset of each file is reset to that in the store, so the next bytes do not fit, and
the file is followed again from there: nothing is lost that the node still has.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Union

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
"""Bytes that wait to be read, as if all pieces were as long as the one that arrives."""
MOST_AT_ONCE = 1000
"""Arrivals in one transaction."""
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


Places = dict[int, int]
"""{generation: bytes that were received} of one source."""


@dataclass(frozen=True)
class _Piece:
    source: Source
    generation: int
    data: bytes
    end: int
    ahead_s: float
    places: Places
    """Those that it was counted in. Others are in force now: it will be requested again."""


@dataclass(frozen=True)
class _Lines:
    """Reply of a host without a job."""

    host: str
    lines: Sequence[Any]
    ahead_s: float
    done: Callable[[Newest], None]


@dataclass(frozen=True)
class _Finished:
    name: str


_Arrival = Union[_Piece, _Lines, _Finished, None]
"""None: the ingest is over."""


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
        # No lock: a thousand connections' threads, the controller's and this one would wait for each other.
        self._arrived: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._received: dict[str, Places] = {}
        self._known: Mapping[str, Mapping[int, int]] = {}
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
        self._arrived.put(None)
        self._thread.join(5.0)

    # From any thread; of one source, one at a time

    def offsets(self, source: Source) -> dict[str, int]:
        """Return {generation: bytes that were received}, as the agent's `follow` expects it."""
        return {str(generation): offset for generation, offset in dict(self._places(source.name)).items()}

    def take(self, source: Source, generation: int, offset: int, data: bytes, *, ahead_s: float) -> bool:
        """Take bytes. False: earlier bytes are missing, or there is no room now; follow again from `offsets`."""
        places = self._places(source.name)
        place = places.get(generation, 0)
        if offset > place or self._arrived.qsize() * len(data) > MOST_WAITING_BYTES:
            return False
        new = data[place - offset :]
        if new:
            places[generation] = place + len(new)
            places.pop(generation - KNOWN_GENERATIONS, None)
            self._arrived.put(_Piece(source, generation, new, place + len(new), ahead_s, places))
        return True

    def lacks(self, source: Source, sizes: Mapping[str, int]) -> bool:
        """Return whether the node has bytes that were not received, given the sizes of its files."""
        places = self._places(source.name)
        return any(size > places.get(int(generation), 0) for generation, size in sizes.items())

    def finish(self, source: Source) -> None:
        """Note that every byte has arrived, and none will follow."""
        self._arrived.put(_Finished(source.name))

    def take_lines(self, host: str, lines: Sequence[Any], *, ahead_s: float, done: Callable[[Newest], None]) -> None:
        """Take the reply of a host without a job; `done` gets its samples, in this class's thread."""
        self._arrived.put(_Lines(host, lines, ahead_s, done))

    def _places(self, name: str) -> Places:
        return self._received.setdefault(name, dict(self._known.get(name, {})))

    # The thread

    def _run(self) -> None:
        next_tend_mono = time.monotonic() + TEND_S
        is_over = False
        while not (is_over and self._arrived.empty()):
            arrived = self._next(next_tend_mono)
            is_over = is_over or None in arrived
            try:
                self._work(arrived)
                if time.monotonic() >= next_tend_mono:
                    next_tend_mono = time.monotonic() + (STEP_PAUSE_S if self._tend() else TEND_S)
            except Exception as error:  # costs samples, never the thread: each request must get a reply; the log has it
                self._log_error(error)
                next_tend_mono = time.monotonic() + TEND_S
        if self._store is not None:
            self._store.close()

    def _next(self, until_mono: float) -> list[_Arrival]:
        """Wait for the first bytes and what comes soon after them; whoever waits for a reply does not wait for more."""
        found: list[_Arrival] = []
        with suppress(queue.Empty):
            while len(found) < MOST_AT_ONCE:
                found.append(self._arrived.get(timeout=max(0.0, until_mono - time.monotonic())))
                until_mono = min(until_mono, time.monotonic() + GATHER_S) if isinstance(found[-1], _Piece) else 0.0
        return found

    def _work(self, arrived: Sequence[_Arrival]) -> None:
        batch = _Batch()
        pieces = [one for one in arrived if isinstance(one, _Piece)]
        asked = [one for one in arrived if isinstance(one, _Lines)]
        store = self._open() if pieces or asked else None
        for piece in pieces if store is not None else ():
            if self._received.get(piece.source.name) is piece.places:
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
        for name in [one.name for one in arrived if isinstance(one, _Finished)]:
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
        self._known = known
        self._received.clear()
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
