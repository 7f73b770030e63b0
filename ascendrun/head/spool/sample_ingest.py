"""Passes the output of the nodes' samplers to the process that keeps it: the controller never waits.

    take(source, generation, offset, data), any thread         bytes of a followed file, in any pieces
    a thread passes them on in frames to sample_writer.py, which reads and stores them

If that process cannot write (a full disk, a lock, a damaged file) or is killed, this is logged once, new data is
dropped, and another process is started after a pause. Then the offset of each file is reset to that in the store, and
the file is followed again from there: nothing is lost that the node still has.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Callable, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.core.metrics import parse_object
from ascendrun.core.samples import DeviceSample, HostSample, Newest, Source
from ascendrun.head.state.sample_store import KNOWN_GENERATIONS, SampleStore
from ascendrun.head.waiting import get_within
from ascendrun.node import wire
from ascendrun.node.files import write_all

RETRY_S = 15.0
START_BUSY_S = 0.2
"""Seconds for SQLite's locks at the start: the controller waits for it."""
CLOSE_S = 10.0
TEND_S = 30.0
"""Seconds without samples after which the process is started all the same: it removes old ones."""
MOST_WAITING_BYTES = 32 << 20
"""Bytes that wait to be passed on, shared by all sources; a source may always have one piece."""
LEAST_WINDOW_BYTES, WINDOW_BYTES = 1 << 14, 1 << 20
"""What a host may send before the first of it was passed on; the rest waits on the host."""
MOST_AT_ONCE, BYTES_AT_ONCE = 1000, 1 << 20
"""Arrivals in one write, and their bytes: with a late process, pieces are long."""


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


@dataclass(frozen=True)
class _Ended:
    """A process has ended. `fault`: what it reported, None: it was killed."""

    process: subprocess.Popen[bytes]
    fault: str | None


_Arrival = Union[_Piece, _Lines, _Finished, _Ended, None]
"""None: the ingest is over."""


class SampleIngest:
    """One for each controller; `start` before use, `close` at the end. `alone(source, bool)`: whether rank 0 has no
    connection to another rank, at each change. `separate(source, world size)` is called in a thread of this class when
    processes of a host first train without the other hosts of their job; None: not reported."""

    def __init__(
        self,
        state_dir: Path,
        *,
        separate: Callable[[Source, int], None] | None = None,
        alone: Callable[[Source, bool], None] | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._separate, self._alone = separate, alone
        # No lock: a thousand connections' threads, the controller's and this one would wait for each other.
        self._arrived: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._received: dict[str, Places] = {}
        self._passed: dict[str, tuple[int, int]] = {}
        """(generation, end) of the last piece of a source that was passed on; written by the thread."""
        self._windows: dict[str, int] = {}
        self.resets = 0
        """Increases when offsets went back: what waits on a host is followed again, without bytes that do not fit."""
        self._known: Mapping[str, Mapping[int, int]] = {}
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        # State of the thread
        self._process: subprocess.Popen[bytes] | None = None
        self._last_fault = ""
        self._retry_mono = 0.0

    def start(self) -> None:
        """Read the offsets up to which the files were read before; an unreadable store counts as empty."""
        try:
            with SampleStore.open_for_reading(self._state_dir, busy_s=START_BUSY_S) as store:
                self._known = store.all_progress()
        except AscendrunError as error:
            self._log_fault(f"{error} ({error.hint})" if error.hint else str(error))
        self._thread.start()

    def close(self) -> None:
        """Store the received data; wait a little for that."""
        self._arrived.put(None)
        self._thread.join(CLOSE_S)

    # From any thread; of one source, one at a time

    def offsets(self, source: Source) -> dict[str, int]:
        """Return {generation: bytes that were received}, as the agent's `follow` expects it."""
        return {str(generation): offset for generation, offset in dict(self._places(source.name)).items()}

    def passed(self, source: Source) -> tuple[int, int]:
        """Return (generation, offset) of the first byte that was not passed on."""
        known = self._known.get(source.name, {})
        newest = max(known, default=0)
        return self._passed.get(source.name, (newest, known.get(newest, 0)))

    def window(self, source: Source, hosts: int) -> tuple[int, int, int]:
        """Return what a host may send, as the agent's `follow` expects it: so many bytes beyond (generation, offset).
        `hosts`: those of its job, which all have a window."""
        share = MOST_WAITING_BYTES // max(hosts, len(self._received))
        most = self._windows[source.name] = max(LEAST_WINDOW_BYTES, min(share, WINDOW_BYTES))
        return (most, *self.passed(source))

    def take(self, source: Source, generation: int, offset: int, data: bytes, *, ahead_s: float) -> bool:
        """Take bytes. False: earlier bytes are missing, or there is no room now; follow again from `offsets`."""
        places = self._places(source.name)
        place = places.get(generation, 0)
        if offset > place or not self._has_room(source.name, generation, place, offset + len(data) - place):
            return False
        new = data[place - offset :]
        if new:
            places[generation] = place + len(new)
            places.pop(generation - KNOWN_GENERATIONS, None)
            self._arrived.put(_Piece(source, generation, new, place + len(new), ahead_s, places))
        return True

    def _has_room(self, name: str, generation: int, place: int, more: int) -> bool:
        known = self._known.get(name, {}).get(generation, 0)
        before, end = self._passed.get(name, (generation, known))
        waiting = place - max(known, end if before == generation else 0)
        most = self._windows.get(name) or MOST_WAITING_BYTES / len(self._received)
        return more <= 0 or waiting <= 0 or waiting + more <= most

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
        is_over = False
        while not is_over:
            arrived = self._next()
            is_over = None in arrived
            try:
                self._work(arrived)
            except Exception as error:  # costs samples, never the thread: each request must get a reply; the log has it
                self._give_up(f"{type(error).__name__}: {error}")
        if self._process is not None:
            _end(self._process)

    def _next(self) -> list[_Arrival]:
        """Wait for the first arrival, and return all that are there; [] if it is time to start the process anyway."""
        found: list[_Arrival] = []
        rest_s = RETRY_S if self._last_fault else TEND_S
        with suppress(queue.Empty):
            found.append(get_within(self._arrived, rest_s) if self._process is None else self._arrived.get())
            size = 0
            while len(found) < MOST_AT_ONCE and size < BYTES_AT_ONCE:
                last = found[-1]
                size += len(last.data) if isinstance(last, _Piece) else 0
                found.append(self._arrived.get_nowait())
        return found

    def _work(self, arrived: Sequence[_Arrival]) -> None:
        for one in arrived:
            if isinstance(one, _Lines):
                self._answer(one)
            elif isinstance(one, _Ended) and one.process is self._process:
                self._give_up(one.fault)
        is_needed = any(isinstance(one, (_Piece, _Lines)) for one in arrived)
        is_due = not arrived and (self._last_fault or (self._state_dir / SampleStore.FILE_NAME).exists())
        if is_needed or is_due:
            self._start()
        if self._process is not None:
            with suppress(OSError):  # it has ended, which arrives too
                write_all(_input_of(self._process).fileno(), b"".join(map(self._frame, arrived)))
        for one in arrived:
            if isinstance(one, _Piece) and self._process is not None and self._is_current(one):
                self._passed[one.source.name] = one.generation, one.end
            if isinstance(one, _Finished):
                self._received.pop(one.name, None)
                self._passed.pop(one.name, None)
                self._windows.pop(one.name, None)
                self._known = {other: places for other, places in self._known.items() if other != one.name}

    def _frame(self, arrived: _Arrival) -> bytes:
        if isinstance(arrived, _Piece) and self._is_current(arrived):
            header = {"source": list(vars(arrived.source).values()), "generation": arrived.generation}
            return wire.pack({**header, "end": arrived.end, "ahead_s": arrived.ahead_s}, arrived.data)
        if isinstance(arrived, _Lines):
            with suppress(wire.FrameError):  # larger than any real reply
                return wire.pack({"host": arrived.host, "lines": arrived.lines, "ahead_s": arrived.ahead_s})
        return wire.pack({"finished": arrived.name}) if isinstance(arrived, _Finished) else b""

    def _is_current(self, piece: _Piece) -> bool:
        return self._received.get(piece.source.name) is piece.places

    @staticmethod
    def _answer(asked: _Lines) -> None:
        from ascendrun.head.spool.sample_writer import read_host

        samples = read_host(asked.host, asked.lines, asked.ahead_s).samples
        asked.done(
            Newest(
                devices=tuple(one for one in samples if isinstance(one, DeviceSample)),
                hosts=tuple(one for one in samples if isinstance(one, HostSample)),
            )
        )

    # The process

    def _start(self) -> None:
        """Start the process if there is none, and none failed a moment ago: without it new data is dropped."""
        if self._process is not None or time.monotonic() < self._retry_mono:
            return
        argv = [sys.executable, "-m", "ascendrun.head.spool.sample_writer", str(self._state_dir)]
        self._process = process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        first = parse_object(_output_of(process).readline(), most_bytes=None) or {}
        if "known" not in first:
            self._give_up(first.get("fault"))
            return
        known = {
            source: {int(generation): offset for generation, offset in places.items()}
            for source, places in first["known"].items()
        }
        if self._last_fault or known != self._known:
            self._go_back(known)
        threading.Thread(target=self._listen, args=(process,), name="samples-read", daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what the process reports until it ends."""
        fault = None
        for line in _output_of(process):
            values = parse_object(line, most_bytes=None) or {}  # {}: it was killed while it wrote the line
            if "separate" in values and self._separate is not None:
                self._separate(Source(*values["separate"]), values["world"])
            elif "alone" in values and self._alone is not None:
                self._alone(Source(*values["alone"]), values["is"])
            fault = values.get("fault", fault)
        self._arrived.put(_Ended(process, fault))

    def _give_up(self, fault: str | None) -> None:
        self._retry_mono = time.monotonic() + RETRY_S
        process, self._process = self._process, None
        code = None if process is None else _end(process)
        self._log_fault(fault or f"the process that keeps them ended with code {code}")

    def _go_back(self, known: Mapping[str, Mapping[int, int]]) -> None:
        """Reset offsets to those of the store: dropped data will be requested again."""
        self._known = known
        self._passed.clear()
        self._received.clear()
        self.resets += 1
        if self._last_fault:
            self._last_fault = ""
            _print("samples are kept again")

    def _log_fault(self, fault: str) -> None:
        """Log a repeated fault once; the log's own disk may be full."""
        text = f"no samples are kept for now: {fault}"
        if text != self._last_fault:
            self._last_fault = text
            _print(text)


def _input_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _output_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the input of the process; return its exit code when it has stored what it got."""
    _input_of(process).close()
    return process.wait()


def _print(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
