"""Connections of the processes that a launcher starts in place of its ranks: node/join.py.

Each asks the supervisor to start its rank, passes the launcher's signals on, and waits for the rank's wait status.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct

from ascendrun.node.join import LENGTH, STATUS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from ascendrun.node.supervisor.processes import Rank

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
        self.rank: Rank | None = None

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
