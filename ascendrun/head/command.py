"""Runners of a command of the settings: bounded in time and output, its session ends with it; and of our modules."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ascendrun.core.dataclass import dataclass
from ascendrun.core.logs.redaction import redact_text
from ascendrun.node.files import read_some
from ascendrun.text import Text

OUTPUT_BYTES = 4096
SHOWN_CHARACTERS = 1500
ASK_TO_END_S = 1.0
_POLL_S = 0.05


@dataclass(frozen=True)
class CommandEnd:
    """End of the command. `code`: exit code, negative for a signal, None: killed at its time limit. `output`: the start
    and the end of both its outputs."""

    code: int | None
    output: bytes


def run_session(
    argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], timeout_s: float, stop: threading.Event | None = None
) -> CommandEnd:
    """Run the command in a separate session and end the complete session with it. `stop`: end it immediately.

    Raises OSError if there is no such command.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(env),
        cwd="/",
        start_new_session=True,
    )
    talk = _Talk(process, stdin)
    try:
        is_over = talk.go_on(time.monotonic() + timeout_s, stop)
        if not is_over:
            _signal_session(process.pid, signal.SIGTERM)
            talk.go_on(time.monotonic() + ASK_TO_END_S, None)
    finally:
        # Before the child is reaped: while it is a zombie, no other process can get the number of its session.
        while _signal_session(process.pid, signal.SIGKILL):
            time.sleep(_POLL_S / 5)
        talk.close()
        code = process.wait()
    return CommandEnd(code if is_over else None, talk.output())


def run_command(
    argv: Sequence[str], stdin: bytes, env: Mapping[str, str], timeout_s: float, stop: threading.Event | None = None
) -> tuple[int | None, str, Text]:
    """Run a command of the settings; return its exit code, None: it did not end by itself, its output without
    credentials, and how it ended."""
    program = argv[0]
    try:
        end = run_session(argv, stdin=stdin, env=env, timeout_s=timeout_s, stop=stop)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return None, "", Text("notice.hook-failed", "cannot run {program}: {error}", program=program, error=why)
    if end.code is None:
        how = Text(
            "notice.hook-timeout", "{program} was killed after {limit_s:g} s", program=program, limit_s=timeout_s
        )
    elif end.code >= 0:
        how = Text("notice.hook-exit", "{program} exited with code {code}", program=program, code=end.code)
    else:
        how = Text("notice.hook-signal", "{program} was killed by signal {signal}", program=program, signal=-end.code)
    return end.code, redact_text(end.output.decode("utf-8", "replace").strip())[-SHOWN_CHARACTERS:], how


def run_module(module: str, *arguments: str, stdin: bytes = b"", timeout_s: float) -> bytes:
    """Run a module of this package as a child process, and return its output. Raises OSError and
    subprocess.SubprocessError: it failed, for the reason in the controller's log."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, timeout=timeout_s, cwd="/", check=True).stdout


class _Talk:
    """The two pipes of the child."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes) -> None:
        assert process.stdin and process.stdout
        self._process, self._in, self._out = process, process.stdin, process.stdout
        self._rest = memoryview(stdin)
        self._head, self._tail, self._seen = bytearray(), bytearray(), 0
        self._selector = selectors.DefaultSelector()
        for pipe, events in ((self._in, selectors.EVENT_WRITE), (self._out, selectors.EVENT_READ)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, events)

    def go_on(self, until_mono: float, stop: threading.Event | None) -> bool:
        """Transfer data; return True if the child has ended by `until_mono`."""
        while True:
            has_ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            left_s = until_mono - time.monotonic()
            if has_ended or left_s <= 0 or (stop is not None and stop.is_set()):
                self._read_all()
                return has_ended
            if not self._selector.get_map():
                time.sleep(min(_POLL_S, left_s))
            for key, _ in self._selector.select(min(_POLL_S, left_s)) if self._selector.get_map() else ():
                (self._write if key.fileobj is self._in else self._read)()

    def _write(self) -> None:
        try:
            sent = os.write(self._in.fileno(), self._rest) if self._rest else 0
        except BlockingIOError:
            return
        except OSError:  # it does not read its input
            sent = len(self._rest)
        self._rest = self._rest[sent:]
        if not self._rest:
            self._selector.unregister(self._in)
            with suppress(OSError):
                self._in.close()

    def _read(self) -> bool:
        data = read_some(self._out.fileno())
        if data == b"":
            self._selector.unregister(self._out)
        if not data:
            return False
        self._seen += len(data)
        room = OUTPUT_BYTES // 2 - len(self._head)
        self._head += data[: max(0, room)]
        self._tail = (self._tail + data[max(0, room) :])[-OUTPUT_BYTES // 2 :]
        return True

    def _read_all(self) -> None:
        for _ in range(64):  # another process may have the pipe open and write indefinitely
            if self._out not in self._selector.get_map() or not self._read():
                return

    def output(self) -> bytes:
        missing = self._seen - len(self._head) - len(self._tail)
        return bytes(self._head) + (b"\n... %d bytes ...\n" % missing if missing > 0 else b"") + bytes(self._tail)

    def close(self) -> None:
        self._selector.close()
        for pipe in (self._in, self._out):
            with suppress(OSError):
                pipe.close()


def _signal_session(session: int, number: int) -> list[int]:
    """Signal every living process of the session; return their pids."""
    found = []
    for pid in _members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            found.append(pid)
    return found


def _members(session: int) -> set[int]:
    """Return the living processes (no zombies) of the session, also of other users, which only they can cause."""
    members = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in (b"Z", b"X"):
            members.add(int(folder.name))
    return members
