"""Ranks that a script starts itself: their starts and exits, of processes that are children of another process.

Where the kernel has pidfds (5.3, Python 3.9) an exit is seen before the parent can have fetched it, nearly always: then
/proc still has the exit status. Otherwise the exit is recorded without one.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping, Sequence

MOST_RANKS = 1024
"""Of one node; the script can set any numbers."""
_START_FIELD, _STATUS_FIELD = 19, 49
"""Places of starttime and exit_code behind the name in /proc/PID/stat (proc(5): fields 22 and 52). The exit code is
readable for processes of the same user."""


class ForkedRanks:
    """Use from one thread. `emit` takes the records: {event, rank, pid} and {event, rank, code, signal}."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        self._emit = emit
        self._pids: dict[int, tuple[int, int]] = {}  # rank: (pid, start)
        self._fds: dict[int, int] = {}  # pidfd: rank

    def note(self, found: Mapping[int, tuple[int, int]]) -> None:
        """Note the living ranks: {rank: (pid, start time)}; those that are gone have ended."""
        for rank in list(self._pids):
            self._look(rank)
        for rank, process in found.items():
            if rank not in self._pids and len(self._pids) < MOST_RANKS and _state(*process)[0]:
                self._pids[rank] = process
                self._emit({"event": "forked_rank_started", "rank": rank, "pid": process[0]})
                fd = _open_pidfd(process[0])
                if fd is not None:
                    self._fds[fd] = rank

    def fds(self) -> list[int]:
        """Return descriptors that have data when a rank exits."""
        return list(self._fds)

    def reap(self, ready: Sequence[int]) -> None:
        """Record the ranks of these descriptors that have exited."""
        for fd in ready:
            rank = self._fds.get(fd)
            if rank is not None:
                self._look(rank)

    def _look(self, rank: int) -> None:
        runs, status = _state(*self._pids[rank])
        if runs:
            return
        del self._pids[rank]
        for fd in [fd for fd, of in self._fds.items() if of == rank]:
            del self._fds[fd]
            os.close(fd)
        killed = status is not None and os.WIFSIGNALED(status)
        self._emit(
            {
                "event": "forked_rank_exited",
                "rank": rank,
                "code": None if status is None or killed else os.WEXITSTATUS(status),
                "signal": os.WTERMSIG(status) if status is not None and killed else None,
            }
        )


def _open_pidfd(pid: int) -> int | None:
    try:
        return int(os.pidfd_open(pid))  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, OSError):
        return None


def _state(pid: int, start: int) -> tuple[bool, int | None]:
    """Return (whether the process runs, its wait status if its parent has not fetched it yet)."""
    try:
        with open("/proc/%d/stat" % pid, "rb", buffering=0) as file:
            text = file.read(4096) or b""
        fields = text[text.rindex(b")") + 2 :].split()
        if int(fields[_START_FIELD]) != start or fields[0] in b"Xx":
            return False, None
        return (False, int(fields[_STATUS_FIELD])) if fields[0] == b"Z" else (True, None)
    except (OSError, ValueError, IndexError):
        return False, None
