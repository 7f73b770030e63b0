"""One command until its end or deadline: no shell, own session, bounded output, no process left after a timeout."""

from __future__ import annotations

import collections
import os
import select
import subprocess
import sys
import threading
import time

from ascendrun.node import procs, reap
from ascendrun.node.ranks import spawn, to_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping, NamedTuple, Sequence

    class Done(NamedTuple):
        """How a command ended. `code` and `signal` both None: not even SIGKILL ended it (it hangs in a driver)."""

        code: int | None
        signal: int | None
        timed_out: bool
        truncated: bool
        wall_s: float
        out: bytes
        err: bytes
else:
    Done = collections.namedtuple("Done", "code signal timed_out truncated wall_s out err")

MARK = "ASCENDRUN_EXEC"
MAX_BYTES = 3 << 20
UNKILLABLE_S = 2.0
"""Seconds until a killed command must be gone; a command that hangs in a driver never is."""
DRAIN_S = 0.2
"""A background child may hold the pipes open; output within this time after the command's own end still counts."""


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
        fields = {
            "code": done.code,
            "signal": done.signal,
            "timed_out": done.timed_out,
            "out_bytes": len(done.out),
            "err_bytes": len(done.err),
            "truncated": done.truncated,
            "wall_s": done.wall_s,
        }
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
        child = spawn(argv, env=marked, cwd=cwd, stdin=subprocess.PIPE, pass_fds=keep, **self._umask_option())
        with self._lock:
            self._running.add(mark)
            is_closed = self._is_closed
        if is_closed:  # started while the others were ended
            end_marked(mark)
        try:
            output = _collect_output(child, stdin, deadline=started + timeout_s, limit=limit)
            if output.timed_out:
                end_marked(mark)
            code = _status_of(child, is_killed=output.timed_out)
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

    def _umask_option(self) -> dict[str, Any]:
        # Python code between fork and exec is risky in a process with threads; before 3.9 there is no other way.
        if sys.hexversion >= 0x03090000:
            return {"umask": self._umask}
        return {"preexec_fn": lambda: os.umask(self._umask)}


def _status_of(child: subprocess.Popen[bytes], *, is_killed: bool) -> int | None:
    try:
        return child.wait(UNKILLABLE_S if is_killed else None)
    except subprocess.TimeoutExpired:
        return None


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
    def __init__(self) -> None:
        self.out = bytearray()
        self.err = bytearray()
        self.truncated = False
        self.timed_out = False

    def take(self, sink: bytearray, chunk: bytes, limit: int) -> None:
        room = max(0, limit - len(self.out) - len(self.err))
        sink += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room


def _collect_output(child: subprocess.Popen[bytes], stdin: bytes, *, deadline: float, limit: int) -> _Output:
    """Write and read until the command has ended and its pipes have no data, or the deadline."""
    result = _Output()
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    sinks = {child.stdout.fileno(): result.out, child.stderr.fileno(): result.err}
    feed: list[int] = []
    if stdin:
        os.set_blocking(child.stdin.fileno(), False)
        feed = [child.stdin.fileno()]
    else:
        child.stdin.close()
    left = memoryview(stdin)
    ended_s = None
    try:
        while sinks or child.poll() is None:
            now = time.monotonic()
            if now >= deadline and child.poll() is None:
                result.timed_out = True
                break
            if child.poll() is not None:
                ended_s = ended_s or now
                if now - ended_s > DRAIN_S:
                    break
            wait_s = 0.02 if ended_s or not sinks else min(0.05, deadline - now)
            readable, writable, _ = select.select(list(sinks), feed, [], max(0.0, wait_s))
            for fd in readable:
                chunk = os.read(fd, 1 << 16)
                if chunk:
                    result.take(sinks[fd], chunk, limit)
                else:
                    del sinks[fd]
            if writable:
                left, feed = _feed(child, left, feed)
    finally:
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()
    return result


def _feed(child: subprocess.Popen[bytes], left: memoryview, feed: list[int]) -> tuple[memoryview, list[int]]:
    assert child.stdin is not None
    try:
        left = left[os.write(feed[0], left[: 1 << 16]) :]
    except BlockingIOError:
        return left, feed
    except BrokenPipeError:
        left = left[:0]
    if left:
        return left, feed
    child.stdin.close()
    return left, []
