"""Runs commands as a person at this terminal would, and ends them when that person has had enough."""

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

LOOK_S = 0.05
END_S = 10.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoInterruptedError(Exception):
    """A signal told us to end; `number` is the first one that came."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Actor:
    """`wait` and `run` raise DemoInterruptedError after a signal; a signal does nothing else, so that cleaning up
    is whole."""

    def __init__(self) -> None:
        self._told: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals that end a program are noted for as long as this lasts; those that are ignored stay so.

        After one of them came, further ones are ignored for good: the program ends with the code of the first.
        """
        heard = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if self._told is None else signal.SIG_IGN)

    def _note(self, number: int, frame: Any) -> None:
        self._told = self._told or number

    def check(self) -> None:
        if self._told is not None:
            raise DemoInterruptedError(self._told)

    def wait(self, is_so: Callable[[], bool], *, deadline_s: float, says: str) -> None:
        """Returns when it is so. Raises DemoInterruptedError, DeadlineExceededError with `says`."""
        until = time.monotonic() + deadline_s
        while not is_so():
            self.check()
            if time.monotonic() > until:
                raise DeadlineExceededError(f"{says} did not happen within {deadline_s:g} s")
            time.sleep(LOOK_S)

    def run(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], deadline_s: float) -> int:
        """Its exit code, -n for signal n. Its words go where ours go. Raises DemoInterruptedError,
        DeadlineExceededError, OSError."""
        self.check()
        # A session of its own: ^C at the terminal is ours alone, we decide how it ends.
        child = subprocess.Popen(argv, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            self.wait(lambda: child.poll() is not None, deadline_s=deadline_s, says=f"the end of `{' '.join(argv)}`")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return child.returncode


def marked(mark: str) -> list[int]:
    """The processes of this user whose environment holds `mark` (NAME=value), without this one."""
    wanted, found = mark.encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                environ = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue  # it has ended, or is another user's
            if wanted in environ.split(b"\0"):
                found.append(int(name))
    return found


def end_marked(mark: str, *, grace_s: float) -> int:
    """Returns when none is left: they have the grace to end by themselves. How many had to be killed."""
    killed: dict[int, None] = {}
    began = time.monotonic()
    while True:
        left = marked(mark)
        if not left:
            return len(killed)
        if time.monotonic() > began + grace_s + END_S:
            raise DeadlineExceededError(f"processes {left} do not end", hint="kill -9 " + " ".join(map(str, left)))
        if time.monotonic() > began + grace_s:
            for pid in left:
                killed[pid] = None
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(LOOK_S)


def remove_tree(folder: Path) -> None:
    """With all that lies in it: staged code stands in folders that nobody may write to."""
    import shutil

    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o700)
    shutil.rmtree(folder)
