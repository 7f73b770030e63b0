"""Ranks that a script starts itself: their starts and exits, of processes that are children of another process.

Where the kernel has pidfds (5.3, Python 3.9) an exit is seen before the parent can have fetched it, nearly always: then
/proc still has the exit status. Otherwise the exit is recorded without one.
"""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

MOST_RANKS = 1024
"""Of one node; the script can set any numbers."""
_START_FIELD, _STATUS_FIELD = 19, 49
"""Places of starttime and exit_code behind the name in /proc/PID/stat (proc(5): fields 22 and 52). The exit code is
readable for processes of the same user."""


class ForkedRanks:
    """Use from one thread. `emit` takes records: (event, {rank, pid}) and (event, {rank, code, signal}). `poll` gets
    descriptors that have data when a rank exits."""

    def __init__(self, emit: Callable[[str, dict[str, Any]], None], poll: select.poll) -> None:
        self._emit = emit
        self._poll = poll
        self._processes: dict[int, tuple[int, int]] = {}  # rank: (pid, start)
        self._fds: dict[int, int] = {}  # pidfd: rank

    def add(self, rank: int, pid: int, start: int) -> None:
        """Note that this process is the rank, as found; one that was the rank before has ended."""
        if rank in self._processes:
            self._look(rank)
        if rank in self._processes or len(self._processes) >= MOST_RANKS or not _state(pid, start)[0]:
            return
        self._processes[rank] = pid, start
        self._emit("forked_rank_started", {"rank": rank, "pid": pid})
        fd = _open_pidfd(pid)
        if fd is not None:
            self._fds[fd] = rank
            self._poll.register(fd, select.POLLIN)

    def handle(self, fd: int) -> bool:
        """Record the rank of this descriptor, if it has exited. False: the descriptor is of something else."""
        rank = self._fds.get(fd)
        if rank is not None:
            self._look(rank)
        return rank is not None

    def check(self) -> None:
        """Record every rank that has exited, also where there are no descriptors."""
        for rank in list(self._processes):
            self._look(rank)

    def _look(self, rank: int) -> None:
        runs, status = _state(*self._processes[rank])
        if runs:
            return
        del self._processes[rank]
        for fd in [fd for fd, of in self._fds.items() if of == rank]:
            self._poll.unregister(fd)
            del self._fds[fd]
            os.close(fd)
        killed = status is not None and os.WIFSIGNALED(status)
        code = None if status is None or killed else os.WEXITSTATUS(status)
        number = os.WTERMSIG(status) if status is not None and killed else None
        self._emit("forked_rank_exited", {"rank": rank, "code": code, "signal": number})


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
