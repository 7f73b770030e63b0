"""Data of each rank in the supervisor: its process, its two streams, its metrics, its end."""

from __future__ import annotations

import os
import time

from ascendrun.node import procs
from ascendrun.node.layout import forks_ranks, process_name, process_number
from ascendrun.node.supervisor import exit_watch
from ascendrun.node.supervisor.spool import Spool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ascendrun.node.ranks import Started

READ_BYTES = 1 << 18
DRAIN_BYTES = 8 << 20
"""Bytes read from a dead rank's pipe before its end is recorded; a grandchild may keep writing."""
DROP_NOTE_S = 10.0
METRICS_STEP_BYTES = 1 << 20


class MetricsTail:
    """Reads new lines of a rank's metrics file and records whether the rank reported its end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def found_done(self, *, last: bool = False) -> bool:
        """Return whether a line read by this call reports it. An incomplete line is kept for the next call.

        `last`: the rank has exited. Read the end of the file, whatever is unread before it.
        """
        try:
            size = os.stat(self._path).st_size
            if size <= self._offset and not last:
                return False
            with open(self._path, "rb") as file:
                if last and size - self._offset > METRICS_STEP_BYTES:
                    self._offset, self._rest = size - METRICS_STEP_BYTES, b""
                file.seek(self._offset)
                new = file.read(METRICS_STEP_BYTES)
        except OSError:
            return False
        self._offset += len(new)
        lines = (self._rest + new).split(b"\n")
        self._rest = lines[-1] if last else lines.pop()[-METRICS_STEP_BYTES:]
        return any(exit_watch.is_done_line(line) for line in lines)


class Rank:
    """One rank, or the launcher of a node's ranks, with a number below 0. `code` and `signal` are None until it has
    ended; `spools` is by stream, "out" and "err"."""

    def __init__(
        self, plan: dict[str, Any], folder: str, *, limit: int, watch: exit_watch.ExitWatch, metrics: str
    ) -> None:
        self.number = int(plan["rank"])
        self.stream_number = process_number(self.number) if forks_ranks(plan) else self.number
        """In the names of its output: what a process that starts ranks prints is not a rank's."""
        self.plan = plan
        self.spools = {
            stream: Spool(folder, "%s.%s" % (process_name(self.stream_number), stream), limit=limit)
            for stream in ("out", "err")
        }
        self.watch = watch
        self.metrics = MetricsTail(metrics)
        self.started: Started | None = None
        self.start_ticks = -1
        self.setup_result = b""
        self.has_ended = False
        self.was_stopped = False
        self.stopped_by_launcher = False
        self.is_done = False
        self.code: int | None = None
        self.signal: int | None = None
        self.killed_as_finished = False
        self._reported_s: float | None = None

    @property
    def is_launcher(self) -> bool:
        return self.number < 0

    @property
    def runs(self) -> bool:
        return self.started is not None and not self.has_ended

    @property
    def result(self) -> int | None:
        """The exit code, a signal as a negative number, or None: never started or end not seen."""
        return self.code if self.signal is None else -self.signal

    def summary(self) -> dict[str, Any]:
        """Return {code, signal, stopped, done}."""
        return {"code": self.code, "signal": self.signal, "stopped": self.was_stopped, "done": self.is_done}

    @property
    def written_bytes(self) -> int:
        return sum(spool.total_bytes for spool in self.spools.values())

    def cpu_s(self) -> float:
        assert self.started is not None
        stat = procs.read_stat(self.started.pid)
        return stat.cpu_ticks / procs.TICKS_PER_S if stat else 0.0

    def check_done(self, *, last: bool = False) -> bool:
        """Return whether the rank's metrics say that its work is complete."""
        self.is_done = self.is_done or self.metrics.found_done(last=last)
        return self.is_done

    def setup_failed(self) -> bool:
        """Return whether the setup (or the search for the command after it) ended the rank, not the command itself."""
        return self.started is not None and self.started.status_fd is not None and self.setup_result != b"o"

    def end(self, status: int) -> None:
        """Record the wait status. A rank killed since it had finished counts as exited with 0."""
        assert self.started is not None
        self.has_ended = True
        if os.WIFSIGNALED(status):
            self.signal = os.WTERMSIG(status)
        else:
            self.code = os.WEXITSTATUS(status)
        self.started.process.returncode = self.result
        if self.killed_as_finished:
            self.code, self.signal = 0, None

    def send(self, signum: int) -> None:
        """Send a signal to the rank's own process only."""
        if self.runs and self.started is not None:
            procs.send_signal(self.started.pid, self.start_ticks, signum)

    def new_holes(self, now_s: float, *, last: bool) -> list[tuple[str, int, int, int]]:
        """Return lost ranges of the logs since the last call: (stream, generation, offset, bytes).

        They are returned at most every DROP_NOTE_S, and by the `last` call.
        """
        if not any(spool.holes for spool in self.spools.values()):
            return []
        if not last and self._reported_s is not None and now_s - self._reported_s < DROP_NOTE_S:
            return []
        self._reported_s = now_s
        found = []
        for stream, spool in self.spools.items():
            holes, spool.holes = spool.holes, []
            found += [(stream, generation, offset, count) for generation, offset, count in holes]
        return found


def read_some(fd: int, limit: int = READ_BYTES) -> bytes | None:
    """Return available bytes: b"" at the end of the stream, None: no data now."""
    try:
        return os.read(fd, limit)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def drain(fd: int, spool: Spool) -> bool:
    """Move available bytes of the pipe to the spool; True when the stream has ended."""
    moved = 0
    while moved < DRAIN_BYTES:
        chunk = read_some(fd)
        if chunk is None:
            return False
        if not chunk:
            return True
        spool.write(chunk, time.time_ns())
        moved += len(chunk)
    return False
