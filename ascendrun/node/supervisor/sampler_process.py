"""The sampler process of a supervisor: started after the ranks, gone before the attempt has ended.

It has the attempt's tag, so that it is found after a supervisor was killed, and a separate mark, so that it never
counts as a remaining process of a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time

from ascendrun.node import layout, procs, reap
from ascendrun.node.files import read_some

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

PRIORITY = 10
"""nice value: the ranks have priority."""
GONE_S = 1.0
"""Seconds that the end of an attempt waits for it; a tool that hangs in a driver outlives that."""


class SamplerProcess:
    """The sampler process. Its errors never affect the attempt."""

    def __init__(self, tag: str, folder: str) -> None:
        self._tag = tag
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def is_on(self) -> bool:
        return self._child is not None

    def start(self, prepared: dict[str, Any]) -> None:
        """Start it, unless sampling is off for the attempt."""
        if not prepared.get("sampling"):
            return
        env = dict(os.environb)
        env.update(
            {
                layout.TAG_VARIABLE.encode(): self._tag.encode(),
                layout.SAMPLER_VARIABLE.encode(): b"1",
                layout.ROOT_VARIABLE.encode(): os.fsencode(layout.root_of(self._folder)),
            }
        )
        argv = [
            sys.executable or os.readlink("/proc/self/exe"),
            "-I",
            "-S",
            os.path.abspath(sys.argv[0]),
            "sample",
            self._folder,
        ]
        try:
            # Low priority from the first instruction: a starting interpreter must not slow down the starting ranks.
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if any(map(layout.forks_ranks, prepared["ranks"])) else subprocess.DEVNULL,
                env=env,
                cwd="/",
                start_new_session=True,
                preexec_fn=lambda: os.nice(PRIORITY),
            )
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"no samples of {self._tag}: {error}\n")
            return
        if self.fd is not None:
            os.set_blocking(self.fd, False)

    @property
    def fd(self) -> int | None:
        """Descriptor with data when there are `found_ranks`; None: there will be none."""
        return None if self._child is None or self._child.stdout is None else self._child.stdout.fileno()

    def found_ranks(self) -> list[dict[str, Any]] | None:
        """Return the ranks that it found, {rank, pid, start}, as far as they have arrived; None: no more come."""
        chunk = b"" if self.fd is None else read_some(self.fd)
        *lines, self._unread = (self._unread + (chunk or b"")).split(b"\n")
        return [json.loads(line.decode("ascii")) for line in lines] if lines or chunk != b"" else None

    def end(self) -> None:
        """Kill it and its tools; nothing needs saving, each of its lines is complete."""
        if self._child is None:
            return
        deadline = time.monotonic() + GONE_S
        found = self._find()
        while found and time.monotonic() < deadline:
            for pid, start in found:
                procs.send_signal(pid, start, 9)
            self._child.poll()
            select.select([], [], [], 0.01)  # time.sleep fails where a test shifts this host's clock
            found = self._find()

    def _find(self) -> Any:
        return reap.find_marked({**reap.marks_of(self._tag, layout.root_of(self._folder)), **reap.SAMPLER})


MOST_RANKS = 1024
"""Of one node; the script can set any numbers."""
_START_FIELD, _STATUS_FIELD = 19, 49
"""Places of starttime and exit_code behind the name in /proc/PID/stat (proc(5): fields 22 and 52). The exit code is
readable for processes of the same user."""


class ForkedRanks:
    """Starts and exits of the ranks that a script starts itself, which are children of another process.

    Where the kernel has pidfds (5.3, Python 3.9) an exit is seen before the parent can have fetched it, nearly always:
    then /proc still has the exit status. Otherwise the exit is recorded without one.

    Use from one thread. `emit` takes records: (event, {rank, pid}) and (event, {rank, code, signal}). `poll` gets
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
        with contextlib.suppress(AttributeError, OSError):
            fd = int(os.pidfd_open(pid))  # type: ignore[attr-defined, unused-ignore]
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
