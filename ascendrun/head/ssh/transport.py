"""Transport of bytes to a host: the protocol that every backend implements.

A connection offers a byte stream to a fixed command, and a deadline on everything. Implementations:
`paramiko_transport.py` (paramiko), `openssh.py` (the OpenSSH binary), `backends/` (a child process).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Callable, Protocol, Union

from ascendrun.core.allocations import Allocator
from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AuthenticationError, DeadlineExceededError
from ascendrun.core.hosts import Host
from ascendrun.text import Text

Data = Union[bytes, bytearray, memoryview]


@dataclass(frozen=True)
class Deadlines:
    """Wall-clock limits of one connect, in seconds; a frozen host accepts TCP and then sends nothing."""

    tcp_s: float = 10.0
    banner_s: float = 10.0
    kex_s: float = 20.0
    auth_s: float = 20.0
    open_s: float = 20.0


@dataclass(frozen=True)
class Receiver:
    """Receiver of a stream's bytes. Called in a thread that serves other connections too, one call at a time: must not
    block.

    `on_closed(reason, exit_status)` is called exactly once, last; the status is None if the host sent none.
    """

    on_data: Callable[[bytes], None]
    on_error_data: Callable[[bytes], None]
    on_closed: Callable[[Text, int | None], None]


CLOSED_HERE = Text("ssh.closed-here", "closed by this side")
COMMAND_ENDED = Text("ssh.command-ended", "the command ended")


class NoKeyError(AuthenticationError):
    """There was no key for the login, so nothing was tried."""


class StreamClosedError(ConnectionError):
    """The stream or its connection is closed; nothing more can be sent."""

    def __init__(self, reason: Text | None = None) -> None:
        self.reason = reason or Text("ssh.stream-closed", "the stream is closed")
        super().__init__(self.reason)


@contextmanager
def sending(lock: threading.Lock, deadline_s: float) -> Iterator[None]:
    """Hold the lock of a stream's sender. Raises DeadlineExceededError if another thread keeps it."""
    if not lock.acquire(timeout=max(deadline_s, 0)):
        raise DeadlineExceededError(
            Text("ssh.send-busy", "another thread was still sending after {limit_s:g} s", limit_s=deadline_s)
        )
    try:
        yield
    finally:
        lock.release()


class Stream(Protocol):
    """The standard input of a command running on the host."""

    def send(self, data: Data, *, deadline_s: float) -> None:
        """Send all of `data`, waiting while too much is in flight. Raises StreamClosedError, DeadlineExceededError."""

    def close_input(self) -> None:
        """End the command's standard input."""

    def close(self) -> None:
        """End the stream; repeatable; `on_closed` follows if it was not called yet."""


class Connection(Protocol):
    """One authenticated connection to one host."""

    peer_address: str | None
    """The numeric address; None if it is not known (a jump host, a child process)."""

    def open(self, command: str, receiver: Receiver, *, deadline_s: float) -> Stream:
        """Start `command` through the user's login shell. `command` is fixed text of ascendrun, never the user's.

        Raises StreamClosedError if the connection is closed, DeadlineExceededError if the host does not respond.
        """

    def has_unread(self) -> bool:
        """Return whether bytes of the host have arrived that no thread has read yet, as far as that is known."""

    def close(self) -> None:
        """End everything immediately; repeatable."""


class Backend(Protocol):
    """A kind of cluster, with connections to its hosts."""

    def connect(self, host: Host) -> Connection:
        """Connect. Raises UnreachableError or one of its children (AuthenticationError, HostKeyUnknownError,
        HostKeyChangedError)."""

    def terminal_argv(self, host: Host, argv: Sequence[str], *, has_terminal: bool) -> list[str]:
        """Return the command line that runs `argv` on the host, with or without a terminal there."""

    def allocator(self, engine: str) -> Allocator:
        """Return the allocator of an engine type that has a queue."""

    def allocators(self) -> Sequence[Allocator]:
        """Return those of the engines in the settings. Raises InvalidInputError."""

    def close(self) -> None:
        """Release the backend's own resources; connections are closed by their owners."""
