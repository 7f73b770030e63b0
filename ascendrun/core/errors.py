"""Errors of the user interface: a stable code, the failed operation, a hint, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.text import Text, from_json, to_json

E = TypeVar("E", bound="AscendrunError")


@dataclass(frozen=True)
class Problem:
    """One fault of one input or of one host: its location, what is wrong, how to fix it.

    `file` is a file, a flag or a host. `line` and `column` count from 1; None: the problem has no such place.
    `is_private`: that line may hold a credential and is not shown. `named`: the host that the message names.
    """

    file: str
    line: int | None
    column: int | None
    message: Text | str
    hint: Text | str | None = None
    is_private: bool = False
    named: str | None = None

    @property
    def place(self) -> str:
        """File, line and column; "" for a host that the message names itself."""
        if self.named == self.file:
            return ""
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else str(self.message)
        return f"{text} ({self.hint})" if self.hint else text


class AscendrunError(Exception):
    """Base class of all errors. `message` and `hint` are texts; str only for the output of other programs.

    `problems`: every fault found, where there may be several. `host`: the one that the message names, None: none.
    `why_lost`: why a host with this error is unreachable, as a code; None: no more is known than `code`.
    """

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 8

    def __init_subclass__(cls, *, code: str | None = None, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        cls.code, cls.exit_code = code or cls.code, exit_code or cls.exit_code

    def __init__(
        self,
        message: Text | str,
        *,
        hint: Text | str | None = None,
        problems: Sequence[Problem] = (),
        host: str | None = None,
        why_lost: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.host = host
        self.why_lost = why_lost

    @classmethod
    def of(
        cls: type[E],
        key: str,
        english: str,
        hint: str | None = None,
        /,
        *,
        host: str | None = None,
        why_lost: str | None = None,
        **values: Any,
    ) -> E:
        """Make an error of a message and the English of its hint, whose key is `KEY.hint`; they share their values.

        `host`: the one that the message names, also as a value.
        """
        values = values if host is None else {"host": host, **values}
        error = cls(Text(key, english, **values), hint=None if hint is None else Text(f"{key}.hint", hint, **values))
        error.host, error.why_lost = host, why_lost
        return error

    def to_json(self) -> dict[str, Any]:
        """Return the error as data for a socket or a store: code, and texts with their keys and values."""
        return {
            "code": self.code,
            "message": to_json(self.message),
            "hint": to_json(self.hint),
            "problems": to_json(self.problems),
            "host": self.host,
        }

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> AscendrunError:
        """Return the error that `to_json` wrote, of the class with its code, else AscendrunError."""
        kind = next((kind for kind in _kinds(AscendrunError) if kind.code == row.get("code")), AscendrunError)
        message, hint = from_json(row.get("message") or ""), from_json(row.get("hint"))
        error = kind.__new__(kind)
        problems = [load_dataclass(Problem, one) for one in row.get("problems") or ()]
        AscendrunError.__init__(error, message, hint=hint, problems=problems, host=row.get("host"))
        return error


class InvalidInputError(AscendrunError, code="invalid-input", exit_code=2):
    """A file or a flag is wrong; carries every problem found, in the order of the file."""

    def __init__(self, problems: Sequence[Problem], *, hint: Text | str | None = None) -> None:
        count = len(problems)
        message = (
            Text("input.problems", "{file}: {count:plural problem problems}", file=problems[0].file, count=count)
            if count
            else Text("input.invalid", "invalid input")
        )
        super().__init__(message, hint=hint, problems=problems)


class PreflightError(AscendrunError, code="preflight-failed", exit_code=3):
    """A preflight check failed; no process was started. `problems`: one for each host and fault. `hosts`: those that
    are not ready, (): the job itself is not."""

    def __init__(self, message: Text | str, *, hosts: tuple[str, ...] = (), **more: Any) -> None:
        super().__init__(message, **more)
        self.hosts = hosts


class NotFoundError(AscendrunError, code="not-found", exit_code=4):
    """Unknown job, node or rank."""


class UnreachableError(AscendrunError, code="unreachable", exit_code=5):
    """A node, or the controller, cannot be reached; usual causes: wrong address, sshd down, a firewall."""


class AuthenticationError(UnreachableError, code="auth-failed"):
    """sshd accepted no key; usual causes: wrong user, key not in authorized_keys, locked key."""


class HostKeyUnknownError(UnreachableError, code="host-key-unknown"):
    """The node's host key is not recorded; `ascendrun trust` shows and records it."""


class HostKeyChangedError(UnreachableError, code="host-key-changed"):
    """The node's host key differs from the recorded one; nothing was sent to the node."""


class AgentVersionError(UnreachableError, code="other-version"):
    """The agent of a node speaks another version of the protocol than this controller."""


class HostsFailedError(AscendrunError, code="hosts-failed", exit_code=6):
    """Some hosts failed or did not respond; the others succeeded. `problems`: one for each of them."""


class ConflictError(AscendrunError, code="conflict", exit_code=7):
    """The request conflicts with the state: devices in use, a job that has ended, another controller."""


class SupersededError(ConflictError, code="superseded"):
    """Another machine continues as this head, with a higher term."""


class ControllerReplacedError(ConflictError, code="controller-replaced"):
    """The controller restarts as the release that was installed meanwhile; repeat the request."""


class DeadlineExceededError(AscendrunError, code="deadline", exit_code=124):
    """No response within the named deadline."""


def _kinds(kind: type[AscendrunError]) -> Iterator[type[AscendrunError]]:
    """A class and all below it; the parents of equal codes first."""
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)
