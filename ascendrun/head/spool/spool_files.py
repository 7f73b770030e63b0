"""Location of the head's copies of the ranks' output: one stream's files, their bytes, their tail.

A missing or short file is not an error: the collector may be behind. Files are opened for each read, so that thousands
of ranks need no open file each.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from ascendrun.core.dataclass import dataclass
from ascendrun.core.logs.log_lines import process_name, process_number
from ascendrun.head.state.state_dir import SPOOL_COMPLETE
from ascendrun.node.files import names_in

CHUNK_BYTES = 128 * 1024
TIME_RECORD = struct.Struct(">QQ")

STREAM_FILE = re.compile(r"^(?P<process>(?:rank|node)-\d+)\.(?P<stream>out|err)\.(?P<generation>\d+)$")


@dataclass(frozen=True)
class StreamFiles:
    """One stream of one process in one attempt's spool. `host`, `rank`, `stream` as in LogLine."""

    folder: Path
    host: str
    rank: int
    stream: str
    attempt: int

    def path(self, generation: int) -> Path:
        return self.folder / f"{process_name(self.rank)}.{self.stream}.{generation}"

    def times_path(self, generation: int) -> Path:
        return self.folder / f"{process_name(self.rank)}.{self.stream}.times.{generation}"

    def generations(self) -> list[int]:
        """Return the existing generations, oldest first; rotation may have removed the first."""
        prefix = f"{process_name(self.rank)}.{self.stream}."
        names = (name for name in names_in(self.folder) if name.startswith(prefix) and STREAM_FILE.match(name))
        return sorted(int(name[len(prefix) :]) for name in names)


def find_streams(
    attempt_dir: Path,
    attempt: int,
    *,
    hosts: Collection[str] | None = None,
    ranks: Collection[int] | None = None,
    streams: Collection[str] = ("out", "err"),
) -> list[StreamFiles]:
    """Return every stream in an attempt's spool, by rank; hosts or ranks None: all."""
    found: set[tuple[int, str, str]] = set()
    for path, match in find_files(attempt_dir, STREAM_FILE, hosts):
        number, host = process_number(match["process"]), path.parent.name
        if match["stream"] in streams and (ranks is None or number in ranks):
            found.add((number, match["stream"], host))
    return [
        StreamFiles(attempt_dir / host, host, rank, stream, attempt)
        for rank, stream, host in sorted(found, key=lambda stream: (stream[0], stream[1] == "err", stream[2]))
    ]


def find_files(
    attempt_dir: Path, pattern: re.Pattern[str], hosts: Collection[str] | None = None
) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the files in an attempt's spool whose names match; hosts None: of all."""
    for host in hosts_in(attempt_dir) if hosts is None else hosts:
        folder = attempt_dir / host
        for name in names_in(folder):
            match = pattern.match(name)
            if match:
                yield folder / name, match


def is_complete(attempt_dir: Path) -> bool:
    """Return True if the collector has stored every byte of the attempt."""
    return (attempt_dir / SPOOL_COMPLETE).exists()


def hosts_in(attempt_dir: Path) -> list[str]:
    """Return the hosts with a directory in an attempt's spool, sorted; symbolic links do not count."""
    folders = ((name, attempt_dir / name) for name in names_in(attempt_dir))
    return [name for name, folder in folders if folder.is_dir() and not folder.is_symlink()]


def first_time_record(path: Path, offset: int) -> int:
    """Return the byte position in the arrival times of the record that covers the byte at `offset`."""
    return _count_records(path, lambda record: record[0] <= offset) * TIME_RECORD.size


def _count_records(path: Path, is_before: Callable[[tuple[int, int]], bool]) -> int:
    """Return how many records (end of bytes, arrival) precede the first that is not `is_before`, by bisection."""
    low, high = 0, size_of(path) // TIME_RECORD.size
    while low < high:
        middle = (low + high) // 2
        raw = read_at(path, middle * TIME_RECORD.size, TIME_RECORD.size)
        if len(raw) == TIME_RECORD.size and is_before(TIME_RECORD.unpack(raw)):
            low = middle + 1
        else:
            high = middle
    return low


def since_position(files: StreamFiles, node_s: float) -> tuple[int | None, int]:
    """Return (generation, offset) of the first line that arrived at the host's `node_s` or later; (None, 0): the first
    line. Found by bisection of the arrival times, which must not decrease."""
    wanted_ns = int(node_s * 1e9)
    for generation in reversed(files.generations()):
        path = files.times_path(generation)
        first = read_at(path, 0, TIME_RECORD.size)
        if len(first) < TIME_RECORD.size or TIME_RECORD.unpack(first)[1] >= wanted_ns:
            continue
        count = _count_records(path, lambda record: record[1] < wanted_ns)
        end = TIME_RECORD.unpack(read_at(path, (count - 1) * TIME_RECORD.size, TIME_RECORD.size))[0]
        return generation, line_start(files.path(generation), end)
    return None, 0


def line_start(path: Path, offset: int) -> int:
    """Return the start of the line that contains the byte at `offset`; searches back at most a few megabytes."""
    start = offset
    while start > max(0, offset - (4 << 20)):
        start = max(0, start - CHUNK_BYTES)
        newline = read_at(path, start, min(CHUNK_BYTES, offset - start)).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0 if start == 0 else offset


def read_bytes(files: StreamFiles) -> Iterator[bytes]:
    """Yield the stream exactly as the rank wrote it."""
    for generation in files.generations():
        offset = 0
        while True:
            data = read_at(files.path(generation), offset, CHUNK_BYTES)
            if not data:
                break
            offset += len(data)
            yield data


def read_at(path: Path, offset: int, count: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as opened:
            opened.seek(offset)
            return opened.read(count)
    except FileNotFoundError:
        return b""


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail_position(files: StreamFiles, count: int) -> tuple[int | None, int]:
    """Return (generation, offset) of the start of the last `count` lines; (None, 0) if there is nothing."""
    there = files.generations()
    if not there:
        return None, 0
    if count <= 0:
        return there[-1], size_of(files.path(there[-1]))
    wanted = count
    is_last_byte = True
    for generation in reversed(there):
        end = size_of(files.path(generation))
        while end > 0:
            start = max(0, end - CHUNK_BYTES)
            block = read_at(files.path(generation), start, end - start)
            if is_last_byte and block:
                is_last_byte = False
                wanted += block.endswith(b"\n")  # that newline ends the last line, it does not start one
            newlines = block.count(b"\n")
            if newlines >= wanted:
                at = len(block)
                for _ in range(wanted):
                    at = block.rfind(b"\n", 0, at)
                return generation, start + at + 1
            wanted -= newlines
            end = start
    return there[0], 0
