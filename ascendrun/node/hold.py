"""The holder: starts supervisors where an engine ends everything that a connection started, with the connection.

One for each node of an allocation. The engine starts it by the text of this file, which imports nothing of ours. It
listens on a Unix socket of its user, on a local disk. A request has the descriptors of the new process, a reply their
numbers in it.
SIGUSR1 and SIGTERM say that the allocation ends: every supervisor gets a SIGTERM, and its ranks time to save.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

REAP_S = 1.0
WAIT_S = 20.0
"""Seconds that the agent waits for the holder of a new allocation."""
_FDS = 250
_LENGTH = struct.Struct("!I")
_FD = struct.Struct("i")


def socket_path(name: str) -> str:
    return "/tmp/ascendrun-hold-%d/%s" % (os.getuid(), name)


def main(name: str) -> int:
    """Serve until the allocation ends."""
    path = socket_path(name)
    make_private(os.path.dirname(path))
    children: list[subprocess.Popen[bytes]] = []
    ends: list[int] = []

    def end(number: int, _frame: object) -> None:
        ends.append(number)
        for child in children:
            if child.poll() is None:
                child.terminate()

    with socket.socket(socket.AF_UNIX) as server:
        if os.path.lexists(path):
            os.unlink(path)
        server.bind(path)
        server.listen(16)
        server.settimeout(REAP_S)
        signal.signal(signal.SIGUSR1, end)
        signal.signal(signal.SIGTERM, end)
        try:
            while children or signal.SIGTERM not in ends:
                try:
                    connection = server.accept()[0]
                except socket.timeout:
                    children[:] = [child for child in children if child.poll() is None]
                    continue
                with connection:
                    connection.settimeout(WAIT_S)
                    try:
                        serve(connection, children)
                    except (OSError, ValueError, KeyError) as error:
                        print("holder: %s" % error, file=sys.stderr, flush=True)
        finally:
            os.unlink(path)
    return 0


def serve(connection: socket.socket, children: list[subprocess.Popen[bytes]]) -> None:
    """Start one process as a request asks, and reply its pid and the numbers that its other descriptors have in it."""
    request, fds = receive(connection)
    env = request["env"]
    try:
        child = subprocess.Popen(
            request["argv"],
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            env=None if env is None else {os.fsencode(key): os.fsencode(value) for key, value in env.items()},
            cwd="/",
            start_new_session=True,
            pass_fds=fds[3:],
        )
    finally:
        for fd in fds:
            os.close(fd)
    children.append(child)
    send(connection, {"pid": child.pid, "fds": fds[3:]}, [])


def spawn(name: str, argv: Sequence[str], env: dict[bytes, bytes] | None, fds: Sequence[int]) -> dict[str, Any]:
    """Let the holder start a process. `env` None: that of the holder. `fds`: its input, output and error output, and
    others. Return its `pid`, and the numbers of the others in it, `fds`. Raises OSError."""
    path = socket_path(name)
    make_private(os.path.dirname(path))
    until = time.monotonic() + WAIT_S
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        while True:
            try:
                connection.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):  # it is being started
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        texts = None if env is None else {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()}
        send(connection, {"argv": list(argv), "env": texts}, fds)
        return receive(connection)[0]


def make_private(folder: str) -> None:
    """Make a directory that only this user can enter. Raises PermissionError if another user made it."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
            raise PermissionError("%s is not a private directory of this user" % folder) from None


def send(connection: socket.socket, values: dict[str, Any], fds: Sequence[int]) -> None:
    data = json.dumps(values).encode("ascii")
    packed = b"".join(_FD.pack(fd) for fd in fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else []
    connection.sendmsg([_LENGTH.pack(len(data))], ancillary)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a message and its descriptors. Raises OSError, ValueError."""
    head, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(_FDS * _FD.size))
    fds = [fd for _, _, packed in ancillary for (fd,) in _FD.iter_unpack(packed[: len(packed) // 4 * 4])]
    if len(head) < _LENGTH.size:
        raise ConnectionResetError("the other side ended")
    data, size = b"", _LENGTH.unpack(head)[0]
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other side ended")
        data += more
    return json.loads(data.decode("ascii")), fds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
