"""A child on a pseudo terminal, and what a person sees there."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pexpect
import pyte

DEADLINE_S = 90.0
QUESTIONS = re.compile(rb"\x1b\[[>=?<][0-9;]*[a-zA-Z]")
"""To the terminal; pyte cannot read them."""


class PseudoTerminal:
    """Runs this Python with `argv`. Used in a `with`, it ends the child at the end."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], *, columns: int) -> None:
        self.child: Any = pexpect.spawn(
            sys.executable, list(argv), env=dict(environ), dimensions=(24, columns), timeout=DEADLINE_S
        )
        self._screen = pyte.Screen(columns, 24)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close(force=True)

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def wait_until(self, fact: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not fact():
            assert time.monotonic() < deadline_s and self.read(), self.text

    def read(self) -> bool:
        """False: there will be no more."""
        try:
            data = self.child.read_nonblocking(65536, timeout=1)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(QUESTIONS.sub(b"", data))
        return True

    def end(self) -> int:
        """Waits for the child's end; its exit code, or the negative number of the signal that ended it."""
        while self.read():
            pass
        self.child.wait()
        return int(self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus)
