"""Runs the commands of the demo and ends them after a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import DeadlineExceededError
from ascendrun.text import Text

POLL_S = 0.05
END_S = 10.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoInterruptedError(Exception):
    """A signal requested the end; `number` is the first one that arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Actor:
    """`wait` and `run` raise DemoInterruptedError after a signal; a signal does nothing else, so that cleaning up
    is whole."""

    def __init__(self) -> None:
        self._signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals that end a program are noted for as long as this lasts; those that are ignored stay so.

        After one of them came, further ones are ignored for good: the program ends with the code of the first.
        """
        handled = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if self._signal is None else signal.SIG_IGN)

    def _note(self, number: int, frame: Any) -> None:
        self._signal = self._signal or number

    def check(self) -> None:
        if self._signal is not None:
            raise DemoInterruptedError(self._signal)

    def wait(self, has_happened: Callable[[], bool], *, deadline_s: float, event: Text | str) -> None:
        """Return when the event has happened. Raises DemoInterruptedError, DeadlineExceededError naming it."""
        until = time.monotonic() + deadline_s
        while not has_happened():
            self.check()
            if time.monotonic() > until:
                raise DeadlineExceededError(
                    Text("demo.timeout", "timed out after {limit_s:duration}: {event}", limit_s=deadline_s, event=event)
                )
            time.sleep(POLL_S)

    def run(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], deadline_s: float) -> int:
        """Its exit code, -n for signal n. Its output goes to that of this process. Raises DemoInterruptedError,
        DeadlineExceededError, OSError."""
        self.check()
        # A separate session: ^C at the terminal reaches only this process, which then ends the child.
        child = subprocess.Popen(argv, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            self.wait(lambda: child.poll() is not None, deadline_s=deadline_s, event=f"`{' '.join(argv)}`")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return child.returncode


def marked(mark: str) -> list[int]:
    """The processes of this user with `mark` in the environment (NAME=value), without this one."""
    variable, found = mark.encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                environ = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue  # it has ended, or is another user's
            if variable in environ.split(b"\0"):
                found.append(int(name))
    return found


def end_marked(mark: str, *, grace_s: float) -> int:
    """Returns when none is left: they have the grace to end by themselves. How many had to be killed."""
    killed: dict[int, None] = {}
    started_s = time.monotonic()
    while True:
        left = marked(mark)
        if not left:
            return len(killed)
        if time.monotonic() > started_s + grace_s + END_S:
            message = Text("demo.processes-left", "processes {pids} do not end", pids=left)
            raise DeadlineExceededError(message, hint="kill -9 " + " ".join(map(str, left)))
        if time.monotonic() > started_s + grace_s:
            for pid in left:
                killed[pid] = None
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(POLL_S)


def remove_tree(directory: Path) -> None:
    """Remove a directory and its contents: staged code is in read-only directories."""
    import shutil

    for path, _, _ in os.walk(directory):
        os.chmod(path, 0o700)
    shutil.rmtree(directory)
