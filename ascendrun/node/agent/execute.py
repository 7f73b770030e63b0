"""Work with an end: commands (no shell, own session, bounded output, no process left after a timeout), and threads."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import subprocess
import sys
import threading
import time

from ascendrun.node import procs, reap
from ascendrun.node.files import to_bytes
from ascendrun.node.ranks import spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping, Sequence

Done = collections.namedtuple("Done", "code signal timed_out truncated wall_s out err")
"""How a command ended. `code` and `signal` both None: not even SIGKILL ended it (it hangs in a driver)."""

MARK = "ASCENDRUN_EXEC"
MAX_BYTES = 3 << 20
UNKILLABLE_S = 2.0
"""Seconds until a killed command must be gone; a command that hangs in a driver never is."""
DRAIN_S = 0.2
"""A background child may hold the pipes open; output within this time after the command's own end still counts."""


def work_off(jobs: Sequence[Callable[[], Any]], *, at_once: int, end: float) -> list[Any]:
    """Run the jobs, which must not raise, in threads; return the result of each, None: it had none at `end`, monotonic.

    A call into a dead file system or name server may hang for ever; what has not begun by then is not begun.
    """
    results: list[Any] = [None] * len(jobs)
    todo = list(reversed(range(len(jobs))))
    lock, done = threading.Lock(), threading.Semaphore(0)

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                number = todo.pop()
            result = jobs[number]()
            with lock:
                results[number] = result
            done.release()

    for _ in range(min(at_once, len(jobs))):
        threading.Thread(target=work, daemon=True, name="work").start()
    for _ in jobs:
        if not done.acquire(timeout=max(0.0, end - time.monotonic())):
            break
    with lock:
        todo.clear()
        return list(results)


class Commands:
    """The running commands, so that all can be ended with the agent."""

    def __init__(self, login: dict[bytes, bytes], umask: int) -> None:
        self._login = login
        self._umask = umask
        self._running: set[str] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def run(self, request: dict[str, Any], stdin: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the reply's fields and its body (standard output, then standard error). Raises
        OperationError("cannot-start")."""
        argv = [to_bytes(part) for part in request["argv"]]
        limit = max(0, min(int(request.get("max_bytes") or MAX_BYTES), MAX_BYTES))
        done = self.carry_out(argv, self._login, stdin, timeout_s=float(request.get("timeout_s") or 60), limit=limit)
        fields = dict(done._asdict(), out_bytes=len(done.out), err_bytes=len(done.err))
        del fields["out"], fields["err"]
        return fields, done.out + done.err

    def carry_out(
        self,
        argv: list[bytes],
        env: Mapping[bytes, bytes],
        stdin: bytes,
        *,
        timeout_s: float,
        limit: int,
        cwd: str | None = None,
        keep: Sequence[int] = (),
    ) -> Done:
        """Run one command to its end or its deadline; `keep`: descriptors that it inherits.

        Raises OperationError("cannot-start"), whose cause is the error of the system.
        """
        started = time.monotonic()
        mark = os.urandom(8).hex()
        marked = dict(env)
        marked[MARK.encode("ascii")] = mark.encode("ascii")
        # Python code between fork and exec is risky in a process with threads; before 3.9 there is no other way.
        is_new = sys.hexversion >= 0x03090000
        umask: dict[str, Any] = {"umask": self._umask} if is_new else {"preexec_fn": lambda: os.umask(self._umask)}
        child = spawn(argv, env=marked, cwd=cwd, stdin=subprocess.PIPE, pass_fds=keep, **umask)
        with self._lock:
            self._running.add(mark)
            is_closed = self._is_closed
        if is_closed:  # started while the others were ended
            end_marked(mark)
        try:
            output = _Output(child, stdin, deadline=started + timeout_s, limit=limit)
            if output.timed_out:
                end_marked(mark)
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(UNKILLABLE_S if output.timed_out else None)
        finally:
            with self._lock:
                self._running.discard(mark)
        return Done(
            code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            timed_out=output.timed_out,
            truncated=output.truncated,
            wall_s=round(time.monotonic() - started, 6),
            out=bytes(output.out),
            err=bytes(output.err),
        )

    def end_all(self) -> None:
        with self._lock:
            self._is_closed = True
            marks = list(self._running)
        for mark in marks:
            end_marked(mark)


def end_marked(mark: str) -> None:
    """Send KILL to the command and everything it started, until no process is left or 2 s have passed."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        found = reap.find_marked({MARK: mark})
        if not found:
            return
        for pid, start in found:
            procs.send_signal(pid, start, 9)
        time.sleep(0.01)


class _Output:
    """Writes to a command and reads until it has ended and its pipes have no data, or the deadline."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: bytes, *, deadline: float, limit: int) -> None:
        self.out, self.err = bytearray(), bytearray()
        self.truncated = self.timed_out = False
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        self._sinks = {child.stdout.fileno(): self.out, child.stderr.fileno(): self.err}
        self._child, self._limit, self._left = child, limit, memoryview(stdin)
        os.set_blocking(child.stdin.fileno(), False)
        if not stdin:
            child.stdin.close()
        try:
            self._collect(deadline)
        finally:
            for pipe in (child.stdin, child.stdout, child.stderr):
                pipe.close()

    def _collect(self, deadline: float) -> None:
        ended_s = None
        while self._sinks or self._child.poll() is None:
            now = time.monotonic()
            if now >= deadline and self._child.poll() is None:
                self.timed_out = True
                return
            if self._child.poll() is not None:
                ended_s = ended_s or now
                if now - ended_s > DRAIN_S:
                    return
            wait_s = 0.02 if ended_s or not self._sinks else min(0.05, deadline - now)
            feed = [self._child.stdin.fileno()] if self._left and self._child.stdin is not None else []
            readable, writable, _ = select.select(list(self._sinks), feed, [], max(0.0, wait_s))
            for fd in readable:
                chunk = os.read(fd, 1 << 16)
                room = max(0, self._limit - len(self.out) - len(self.err))
                self._sinks[fd] += chunk[:room]
                self.truncated = self.truncated or len(chunk) > room
                if not chunk:
                    del self._sinks[fd]
            if writable:
                self._feed()

    def _feed(self) -> None:
        assert self._child.stdin is not None
        try:
            self._left = self._left[os.write(self._child.stdin.fileno(), self._left[: 1 << 16]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left = self._left[:0]
        if not self._left:
            self._child.stdin.close()
