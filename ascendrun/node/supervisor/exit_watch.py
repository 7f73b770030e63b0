"""Detection of a rank that has finished its work and does not exit (gloo's threads can deadlock at the end).

Pure: from observations of the rank to the action.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass

EXIT_S = 10.0
"""Seconds that a rank may live after it wrote that it is done."""
LINGER_S = 60.0
"""Seconds after another rank's end until an inactive rank is reported."""
IDLE_CPU_S = 0.1

FINISHED = "finished"
"""It wrote "done": true into its metrics and still runs: it is killed, and its exit counts as 0."""
IDLE = "idle"
"""Another rank exited 0 and this rank has been inactive since: reported, not killed."""


def is_done_line(line: bytes) -> bool:
    """Whether a line of the metrics file reports that the program has finished."""
    if b'"done"' not in line:
        return False
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("done") is True


class ExitWatch:
    """Exit state of one rank. `exit_s`, `linger_s`: the limits, in seconds."""

    def __init__(self, *, exit_s: float = EXIT_S, linger_s: float = LINGER_S) -> None:
        self._exit_s = exit_s
        self._linger_s = linger_s
        self._done_s: float | None = None
        self._idle_s: float | None = None
        self._idle_cpu_s = 0.0
        self._idle_bytes = 0
        self._last_report: str | None = None

    def see_done(self, now_s: float) -> None:
        if self._done_s is None:
            self._done_s = now_s

    def check(self, now_s: float, *, cpu_s: float, written_bytes: int, other_exited_s: float | None) -> str | None:
        """Return FINISHED or IDLE, each once; None: nothing to report. `other_exited_s`: first exit 0 of another."""
        if self._done_s is not None and now_s - self._done_s >= self._exit_s:
            return self._report(FINISHED)
        if other_exited_s is None:
            return None
        moved = cpu_s - self._idle_cpu_s >= IDLE_CPU_S or written_bytes != self._idle_bytes
        if self._idle_s is None or moved:
            self._idle_s, self._idle_cpu_s, self._idle_bytes = now_s, cpu_s, written_bytes
        if now_s - self._idle_s >= self._linger_s and self._last_report is None:
            return self._report(IDLE)
        return None

    def limit_s(self, why: str) -> float:
        """The seconds after which `check` returns `why`."""
        return self._exit_s if why == FINISHED else self._linger_s

    def _report(self, why: str) -> str | None:
        if self._last_report == why:
            return None
        self._last_report = why
        return why
