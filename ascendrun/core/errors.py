"""Every error that a user can meet: a stable code, the thing, the fact, the way out, and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Problem:
    """One fault of one input: where it stands, what is wrong, how to mend it.

    `line` and `column` count from 1; None means that the problem has no place (a missing file, a flag).
    """

    file: str
    line: int | None
    column: int | None
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        tail = f" ({self.hint})" if self.hint else ""
        return f"{place}: {self.message}{tail}"


class AscendrunError(Exception):
    """The parent of all: `message` says thing and fact, `hint` the way out (a command where there is one)."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 8

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidInput(AscendrunError):
    """A file or a flag is wrong; carries every problem found, in the order of the file."""

    code = "invalid"
    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        count = len(self.problems)
        head = f"{self.problems[0].file}: {count} problem{'s' if count != 1 else ''}" if count else "invalid input"
        super().__init__(head, hint=hint)


class NotFit(AscendrunError):
    """A node refused or failed a check before the start; nothing was started."""

    code = "not-fit"
    exit_code = 3


class NotFound(AscendrunError):
    """No such job, node or rank."""

    code = "not-found"
    exit_code = 4


class CannotConnect(AscendrunError):
    """A node (or the controller) could not be reached; usual causes: wrong address, sshd down, a firewall."""

    code = "unreachable"
    exit_code = 5


class AuthFailed(CannotConnect):
    """sshd took none of our keys; usual causes: wrong user, key not in authorized_keys, locked key."""

    code = "auth"


class HostKeyUnknown(CannotConnect):
    """The node's host key was never recorded; `ascendrun trust` shows and records it."""

    code = "host-key-unknown"


class HostKeyChanged(CannotConnect):
    """The node showed another host key than the recorded one; nothing was sent to it."""

    code = "host-key-changed"


class Conflict(AscendrunError):
    """The wish does not fit the state: devices held, a job already ended, another controller."""

    code = "conflict"
    exit_code = 7


class DeadlineExceeded(AscendrunError):
    """No answer within the named deadline."""

    code = "deadline"
    exit_code = 124
