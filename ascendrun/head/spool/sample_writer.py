"""The process that reads what the nodes' samplers write and keeps it in the sample store: the interpreter of the
controller has the connections.

    standard input    frames of node/wire.py: {source, generation, end, ahead_s} with bytes of a file, {finished: name},
                      {host, lines, ahead_s} of a host without a job
    standard output   JSON lines: {known}: it is ready, with the offsets in the store; {separate, world}, {alone, is};
                      {fault}: why it ends

A batch every GATHER_S: lines -> samples -> store, with the read offsets in the same transaction. It ends with its input
or with the first error of the store: the next process continues from the offsets in the store.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.core.metrics import parse_object
from ascendrun.core.samples import DeviceDetail, RawText, Sample, Source
from ascendrun.head.state.sample_store import KNOWN_GENERATIONS, SampleStore
from ascendrun.head.state.state_dir import StoreDamagedError, set_aside
from ascendrun.health.samples.device_samples import GPUS, TABLE
from ascendrun.health.samples.sample_lines import LineReader
from ascendrun.node import wire
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import write_all

GATHER_S = 0.5
"""Seconds after the first bytes during which further bytes go into the same transaction."""
TEND_S = 30.0
STEP_PAUSE_S = 0.02
"""Seconds between two steps of summing up: arriving samples take precedence."""
MOST_AT_ONCE, BYTES_AT_ONCE = 1000, 1 << 20
"""Frames in one transaction, and about how many bytes of input: what is read of them takes twenty times the memory."""
LINE_BYTES = 4 << 20
"""Longer lines are not from the sampler."""
UNREAD = "sampler"
"""Name in place of the tool for an unreadable line."""
WHY_CHARS = 200
MOST_UNREAD = 100
READ_BYTES = 1 << 18
LOCK_NAME = "samples.lock"

Frame = tuple[dict[str, Any], bytes]
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Batch:
    """What was read for one transaction. `progress`: up to where, by source and generation."""

    samples: list[Sample] = field(default_factory=list)
    raw: list[RawText] = field(default_factory=list)
    details: list[DeviceDetail] = field(default_factory=list)
    progress: dict[tuple[str, int], int] = field(default_factory=dict)

    def read(self, reader: LineReader, line: Mapping[str, Any], ahead_s: float) -> None:
        """Read a line. If the reader fails on it, only this line is lost; it is kept raw."""
        try:
            read = reader.read(line, ahead_s=ahead_s)
        except Exception as error:  # an internal error: the lines around it are not affected
            why = f"reading it failed: {type(error).__name__}: {error}"[:WHY_CHARS]
            self.raw.append(RawText(time.time(), reader.host, UNREAD, json.dumps(line), why))
            return
        self.samples.extend(read.samples)
        self.raw.extend(read.raw)
        self.details.extend(read.details)


def read_host(host: str, lines: Sequence[Any], ahead_s: float) -> Batch:
    """Read the reply of a host without a job: details first, so that the samples of the device tables have them."""
    reader, batch = LineReader(host), Batch()
    unread: dict[tuple[str, str, str], RawText] = {}
    known = sorted(
        (line for line in lines if isinstance(line, dict)), key=lambda line: line.get("tool") in (TABLE, GPUS)
    )
    for _ in range(2):  # the table maps chips to devices; the chips' values are then in its samples
        batch = Batch(details=batch.details)
        for line in known:
            batch.read(reader, line, ahead_s)
        unread.update({(one.tool, one.text, one.why): one for one in batch.raw})
    return Batch(batch.samples, list(unread.values()), batch.details)


class SampleWriter:
    """Reader of the frames. `tell` gets whatever the controller must know."""

    def __init__(self, store: SampleStore, tell: Tell) -> None:
        self._store, self._tell = store, tell
        self._readers: dict[str, LineReader] = {}
        self._tails: dict[tuple[str, int], bytes] = {}
        self._separated: set[str] = set()
        self._are_alone: dict[str, bool] = {}
        self._unread: set[tuple[str, str]] = set()

    def work(self, frames: Sequence[Frame]) -> None:
        """Store what the frames have in one transaction. Raises StoreUnusableError."""
        batch = Batch()
        for header, body in frames:
            if "source" in header:
                self._read(Source(*header["source"]), header, body, batch)
            elif "host" in header:
                read = read_host(header["host"], header["lines"], header["ahead_s"])
                batch.samples.extend(read.samples)
                batch.raw.extend(read.raw)
                batch.details.extend(read.details)
        if batch.samples or batch.raw or batch.progress:
            failpoint("samples.before_add")
            self._store.add(batch.samples, raw=batch.raw, details=batch.details, progress=batch.progress)
            failpoint("samples.after_add")
        for one in batch.raw:
            if one.tool == UNREAD:
                self._log_unread(one.host, one.why)
        for header, _ in frames:
            if "finished" in header:
                self._forget(header["finished"])

    def _read(self, source: Source, header: Mapping[str, Any], data: bytes, batch: Batch) -> None:
        generation = header["generation"]
        key = source.name, generation
        whole, separator, tail = (self._tails.pop(key, b"") + data).rpartition(b"\n")
        if len(tail) > LINE_BYTES:
            tail = b""
        self._tails[key] = tail
        self._tails.pop((source.name, generation - KNOWN_GENERATIONS), None)
        batch.progress[key] = header["end"] - len(tail)
        if source.name not in self._readers:
            self._readers[source.name] = LineReader(
                source.host, job=source.job, attempt=source.attempt, every_s=source.every_s
            )
        for line in whole.split(b"\n") if separator else ():
            values = parse_object(line, most_bytes=None) or {}
            batch.read(self._readers[source.name], values, header["ahead_s"])
            self._note(source, values)

    def _note(self, source: Source, values: Mapping[str, Any]) -> None:
        """Report at once which processes train without the others: the hosts' jobs are stopped for that."""
        world, alone, named = values.get("own_world"), values.get("is_alone"), list(vars(source).values())
        is_world = isinstance(world, int) and 0 < world < 10**7  # the job can write the file
        if is_world and source.tag not in self._separated:
            self._separated.add(source.tag)
            self._tell({"separate": named, "world": world})
        if isinstance(alone, bool) and self._are_alone.get(source.tag) is not alone:
            self._are_alone[source.tag] = alone
            self._tell({"alone": named, "is": alone})

    def _forget(self, name: str) -> None:
        self._readers.pop(name, None)
        for key in [key for key in self._tails if key[0] == name]:
            del self._tails[key]
        self._store.forget_progress(name)

    def _log_unread(self, host: str, why: str) -> None:
        """Log once for each host and fault: a line arrives every few seconds."""
        if (host, why) not in self._unread and len(self._unread) < MOST_UNREAD:
            self._unread.add((host, why))
            with suppress(OSError):
                text = f"a line of the samples of {host} could not be read and is kept as it came: {why}"
                print(text, file=sys.stderr, flush=True)


def _gather(fd: int, reader: wire.FrameReader, until_mono: float) -> tuple[list[Frame], bool]:
    """Return what arrives until then, or soon after the first of it; True: the input has ended."""
    found: list[Frame] = []
    size = 0
    while len(found) < MOST_AT_ONCE and size < BYTES_AT_ONCE:
        if not select.select([fd], [], [], max(0.0, until_mono - time.monotonic()))[0]:
            break
        data = os.read(fd, READ_BYTES)
        if not data:
            return found, True
        found += reader.feed(data)
        size += len(data)
        until_mono = min(until_mono, time.monotonic() + GATHER_S)
        if time.monotonic() >= until_mono:
            break
    return found, False


@contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Wait for the process of a controller that was killed, which still writes what it got. The lock has a file of its
    own: on NFS, locks of whole files are SQLite's too. Raises StoreUnusableError."""
    until_mono = time.monotonic() + SampleStore.BUSY_S
    path = state_dir / LOCK_NAME
    with ExitStack() as stack:
        with SampleStore.raising_unusable(path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            while not _try_lock(lock, until_mono):
                time.sleep(STEP_PAUSE_S)
        yield


def _try_lock(fd: int, until_mono: float) -> bool:
    """Raises BlockingIOError after `until_mono`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if time.monotonic() > until_mono:
            raise
        return False
    return True


def run(state_dir: Path, tell: Tell, *, fd: int) -> None:
    """Write until the input ends. Raises StoreUnusableError."""
    with _alone(state_dir), SampleStore.open(state_dir) as store:
        writer, reader = SampleWriter(store, tell), wire.FrameReader()
        tell({"known": store.all_progress()})
        tend_mono, is_over = time.monotonic() + TEND_S, False
        while not is_over:
            frames, is_over = _gather(fd, reader, tend_mono)
            try:
                writer.work(frames)
            except (ArithmeticError, LookupError, TypeError, ValueError):  # such a batch would fail again
                traceback.print_exc()
            if time.monotonic() >= tend_mono:
                tend_mono = time.monotonic() + (STEP_PAUSE_S if store.tend(now_s=time.time()) else TEND_S)


def main(state_dir: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or an init system: it ends with its input
        signal.signal(number, signal.SIG_IGN)
    out = os.dup(1)
    os.dup2(2, 1)

    def tell(values: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the controller is gone, and the input ends
            write_all(out, json.dumps(values).encode() + b"\n")

    try:
        run(Path(state_dir), tell, fd=0)
    except AscendrunError as error:
        if isinstance(error, StoreDamagedError):
            with suppress(OSError):
                set_aside(Path(state_dir) / SampleStore.FILE_NAME)
        tell({"fault": f"{error} ({error.hint})" if error.hint else str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
