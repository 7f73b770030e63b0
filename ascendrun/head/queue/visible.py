"""Jobs with `visible: group`, as other users of the shared queue read them through the controller of their owner.

The kernel names the user at each end. The controller reads nothing of what another user sends: a child process does,
which prints with the owner's rights, into pipes that the other user made. The server of the queue has no part in it.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError, UnreachableError
from ascendrun.head.protocol.control_socket import PeerServer, uid_of
from ascendrun.head.queue.messages import QUEUE_NAME, Printed, PrintVisible

PREFIX = "ascendrun-visible"
AT_ONCE, OF_ONE_USER = 8, 2
"""Requests that a controller serves at a time, and how many of them one user may have."""
PACE_S = 0.1
"""Pause after each connection: a user who floods costs the controller nothing that counts."""
STARTS_S = 60.0
"""Seconds until a request is accepted or refused."""
CHUNK_BYTES, REPLY_BYTES = 1 << 16, 1 << 16


class VisibleJobs(PeerServer):
    """The controller's side: for each connection a child process, `ascendrun.query.visible`."""

    def __init__(self, queue: Path, state_dir: Path) -> None:
        """Serve from now on. `queue`: the directory of the shared queue, whose users may read."""
        self._queue, self._state_dir = queue, state_dir
        self._running: list[tuple[int, subprocess.Popen[bytes]]] = []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{PREFIX}-{os.getuid()}-{secrets.token_hex(8)}")
        listener.listen(AT_ONCE)
        super().__init__(listener, "visible-jobs")
        self.start()

    def take(self, peer: socket.socket, uid: int) -> None:
        with peer, suppress(OSError):
            self._running = [(user, child) for user, child in self._running if child.poll() is None]
            error = self._refusal(uid)
            if error is not None:
                peer.send(json.dumps({"error": error.to_json()}).encode(), socket.MSG_DONTWAIT)
            else:
                argv = [sys.executable, "-m", "ascendrun.query.visible", str(self._state_dir)]
                child = subprocess.Popen(argv, stdin=peer.fileno(), stdout=subprocess.DEVNULL, cwd="/")
                self._running.append((uid, child))
        time.sleep(PACE_S)

    def _refusal(self, uid: int) -> ConflictError | None:
        if not _may_use(self._queue, uid):
            return ConflictError.of("queue.not-user", "only users of the shared queue may read jobs of others")
        mine = sum(reader == uid for reader, _ in self._running)
        if mine >= OF_ONE_USER or len(self._running) >= AT_ONCE:
            limit = OF_ONE_USER if mine >= OF_ONE_USER else AT_ONCE
            english = "{limit} commands read jobs of this user at present, and no more are allowed"
            return ConflictError.of("queue.visible-busy", english, "repeat the command later", limit=limit)
        return None


def _may_use(queue: Path, uid: int) -> bool:
    """Return whether a user may open the socket of the shared queue; False: also if it is not served."""
    try:
        status, user = os.stat(queue / QUEUE_NAME), pwd.getpwuid(uid)
    except (OSError, KeyError):
        return False
    return bool(status.st_mode & 0o002) or uid == 0 or status.st_gid in os.getgrouplist(user.pw_name, user.pw_gid)


def print_visible(user: str, request: PrintVisible, write: Callable[[bytes, bool], object]) -> int:
    """Let the controller of a user print a job; return the exit code of the command. `write(data, is_error)` gets what
    it prints: bytes that this user may have chosen.

    Raises UnreachableError; NotFoundError also for a job that others may not read; ConflictError.
    """
    failure: AscendrunError = _silent(user)
    for peer in _controllers_of(user):
        with peer:
            try:
                return _print(user, peer, request, write)
            except (NotFoundError, UnreachableError) as error:  # the user may have another controller
                failure = error
    raise failure


def _silent(user: str) -> UnreachableError:
    return UnreachableError.of("queue.silent", "the controller of {user} does not respond", user=user)


def _controllers_of(user: str) -> Iterator[socket.socket]:
    """Yield a connection to each controller of a user. Every user can take such a name, but not the uid behind it."""
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        raise NotFoundError.of("queue.no-user", "this machine has no user {user}", user=user) from None
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        names = {line.split()[-1][1:] for line in file if f" @{PREFIX}-{uid}-" in line}
    for name in sorted(names):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(STARTS_S)
        try:
            peer.connect(f"\0{name}")
        except OSError:
            peer.close()
            continue
        if uid_of(peer) == uid:
            yield peer
        peer.close()


def _print(user: str, peer: socket.socket, request: PrintVisible, write: Callable[[bytes, bool], object]) -> int:
    reply = b""
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        ends: list[Any] = []
        for is_error in (False, True):
            source, target = os.pipe()
            selector.register(stack.enter_context(open(source, "rb", 0)), selectors.EVENT_READ, is_error)
            ends.append(stack.enter_context(open(target, "wb", 0)))
        selector.register(peer, selectors.EVENT_READ)
        with suppress(ConnectionError):  # a refusal, which is read below
            socket.send_fds(peer, [json.dumps(request.to_header()).encode()], [end.fileno() for end in ends])
        for end in ends:
            end.close()
        while selector.get_map():
            ready = selector.select(None if reply else STARTS_S)
            if not ready:
                raise _silent(user)
            for key, _ in ready:
                data = _read(key.fd)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is peer:
                    reply = (reply + data)[:REPLY_BYTES]
                else:
                    write(data, key.data)
    try:
        row = json.loads(reply)
        error = None if "error" not in row else AscendrunError.from_json(row["error"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _silent(user) from None
    if error is not None:
        raise error
    return Printed.from_header(row).code


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK_BYTES)
    except ConnectionError:
        return b""
