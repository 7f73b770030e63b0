"""Commands for jobs of another user of the shared queue, which the controller of that user runs.

The kernel names the user at each end. The controller reads nothing of what another user sends: a child process does,
which runs a command with the owner's rights, into pipes that the other user made. Jobs with `visible: group` may be
read by all users of the queue; others, and what changes a job, are for those whom its server names as administrators.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Callable

from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError, UnreachableError
from ascendrun.head.protocol.control_socket import PeerServer, uid_of
from ascendrun.head.queue.client import QueueClient
from ascendrun.head.queue.messages import QUEUE_NAME, Admins, QueryAdmin, Ran, RunForOther
from ascendrun.node.tree_hash import check_path
from ascendrun.text import Text

PREFIX = "ascendrun-others"
AT_ONCE, OF_ONE_USER = 8, 2
"""Requests that a controller serves at a time, and how many of them one user may have; administrators have as many
again."""
ADMIN_S = 5.0
"""Seconds in which the server of the queue replies who is an administrator."""
PACE_S = 0.1
"""Pause after each connection: a user who floods costs the controller nothing that counts."""
CHANGES = ("stop", "hold", "unhold", "retry")
"""Commands that must not reach another job than the one that is meant."""
STARTS_S = 60.0
"""Seconds until a request is accepted or refused."""
CHUNK_BYTES, REPLY_BYTES = 1 << 16, 1 << 16


class OtherUsers(PeerServer):
    """The controller's side: for each connection a child process, `ascendrun.query.for_others`."""

    def __init__(self, queue: Path, state_dir: Path) -> None:
        """Serve from now on. `queue`: the directory of the shared queue, whose users may connect."""
        self._queue, self._state_dir = queue, state_dir
        self._running: list[tuple[int, subprocess.Popen[bytes]]] = []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{PREFIX}-{os.getuid()}-{secrets.token_hex(8)}")
        listener.listen(AT_ONCE)
        super().__init__(listener, "other-users")
        self.start()

    def take(self, peer: socket.socket, uid: int) -> None:
        with ExitStack() as stack, suppress(OSError):
            stack.push(peer)
            error = self._refusal(uid)
            if error is not None:
                peer.send(json.dumps({"error": error.to_json()}).encode(), socket.MSG_DONTWAIT)
            else:
                argv = [sys.executable, "-m", "ascendrun.query.for_others", str(self._queue), str(self._state_dir)]
                child = subprocess.Popen(argv, stdin=peer.fileno(), stdout=subprocess.DEVNULL, cwd="/")
                self._running.append((uid, child))
                stack.pop_all()
                threading.Thread(target=self._await_end, args=(peer, uid, child), daemon=True).start()
        time.sleep(PACE_S)

    def _await_end(self, peer: socket.socket, uid: int, child: subprocess.Popen[bytes]) -> None:
        """The other user sees the end of the connection when the next command of that user may begin."""
        with peer:
            child.wait()
            self._running.remove((uid, child))

    def _refusal(self, uid: int) -> AscendrunError | None:
        if not _may_use(self._queue, uid):
            return ConflictError.of("queue.not-user", "only users of the shared queue may read jobs of others")
        mine = sum(reader == uid for reader, _ in self._running)
        if mine < OF_ONE_USER and len(self._running) < AT_ONCE:
            return None
        try:
            if len(self._running) < 2 * AT_ONCE and query_admins(self._queue, uid).is_admin:
                return None
        except AscendrunError as error:
            return error
        limit = OF_ONE_USER if mine >= OF_ONE_USER else AT_ONCE
        english = "{limit} commands for jobs of this user run at present, and no more are allowed"
        return ConflictError.of("queue.others-busy", english, "repeat the command later", limit=limit)


def _may_use(queue: Path, uid: int) -> bool:
    """Return whether a user may open the socket of the shared queue; False: also if it is not served."""
    if uid in (0, os.getuid()):
        return True
    try:
        status, user = os.stat(queue / QUEUE_NAME), pwd.getpwuid(uid)
    except (OSError, KeyError):
        return False
    return bool(status.st_mode & 0o002) or status.st_gid in os.getgrouplist(user.pw_name, user.pw_gid)


def query_admins(queue: Path, uid: int) -> Admins:
    """Return whether a user is an administrator of the shared queue, for this user: root and this user always are.
    Raises UnreachableError."""
    if uid in (0, os.getuid()):
        return Admins(True, ())
    with QueueClient(queue) as client:
        return client.call(QueryAdmin(uid), timeout_s=ADMIN_S)


def run_at(user: str, request: RunForOther, write: Callable[[bytes, bool], object]) -> int:
    """Let the controller of a user run a command; return its exit code. `write(data, is_error)` gets what it prints:
    bytes that this user may have chosen. Files that it sends are written below `request.into`.

    Raises UnreachableError; NotFoundError also for a job that others may not read; ConflictError: also if the files
    cannot be written.
    """
    failure: AscendrunError = _silent(user)
    names = _require_single(user, request.jobs) if request.command in CHANGES else _names_of(user)
    for peer in _controllers(names):
        try:
            return _run(user, peer, request, write)
        except (ConflictError, NotFoundError, UnreachableError) as error:  # the user may have another controller
            failure = failure if isinstance(failure, ConflictError) else error
    raise failure


def _require_single(user: str, jobs: Sequence[str]) -> list[str]:
    """Return the names of the user's controllers, of several only those that have the jobs. Raises ConflictError if two
    have one of them, by its id or its name."""
    names = _names_of(user)
    if len(names) < 2:
        return names
    owners: dict[str, str] = {}
    for job in jobs:
        for name in names:
            if _has(user, name, job) and owners.setdefault(job, name) != name:
                raise ConflictError.of(
                    "queue.two-jobs",
                    "two controllers of {user} have a job {job}",
                    "give the id of the job; if both have it, run the command as {user}",
                    user=user,
                    job=job,
                )
    return [name for name in names if name in owners.values()] or names


def _has(user: str, name: str, job: str) -> bool:
    """Return whether a controller has a job that this user may read."""
    request = RunForOther("show", (job,), {"--output": "json"})
    for peer in _controllers([name]):
        with suppress(ConflictError, NotFoundError, UnreachableError):
            return _run(user, peer, request, lambda data, is_error: None) != NotFoundError.exit_code
    return False


def _silent(user: str) -> UnreachableError:
    return UnreachableError.of("queue.silent", "the controller of {user} does not respond", user=user)


def _names_of(user: str) -> list[str]:
    """Return the names of the sockets of a user's controllers. Every user can take such a name, but not the uid behind
    it."""
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        raise NotFoundError.of("queue.no-user", "this machine has no user {user}", user=user) from None
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        return sorted({line.split()[-1][1:] for line in file if f" @{PREFIX}-{uid}-" in line})


def _controllers(names: Sequence[str]) -> Iterator[socket.socket]:
    """Yield a connection to each controller that runs as the user in its name."""
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(STARTS_S)
            if not peer.connect_ex(f"\0{name}") and name.startswith(f"{PREFIX}-{uid_of(peer)}-"):
                yield peer


def _run(user: str, peer: socket.socket, request: RunForOther, write: Callable[[bytes, bool], object]) -> int:
    reply = b""
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        source, target = os.pipe()
        receiver = _Receiver(source, request.into)
        receiver.start()
        ends: list[Any] = [stack.enter_context(open(target, "wb", 0))]
        for is_error in (False, True):
            source, target = os.pipe()
            selector.register(stack.enter_context(open(source, "rb", 0)), selectors.EVENT_READ, is_error)
            ends.append(stack.enter_context(open(target, "wb", 0)))
        selector.register(peer, selectors.EVENT_READ)
        with suppress(ConnectionError):  # a refusal, which is read below
            numbers = [end.fileno() for end in (*ends[1:], ends[0])]
            socket.send_fds(peer, [json.dumps(request.to_header()).encode()], numbers)
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
    receiver.join()
    if receiver.error is not None:
        raise receiver.error
    return Ran.from_header(row).code


class _Receiver(threading.Thread):
    """Writes the files of an archive, which another user made, below a directory: regular files only."""

    def __init__(self, source: int, into: str) -> None:
        super().__init__(name="files", daemon=True)
        self._source, self._into = source, into
        self.error: ConflictError | None = None

    def run(self) -> None:
        from tarfile import TarError

        with open(self._source, "rb") as pipe:
            try:
                if self._into:
                    self._unpack(pipe)
            except (OSError, EOFError, ValueError, TarError) as error:
                what = Text("queue.not-written", "cannot write to {path}: {error}", path=self._into, error=str(error))
                self.error = ConflictError(what)

    def _unpack(self, pipe: IO[bytes]) -> None:
        import tarfile

        with tarfile.open(fileobj=pipe, mode="r|") as tar:
            for member in tar:
                check_path(os.fsencode(member.name))
                source = tar.extractfile(member) if member.type == tarfile.REGTYPE else None
                if source is not None:
                    path = os.path.join(self._into, member.name)
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    with open(path, "wb") as target:
                        shutil.copyfileobj(source, target)
                tar.members = []  # type: ignore[attr-defined]  # not in typeshed; else it keeps every member


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK_BYTES)
    except ConnectionError:
        return b""
