"""The process that a launcher (torchrun, deepspeed, accelerate) starts in place of a rank, and its connection.

It has the supervisor start the rank, passes signals on to it, and ends as the rank ended. So a rank under a launcher is
a child of the supervisor as any other: own pipes, own files, and the exit status of the kernel.

A connection: a length and JSON {rank, argv, env, cwd} to the supervisor; then each signal as a byte to the supervisor,
and at last the rank's wait status, 4 bytes, from it. Lengths and statuses are big-endian.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys

from ascendrun.node.layout import JOIN_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator


LOCAL_RANK_TOKEN = "\1LOCAL_RANK\1"
"""Placeholder in the rank's command. Equal to core/jobfile/launchers.LOCAL_RANK_TOKEN; a test compares them."""

AGENT_TOKEN = "\1AGENT\1"
"""Placeholder in a launcher's command for the path of the agent. Equal to core/jobfile/launchers.AGENT_TOKEN."""

LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!i")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LOST = 1 << 8
"""The wait status "exit code 1", for a rank whose supervisor is gone."""


def main(command: list[str]) -> int:
    """Run `join COMMAND`: the rank by the supervisor named in the environment; without one, the command itself."""
    command = [word.replace(LOCAL_RANK_TOKEN, os.environ.get("LOCAL_RANK", "0")) for word in command]
    name = os.environ.pop(JOIN_VARIABLE, "")
    if not name:
        os.execvp(command[0], command)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until they can be passed on
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(b"\0" + os.fsencode(name))
        link.sendall(make_request(command))
    except OSError as error:
        sys.stderr.write("ascendrun: the supervisor of this rank does not respond (%s)\n" % error.strerror)
        return 1

    def pass_on(number: int, _: Any) -> None:
        try:
            link.send(bytes([number]))
        except OSError:
            pass  # the rank or the supervisor has ended

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    return end_as(await_status(link))


def make_request(command: list[str]) -> bytes:
    rank = os.environ.get("RANK", "")
    env = {_text(name): _text(value) for name, value in os.environb.items()}
    request = {
        "rank": int(rank) if rank.isdigit() else None,
        "argv": [_text(os.fsencode(word)) for word in command],
        "env": env,
        "cwd": _text(os.getcwdb()),
    }
    raw = json.dumps(request).encode("ascii")
    return LENGTH.pack(len(raw)) + raw


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def await_status(link: socket.socket) -> int:
    received = b""
    while len(received) < STATUS.size:
        try:
            part = link.recv(STATUS.size - len(received))
        except OSError:
            part = b""
        if not part:
            return LOST
        received += part
    return int(STATUS.unpack(received)[0])


def end_as(status: int) -> int:
    """Return the exit code of a wait status; of a signal, end by the same one, without a core file."""
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status)
    import resource

    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


# --- the supervisor's side: it starts the rank, and gets the launcher's signals for it ---

REQUEST_BYTES = 16 << 20
"""Limit of a request: Linux accepts arguments and environments of a few megabytes."""
_CREDENTIALS = struct.Struct("iII")


class Joined:
    """One connection. `request`: what a rank is started with, {rank, argv, env, cwd}, None until it is complete; its
    `rank` is as the launcher set RANK, None: it did not. `rank`: the started rank, None: not started yet."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link
        self._received = b""
        self.request: dict[str, Any] | None = None
        self.rank: Any = None

    def fileno(self) -> int:
        return self._link.fileno()

    def read(self) -> tuple[bytes, bool]:
        """Read what is there. Return (the signals that the launcher sent, whether the connection is closed)."""
        try:
            chunk = self._link.recv(1 << 18)
        except BlockingIOError:
            return b"", False
        except OSError:
            chunk = b""
        if self.request is not None or not chunk:
            return chunk, not chunk
        self._received += chunk
        return b"", not self._parse()

    def _parse(self) -> bool:
        """Make the request if it is complete. False: it is not one."""
        if len(self._received) < LENGTH.size:
            return True
        (length,) = LENGTH.unpack_from(self._received)
        if length > REQUEST_BYTES:
            return False
        raw = self._received[LENGTH.size :]
        if len(raw) < length:
            return True
        try:
            values = json.loads(raw[:length].decode("ascii"))
            self.request = {
                "rank": None if values["rank"] is None else int(values["rank"]),
                "argv": [str(word) for word in values["argv"]],
                "env": {str(name): str(value) for name, value in values["env"].items()},
                "cwd": str(values["cwd"]),
            }
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        return True

    def close(self, status: int | None) -> None:
        """Send the rank's wait status, None: there is none, and close."""
        if status is not None:
            with contextlib.suppress(OSError):  # the launcher has killed it
                self._link.send(STATUS.pack(status))
        self._link.close()


class JoinServer:
    """The supervisor's socket. `name`: in the abstract namespace, which needs no directory and ends with it."""

    def __init__(self) -> None:
        self.name = "ascendrun-" + os.urandom(16).hex()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(b"\0" + self.name.encode("ascii"))
        self._socket.listen(1024)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept_all(self) -> Iterator[Joined]:
        """Yield the new connections of this user."""
        while True:
            try:
                link, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(raw)[1] == os.geteuid():
                yield Joined(link)
            else:
                link.close()
