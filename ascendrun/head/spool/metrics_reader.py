"""Metrics files of ranks in an attempt's spool: complete, or as they grow."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascendrun.core.metrics import LINE_LIMIT_BYTES, MetricsLine, parse_line, parse_object, read_values
from ascendrun.head.spool.clocks import HostClock, read_clocks
from ascendrun.head.spool.spool_files import STREAM_FILE, find_files, read_at, size_of

LINES = 150_000
"""Step lines of one attempt that are read; of more lines, every second, third … line."""
LINE_BYTES = 120
"""Bytes, less than a usual line."""

METRICS_FILE = re.compile(r"^rank-(\d+)\.metrics\.(\d+)$")
CHUNK_BYTES = 1024 * 1024
TAIL_BYTES = 256 * 1024
"""Bytes that a `MetricsTail` reads of one rank at a time: older data is of no use to its readers."""


def newest_progress(attempt_dir: Path, *, host: str | None, pattern: str | None = None) -> Mapping[str, Any] | None:
    """Return the newest values of rank 0 from its metrics, or else from what ranks printed; None: no step yet.

    `host`: the host that it runs on, None: any. `pattern`: of the job's progress, None: the known ones.
    """
    values = newest_values(attempt_dir, 0, host=host)
    if values is not None or _has_metrics(attempt_dir):
        return values
    from ascendrun.head.spool.output_progress import newest_of_outputs

    return newest_of_outputs(attempt_dir, pattern=pattern)


def find_progress(attempt_dir: Path, *, ranks: Collection[int] | None = None) -> dict[int, tuple[Path, ...]]:
    """Return the files of each rank that have its progress, for `iter_lines`: metrics, or else the output of the first
    and the last rank if no rank wrote metrics."""
    if _has_metrics(attempt_dir):
        return find_metrics(attempt_dir, ranks=ranks)
    from ascendrun.head.spool.output_progress import find_outputs

    outputs = find_outputs(attempt_dir)
    return {rank: paths for rank, paths in outputs.items() if ranks is None or rank in ranks}


def _has_metrics(attempt_dir: Path) -> bool:
    return any(size_of(path) for paths in find_metrics(attempt_dir).values() for path in paths)


def newest_values(attempt_dir: Path, rank: int, *, host: str | None) -> Mapping[str, Any] | None:
    """Return the last complete line of a step that a rank wrote on `host`, with all its keys; None: none yet.

    With `total_steps` from the line of the start, if only that has it, and `phase`: the last one that began after that
    step and has not ended. Before the first step there may be a `phase` only.
    """
    paths = find_metrics(attempt_dir, ranks=(rank,), host=host).get(rank, ())
    ended: set[Any] = set()
    phase: dict[str, Any] = {}
    for path in reversed(paths):
        for line in reversed(list(_raw_lines(path, last_bytes=LINE_LIMIT_BYTES, whole=True))):
            values = parse_object(line)
            if values is None or values.get("done"):
                continue
            if "event" in values:  # these have no progress
                name = values.get("phase") if values["event"] == "phase" else None
                if isinstance(name, str) and not phase and name not in ended:
                    phase = {"phase": name} if values.get("state") == "begin" else {}
                    ended |= set() if phase else {name}
                continue
            known = {} if "total_steps" in values else _total_steps(paths[0])
            return {**known, **values, **phase}
    return phase or None


def _total_steps(path: Path) -> dict[str, Any]:
    for line in read_at(path, 0, LINE_LIMIT_BYTES).split(b"\n"):
        values = parse_object(line) or {}
        if values.get("event") == "start":
            return {"total_steps": values["total_steps"]} if values.get("total_steps") is not None else {}
        if values.get("event") != "phase":
            break
    return {}


def find_metrics(
    attempt_dir: Path, *, ranks: Collection[int] | None = None, host: str | None = None
) -> dict[int, tuple[Path, ...]]:
    """Return the metrics files of each rank, the oldest generation first, of one host or of all. {}: nothing arrived
    yet."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for path, match in find_files(attempt_dir, METRICS_FILE, None if host is None else (host,)):
        rank, generation = map(int, match.groups())
        if ranks is None or rank in ranks:
            found.setdefault(rank, []).append((generation, path))
    return {rank: tuple(path for _, path in sorted(files)) for rank, files in sorted(found.items())}


def iter_lines(
    paths: Collection[Path], *, last_bytes: int | None = None, every: int = 1, pattern: str | None = None
) -> Iterator[MetricsLine]:
    """Yield the lines of one rank's files, in order. `last_bytes`: only lines in this many newest bytes.

    `pattern`: of the job's progress, for files of output.

    `every`: read only every n-th line of plain steps; those with an event, an evaluation or a value that is not a
    number are all read, since they cannot be interpolated from their neighbours.
    """
    plain = itertools.count(1)
    if any(STREAM_FILE.match(path.name) for path in paths):
        from ascendrun.head.spool.output_progress import read_rows

        for row in read_rows(tuple(paths), pattern=pattern, last_bytes=last_bytes):
            is_plain = every > 1 and "loss" not in row and not any(name.startswith("eval_") for name in row)
            if not is_plain or next(plain) % every == 0:
                yield read_values(row)
        return
    rest = last_bytes
    taken: list[tuple[Path, int | None]] = []
    for path in reversed(list(paths)):
        if rest is not None and rest <= 0:
            break
        taken.append((path, rest))
        rest = None if rest is None else rest - size_of(path)
    for path, last in reversed(taken):
        for raw in _raw_lines(path, last_bytes=last):
            is_plain = every > 1 and not any(mark in raw for mark in _ALWAYS)
            line = parse_line(raw) if not is_plain or next(plain) % every == 0 else None
            if line is not None:
                yield line


_ALWAYS = (b'"event"', b'"eval_', b'"checkpoint"', b"NaN", b"Infinity", b'"nan', b'"inf')


class MetricsTail:
    """New metrics lines of the ranks of one attempt. Keeps an offset for each rank, no open file."""

    def __init__(self, attempt_dir: Path, *, ranks: Collection[int] | None = None) -> None:
        self._attempt_dir = attempt_dir
        self._ranks = ranks
        self._read: dict[Path, int] = {}

    def new_lines(self) -> Iterator[tuple[int, tuple[MetricsLine, ...]]]:
        """Yield (rank, complete lines since the last call); ranks without any are missing. One rank at a time: the
        lines of thousands would take a hundred times their bytes.

        Of a rank that wrote more than TAIL_BYTES meanwhile (or before the first call) only the newest are returned.
        """
        for rank, paths in find_metrics(self._attempt_dir, ranks=self._ranks).items():
            lines = tuple(line for path in paths for line in self._new_of(path))
            if lines:
                yield rank, lines

    def _new_of(self, path: Path) -> list[MetricsLine]:
        begin, size = self._read.get(path, 0), size_of(path)
        if size <= begin:
            return []
        start = max(begin, size - TAIL_BYTES)
        data = read_at(path, start, size - start)
        if start > begin:  # in the middle of a line
            cut = data.find(b"\n") + 1
            start, data = start + cut, data[cut:]
        end = data.rfind(b"\n") + 1
        self._read[path] = max(begin, start + end)
        parsed = [parse_line(raw) for raw in data[:end].split(b"\n") if raw]
        return [line for line in parsed if line is not None]


def _raw_lines(path: Path, *, last_bytes: int | None, whole: bool = False) -> Iterator[bytes]:
    """Yield the lines of a file; the first is skipped if truncated. `whole`: the last only with its newline."""
    size = size_of(path)
    offset = 0 if last_bytes is None else max(0, size - last_bytes)
    is_cut, rest = offset > 0, b""
    while offset < size:
        data = read_at(path, offset, min(CHUNK_BYTES, size - offset))
        if not data:
            break
        offset += len(data)
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[: LINE_LIMIT_BYTES + 1]  # enough to know that it is too long
        if is_cut and lines:
            lines, is_cut = lines[1:], False
        yield from lines
    if rest and not whole and not is_cut:
        yield rest


def read_first_rank(
    attempt_dir: Path, *, most: int = LINES, pattern: str | None = None
) -> tuple[tuple[MetricsLine, ...], int]:
    """Return (lines of the first rank that wrote or printed any, in the head node's time; n if every n-th step line was
    read). `pattern`: of the job's progress."""
    files = find_progress(attempt_dir)
    for rank in sorted(files):
        size = sum(path.stat().st_size for path in files[rank])
        if not size:
            continue
        every = 1 + size // (most * LINE_BYTES)
        clock = read_clocks(attempt_dir).get(files[rank][0].parent.name, HostClock())
        lines = tuple(iter_lines(files[rank], every=every, pattern=pattern))
        if lines:
            return tuple(
                line if line.at_s is None else replace(line, at_s=clock.to_head_s(line.at_s)) for line in lines
            ), every
    return (), 1
