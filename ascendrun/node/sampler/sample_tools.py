"""Tools of a sampler, each run at its own interval, without waiting for any of them.

A tool that exceeds its time limit is killed; if it survives that (it hangs in a driver), it is not started again until
it has ended. A failing tool is run at increasing intervals.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from ascendrun.node.files import read_some

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import IO, Any, Callable, Mapping, Sequence

MAX_BYTES = 1 << 20
RAREST_S = 300.0
ENDING_S = 0.2
"""Seconds. A child of a tool may hold its pipe open; this long after the tool's end reading stops."""
ALONE_S = 3.0
"""Seconds that a tool runs alone, since no document permits running tools in parallel; then the others start."""


class Tool:
    """One item {name, argv, every_s, timeout_s}."""

    def __init__(self, item: dict[str, Any], now_s: float) -> None:
        self.name = str(item["name"])
        self.argv = [str(word) for word in item["argv"]]
        self.every_s = max(0.1, float(item["every_s"]))
        self.timeout_s = float(item["timeout_s"])
        self.due_s = now_s
        self.failures = 0
        self.child: subprocess.Popen[bytes] | None = None
        self.pipe: IO[bytes] | None = None  # its output, until that has ended
        self.out = bytearray()
        self.is_cut = False
        self.started_s = 0.0
        self.started_ns = 0
        self.ended_s: float | None = None
        self.is_killed = False

    @property
    def runs(self) -> bool:
        """Whether it was started and its result is pending."""
        return self.child is not None and not self.is_killed

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


class Tools:
    """Use from one thread. `emit(line)` gets the result of a tool, as the line to be written."""

    def __init__(
        self,
        items: Sequence[dict[str, Any]],
        *,
        env: Mapping[bytes, bytes],
        emit: Callable[[dict[str, Any], bytes], None],
    ) -> None:
        now_s = time.monotonic()
        self._tools = [Tool(item, now_s) for item in items]
        self._env = dict(env)
        self._emit = emit

    def fds(self) -> list[int]:
        """Return the descriptors to wait for."""
        return [tool.pipe.fileno() for tool in self._tools if tool.runs and tool.pipe is not None]

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until `turn` has work at the latest."""
        until = now_s + 1.0
        for tool in self._tools:
            if tool.child is None:
                until = min(until, max(tool.due_s, self._free_s()))
        for tool in self._tools:
            if tool.runs:
                until = min(
                    until, now_s + 0.02 if tool.ended_s or tool.pipe is None else tool.started_s + tool.timeout_s
                )
        return max(0.0, until - now_s)

    def turn(self, now_s: float) -> None:
        """Read output, handle ended and late tools, start due tools."""
        for tool in self._tools:
            if tool.child is not None:
                self._poll(tool, tool.child, now_s)
        for tool in sorted(self._tools, key=lambda tool: tool.every_s):  # frequent tools first
            if tool.child is None and tool.due_s <= now_s and self._free_s() <= now_s:
                self._start(tool, now_s)

    def end(self) -> None:
        """Kill all running tools."""
        for tool in self._tools:
            if tool.child is not None:
                _kill(tool.child)

    def _free_s(self) -> float:
        """Return the time from which the next tool may be started."""
        return max([0.0] + [tool.started_s + ALONE_S for tool in self._tools if tool.runs])

    def _start(self, tool: Tool, now_s: float) -> None:
        import subprocess  # a host without devices has no tools

        tool.due_s = max(tool.due_s + tool.every_s, now_s)
        tool.out, tool.is_cut, tool.is_killed, tool.ended_s = bytearray(), False, False, None
        tool.started_s, tool.started_ns = now_s, time.time_ns()
        # Through a system shell: if the tool's own file hangs, the shell hangs and not this process.
        argv = tool.argv if tool.argv[0] == "sh" else ["sh", "-c", 'exec "$@"', "sh"] + tool.argv
        try:
            tool.child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._report(tool, now_s, code=None, text=str(error).encode("utf-8"))
            return
        tool.pipe = tool.child.stdout
        assert tool.pipe is not None
        os.set_blocking(tool.pipe.fileno(), False)

    def _poll(self, tool: Tool, child: subprocess.Popen[bytes], now_s: float) -> None:
        if tool.is_killed:
            if child.poll() is not None:
                tool.child = None
            return
        self._read(tool)
        code = child.poll()
        is_late = now_s - tool.started_s >= tool.timeout_s
        if code is None and (is_late or tool.is_cut):
            _kill(child)
            tool.is_killed = True
            tool.close()
            self._report(tool, now_s, code=None, timed_out=is_late)
        elif code is not None:
            tool.ended_s = tool.ended_s or now_s
            if tool.pipe is None or now_s - tool.ended_s >= ENDING_S:
                tool.close()
                tool.child = None
                self._report(tool, now_s, code=code)

    def _read(self, tool: Tool) -> None:
        while tool.pipe is not None:
            chunk = read_some(tool.pipe.fileno(), 1 << 16)
            if chunk == b"":
                tool.close()
            if not chunk:
                return
            room = MAX_BYTES - len(tool.out)
            tool.out += chunk[:room]
            tool.is_cut = tool.is_cut or len(chunk) > room
            if tool.is_cut:
                return  # unlimited output: the tool is ended

    def _report(
        self, tool: Tool, now_s: float, *, code: int | None, text: bytes = b"", timed_out: bool = False
    ) -> None:
        tool.due_s = max(tool.due_s, now_s + min(tool.every_s, now_s - tool.started_s))  # pause for its run time
        tool.failures = 0 if code == 0 else tool.failures + 1
        if tool.failures:
            pause_s = min(tool.every_s * 2 ** min(tool.failures - 1, 10), max(RAREST_S, tool.every_s))
            tool.due_s = max(tool.due_s, now_s + pause_s)
        line = {"at_ns": tool.started_ns, "tool": tool.name, "code": code, "wall_s": round(now_s - tool.started_s, 3)}
        if timed_out:
            line["timed_out"] = True
        if tool.is_cut:
            line["truncated"] = True
        self._emit(line, text or bytes(tool.out))


def wait(fds: Sequence[int], timeout_s: float) -> list[int]:
    """Return the descriptors with data."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(int(timeout_s * 1000) + 1)]


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
