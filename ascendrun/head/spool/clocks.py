"""Offset of each host's clock from the head's: measured by round trips, stored per attempt, subtracted when read."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Optional

from ascendrun.core.dataclass import dataclass
from ascendrun.head.spool.spool_files import hosts_in
from ascendrun.head.state.state_dir import open_to_append

CLOCK_FILE = "clock"
"""File in a host's directory of an attempt's spool: JSON lines {at_s, offset_s, error_s}."""

MEASURE_EVERY_S = 60.0
ROUND_TRIPS = 3
"""Round trips of a measurement; the shortest counts, since it has waited least."""
PING_DEADLINE_S = 10.0
DRIFT = 2e-4
"""Maximum drift of a clock that is not set, in seconds per second; usual is 1e-5."""


@dataclass(frozen=True)
class Reading:
    """One measurement. `at_s`: the head's clock; `offset_s`: the host's clock minus the head's, within `error_s`."""

    at_s: float
    offset_s: float
    error_s: float

    def error_at(self, at_s: float) -> float:
        """Return the error of this reading at another time."""
        return self.error_s + DRIFT * abs(at_s - self.at_s)

    def contradicts(self, other: Reading) -> bool:
        """Return True if both can be correct only if a clock was set in between."""
        return abs(self.offset_s - other.offset_s) > self.error_s + other.error_at(self.at_s)


def make_reading(sent_s: float, received_s: float, node_s: float) -> Reading:
    """Make a reading of one round trip: the head's clock at request and reply, the host's at its reply."""
    middle_s = (sent_s + received_s) / 2
    return Reading(middle_s, offset_s=node_s - middle_s, error_s=max(0.0, received_s - sent_s) / 2)


@dataclass(frozen=True)
class _Span:
    """Readings between two settings of the clock, as knots: `offsets[i]` applies at the host's time `nodes[i]`."""

    nodes: tuple[float, ...]
    offsets: tuple[float, ...]

    def line_at(self, right: int) -> tuple[float, float, float]:
        """Return (time, offset then, change for each second) before knot `right`; constant outside the knots."""
        nodes, offsets = self.nodes, self.offsets
        left = max(0, right - 1)
        if right in (0, len(nodes)):
            return nodes[left], offsets[left], 0.0
        return nodes[left], offsets[left], (offsets[right] - offsets[left]) / (nodes[right] - nodes[left])

    def offset_at(self, node_s: float) -> float:
        start_s, offset_s, slope = self.line_at(bisect_left(self.nodes, node_s))
        return offset_s + (node_s - start_s) * slope

    def all_to_head_s(self, nodes_s: Sequence[float]) -> list[float] | None:
        """Convert times; None if they are not all between the same two knots."""
        right = bisect_left(self.nodes, min(nodes_s))
        if right != bisect_left(self.nodes, max(nodes_s)):
            return None
        start_s, offset_s, slope = self.line_at(right)
        return [node_s - (offset_s + (node_s - start_s) * slope) for node_s in nodes_s]


class HostClock:
    """Clock of one host over an attempt. Without readings its times count as the head's, and `error_s` is None.

    A slow drift is interpolated between readings. If the clock was set, each time is converted by the readings of its
    side. A time that occurs on both sides (the clock was set back) is converted by the later side.
    """

    def __init__(self, readings: Iterable[Reading] = ()) -> None:
        self.readings = tuple(sorted(readings, key=lambda reading: reading.at_s))
        self._spans = tuple(_make_span(part) for part in _split_where_set(self.readings))

    @property
    def error_s(self) -> float | None:
        """Return the error of the best reading. None: the clock was never measured."""
        return min((reading.error_s for reading in self.readings), default=None)

    @property
    def was_set(self) -> bool:
        """Return True if the host's clock (or the head's) jumped between measurements."""
        return len(self._spans) > 1

    def to_head_s(self, node_s: float) -> float:
        """Convert a time of this host to the head's clock."""
        if not self._spans:
            return node_s
        return node_s - self._span_of(node_s).offset_at(node_s)

    def all_to_head_s(self, nodes_s: Sequence[float]) -> Sequence[float]:
        """Convert many times: nearly always all are between the same two readings."""
        if not self._spans or not nodes_s:
            return nodes_s
        quick = self._spans[0].all_to_head_s(nodes_s) if len(self._spans) == 1 else None
        return [self.to_head_s(node_s) for node_s in nodes_s] if quick is None else quick

    def to_node_s(self, head_s: float) -> float:
        """Convert a time of the head's clock to this host's clock."""
        if not self._spans:
            return head_s
        moments = [reading.at_s for reading in self.readings]
        nearest = self.readings[max(0, bisect_right(moments, head_s) - 1)]
        return head_s + self._span_of(head_s + nearest.offset_s).offset_at(head_s + nearest.offset_s)

    def _span_of(self, node_s: float) -> _Span:
        if len(self._spans) == 1:
            return self._spans[0]

        def distance(span: _Span) -> float:
            return max(span.nodes[0] - node_s, node_s - span.nodes[-1], 0.0)

        return min(reversed(self._spans), key=distance)


def _split_where_set(readings: Sequence[Reading]) -> list[list[Reading]]:
    parts: list[list[Reading]] = []
    for reading in readings:
        if parts and not parts[-1][-1].contradicts(reading):
            parts[-1].append(reading)
        else:
            parts.append([reading])
    return parts


def _make_span(readings: Sequence[Reading]) -> _Span:
    """Make a span. Only readings more precise than their neighbours are knots: slow round trips do not count."""
    kept: list[Reading] = []
    for reading in readings:
        while kept and kept[-1].error_s > reading.error_at(kept[-1].at_s):
            kept.pop()
        if not kept or kept[-1].error_at(reading.at_s) >= reading.error_s:
            kept.append(reading)
    nodes: list[float] = []
    offsets: list[float] = []
    for reading in kept:
        if not nodes or reading.at_s + reading.offset_s > nodes[-1]:
            nodes.append(reading.at_s + reading.offset_s)
            offsets.append(reading.offset_s)
    return _Span(tuple(nodes), tuple(offsets))


# ---------------------------------------------------------------- stored with the attempt


def read_clocks(attempt_dir: Path) -> Mapping[str, HostClock]:
    """Return the clock of every host with a directory in the attempt's spool; torn lines are skipped."""
    return {host: HostClock(_read_readings(attempt_dir / host / CLOCK_FILE)) for host in hosts_in(attempt_dir)}


def _read_readings(path: Path) -> list[Reading]:
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    readings = []
    for line in lines:
        try:
            values = json.loads(line)
            readings.append(Reading(float(values["at_s"]), float(values["offset_s"]), float(values["error_s"])))
        except (ValueError, KeyError, TypeError):
            continue
    return readings


def keep_reading(folder: Path, reading: Reading) -> None:
    """Append to the host's directory of the spool. Raises OSError."""
    line = json.dumps({name: round(value, 6) for name, value in vars(reading).items()}) + "\n"
    fd = open_to_append(folder, CLOCK_FILE)
    try:
        os.write(fd, line.encode("ascii"))
    finally:
        os.close(fd)


MOVED_S = 0.002
"""Change of the offset in seconds above which a clock has moved; less does not justify a line."""
REPEAT_S = 3600.0


def is_informative(reading: Reading, kept: Reading) -> bool:
    """Return whether to store a reading after the last stored one: the clock has moved, is known much better now, or an
    hour has passed. A line every minute for a month would cost readers of a thousand hosts minutes."""
    return (
        abs(reading.offset_s - kept.offset_s) > reading.error_s + kept.error_s + MOVED_S
        or reading.error_s < kept.error_s / 2
        or reading.at_s - kept.at_s >= REPEAT_S
    )


class ClockFiles:
    """Stored readings of one attempt's hosts: those that are informative, each with the one just before it, which shows
    how long the clock was unchanged."""

    def __init__(self) -> None:
        self._kept: dict[Path, Reading] = {}
        self._passed_over: dict[Path, Reading] = {}

    def keep(self, folder: Path, reading: Reading) -> None:
        """Store a reading. `folder`: the host's in the spool. Raises OSError; then the next reading is stored."""
        kept = self._kept.get(folder)
        if kept is not None and not is_informative(reading, kept):
            self._passed_over[folder] = reading
            return
        self._kept.pop(folder, None)
        before = self._passed_over.pop(folder, None)
        if before is not None:
            keep_reading(folder, before)
        keep_reading(folder, reading)
        self._kept[folder] = reading


# ---------------------------------------------------------------- measured

Ping = Callable[[str, Callable[[Optional[int]], None]], None]
"""ping(host, heard): requests the host's time; `heard(at_ns)` runs immediately on its reply, None: no reply."""


class ClockTracker:
    """Measures the hosts of one attempt, in the controller's thread; `keep(host, reading)` gets each result.

    `heard` of a ping runs in any thread: it only stores the time there; the next `tick` continues.
    """

    def __init__(self, ping: Ping, keep: Callable[[str, Reading], None]) -> None:
        self._ping, self._keep = ping, keep
        self._due_mono: dict[str, float] = {}
        self._rounds: dict[str, _Round] = {}

    def measure(self, host: str) -> None:
        """Measure now, unless a measurement is running; then once a minute, as long as `tick` names the host."""
        if host not in self._rounds:
            self._rounds[host] = _Round(self._ping, host)

    def tick(self, hosts_up: Iterable[str]) -> None:
        """Continue measurements; called periodically with the hosts that respond."""
        now = time.monotonic()
        for host, measured in list(self._rounds.items()):
            if measured.is_over:
                del self._rounds[host]
                self._due_mono[host] = now + MEASURE_EVERY_S
                if measured.best is not None:
                    self._keep(host, measured.best)
        for host in hosts_up:
            if self._due_mono.get(host, now + 1.0) <= now:
                self.measure(host)


class _Round:
    """Several pings to one host, one after the other."""

    def __init__(self, ping: Ping, host: str) -> None:
        self._ping, self._host = ping, host
        self._left = ROUND_TRIPS
        self.best: Reading | None = None
        self.is_over = False
        self._request()

    def _request(self) -> None:
        self._left -= 1
        sent_s, sent_mono = time.time(), time.monotonic()
        self._ping(self._host, lambda at_ns: self._take(at_ns, sent_s, sent_mono))

    def _take(self, at_ns: int | None, sent_s: float, sent_mono: float) -> None:
        if at_ns is not None:
            reading = make_reading(sent_s, sent_s + time.monotonic() - sent_mono, at_ns / 1e9)
            if self.best is None or reading.error_s < self.best.error_s:
                self.best = reading
            if self._left:
                self._request()
                return
        self.is_over = True
