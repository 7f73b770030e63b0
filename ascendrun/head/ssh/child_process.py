"""A command as a child process of this machine, with the same Stream interface as a command on a host."""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Callable

from ascendrun.core.errors import DeadlineExceededError
from ascendrun.head.ssh.transport import CLOSED_HERE, COMMAND_ENDED, Data, Receiver, StreamClosedError, sending
from ascendrun.text import Text

READ_BYTES = 256 * 1024
PIECE_BYTES = 32 * 1024
ASK_TO_END_S = 1.0
"""Seconds until SIGTERM for a child that does not end after its pipes were closed; as many again until SIGKILL."""

_POLL_S = 0.2
"""Interval of checks of a child if the kernel has no pidfd."""


class ChildStream:
    """One child process with three pipes; implements `transport.Stream` after `start` gave it a receiver.

    `describe_end(exit code)`: turns its end into (reason, status); negative codes are signals. Raises OSError.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        describe_end: Callable[[int], tuple[Text, int | None]] | None = None,
    ) -> None:
        self._describe_end = describe_end or describe_plain_end
        self._send_lock = threading.Lock()
        self._closing = threading.Event()
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input_fd: int | None = self._process.stdin.fileno()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._wake_lock = threading.Lock()
        self._wakes: tuple[int, int] | None = os.pipe()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    @property
    def error_fd(self) -> int:
        """Return the descriptor of its standard error, for non-blocking reads until `start`."""
        assert self._process.stderr
        return self._process.stderr.fileno()

    def start(self, receiver: Receiver, *, error_backlog: bytes = b"") -> None:
        """Feed `receiver` from a new thread; `error_backlog`: what was read from `error_fd` before."""
        threading.Thread(
            target=self._run, args=(receiver, error_backlog), name=f"child-{self._process.pid}", daemon=True
        ).start()

    def send(self, data: Data, *, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        view = memoryview(data).cast("B")
        with sending(self._send_lock, deadline_s):
            while view:
                sent = self._write(view[:PIECE_BYTES])
                view = view[sent:]
                left_s = until - time.monotonic()
                if not sent and left_s <= 0:
                    raise DeadlineExceededError.of(
                        "ssh.command-input-timeout",
                        "the command did not accept more input within {limit_s:g} s",
                        "check that the command reads its standard input",
                        limit_s=deadline_s,
                    )
                if not sent and self._input_fd is not None:
                    poller = select.poll()
                    poller.register(self._input_fd, select.POLLOUT | select.POLLERR | select.POLLHUP)
                    poller.poll(min(left_s, _POLL_S) * 1000)

    def _write(self, piece: memoryview) -> int:
        """Return how many bytes the pipe accepted, 0 if it is full. Raises StreamClosedError."""
        if self._input_fd is None or self._closing.is_set():
            raise StreamClosedError()
        try:
            return os.write(self._input_fd, piece)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamClosedError(Text("ssh.input-closed", "the command does not accept more input")) from error

    def close_input(self) -> None:
        with self._send_lock:
            if self._input_fd is not None and self._process.stdin:
                self._input_fd = None
                self._process.stdin.close()

    def close(self) -> None:
        with self._wake_lock:
            if self._wakes is not None and not self._closing.is_set():
                self._closing.set()
                os.write(self._wakes[1], b"!")

    def _run(self, receiver: Receiver, error_backlog: bytes) -> None:
        """Feed the receiver until the child has ended and its pipes are empty; grandchildren may keep pipes open."""
        try:
            if error_backlog:
                receiver.on_error_data(error_backlog)
            self._pump(receiver)
        except Exception:  # the receiver failed: the stream ends, and the thread reports the failure
            self._closing.set()
            raise
        finally:
            is_closed_here = self._closing.is_set()
            self._closing.set()
            self._close_pipes()
            self._make_end()
            reason, status = self._describe_end(self._process.wait())
            receiver.on_closed(CLOSED_HERE if is_closed_here else reason, status)

    def _pump(self, receiver: Receiver) -> None:
        assert self._process.stdout and self._process.stderr and self._wakes
        sinks: dict[int, Callable[[bytes], None]] = {
            self._process.stdout.fileno(): receiver.on_data,
            self._process.stderr.fileno(): receiver.on_error_data,
        }
        end_fd = _open_pidfd(self._process.pid)
        with selectors.DefaultSelector() as selector:
            for fd in (*sinks, self._wakes[0], *([end_fd] if end_fd is not None else [])):
                selector.register(fd, selectors.EVENT_READ)
            try:
                while not self._closing.is_set():
                    has_ended = self._process.poll() is not None
                    ready = selector.select(0 if has_ended else None if end_fd is not None else _POLL_S)
                    fds = [key.fd for key, _ in ready if key.fd in sinks]
                    for fd in fds:
                        if not _move(fd, sinks[fd]):
                            selector.unregister(fd)
                            del sinks[fd]
                    if has_ended and not fds:
                        return
            finally:
                if end_fd is not None:
                    os.close(end_fd)

    def _make_end(self) -> None:
        """End this process, whose input ended; processes that it detached into other sessions are not ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self._process.wait(ASK_TO_END_S)
                return
            except subprocess.TimeoutExpired:
                self._process.send_signal(number)

    def _close_pipes(self) -> None:
        self.close_input()
        with self._wake_lock:
            wakes, self._wakes = self._wakes, None
        for fd in wakes or ():
            os.close(fd)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class ChildConnection:
    """Implementation of `transport.Connection`: each opened command is a child of this machine. `start`: starts one.
    Raises UnreachableError."""

    peer_address: str | None = None

    def __init__(self, start: Callable[[str], ChildStream]) -> None:
        self._start = start
        self._streams: list[ChildStream] = []
        self._is_closed = False

    def open(self, command: str, receiver: Receiver, *, deadline_s: float) -> ChildStream:
        if self._is_closed:
            raise StreamClosedError(CLOSED_HERE)
        stream = self._start(command)
        stream.start(receiver)
        self._streams.append(stream)
        return stream

    def has_unread(self) -> bool:
        return False

    def close(self) -> None:
        self._is_closed = True
        for stream in self._streams:
            stream.close()
        self._streams.clear()


def describe_plain_end(code: int) -> tuple[Text, int | None]:
    """Return the status of a death by signal as shells report it: 128 + signal."""
    return COMMAND_ENDED, code if code >= 0 else 128 - code


def _move(fd: int, sink: Callable[[bytes], None]) -> bool:
    """Pass on the available data. Return False at the end of the pipe."""
    try:
        data = os.read(fd, READ_BYTES)
    except BlockingIOError:
        return True
    if data:
        sink(data)
    return bool(data)


def _open_pidfd(pid: int) -> int | None:
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        return opener(pid)
    except OSError:
        return None
