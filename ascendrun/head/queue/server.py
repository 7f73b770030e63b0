"""The server of the queue that the users of a machine share: `controller run --shared`."""

from __future__ import annotations

import fcntl
import grp
import os
import pwd
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ascendrun.core.errors import AscendrunError, ConflictError
from ascendrun.core.jobs.fair_share import FairShare, SharePolicy, Usage
from ascendrun.core.machines import QueueDrain
from ascendrun.head.protocol.control_socket import Answer, ControlServer, Handle, peer_name
from ascendrun.head.protocol.messages import Message
from ascendrun.head.queue import messages as queue
from ascendrun.head.queue.board import Board
from ascendrun.head.queue.messages import QUEUE_NAME, Admins, Contend, Decided, ListQueue, QueryAdmin
from ascendrun.node.files import read_json, write_json
from ascendrun.text import Text

PEERS = 16
"""Connections that one user may have open."""
PACE_S = 0.01
"""Pause after each request of a connection: one that floods leaves the processor to the others."""
BUSY_S = 0.5
"""A decision that takes longer is followed by as long a pause."""
LOCK_NAME = "queue.lock"
USAGE_NAME = "usage.json"
DRAINS_NAME = "drains.json"
SAVE_S = 60.0


class QueueServer(ControlServer):
    """Serves each user of the machine who may open the socket, as the user of the process at the other end."""

    NAME, MODE, BACKLOG = QUEUE_NAME, 0o660, 4

    def __init__(self, folder: Path, board: Board, *, admins: Sequence[str] = (), group: str | None = None) -> None:
        """`admins`: names of users, or of groups as @GROUP, who may read and change jobs of others. `group`: the only
        one whose members may connect, None: everybody may. Raises ConflictError for an unknown group, and for stored
        drains that are unreadable."""
        self._board, self._admins, self._lock = board, tuple(admins), threading.Lock()
        self._drains_file = folder / DRAINS_NAME
        self._board.drains = _read_drains(self._drains_file)
        self._next_mono = 0.0
        self.MODE = 0o666 if group is None else 0o660
        super().__init__(folder, self._refuse, group=-1 if group is None else _gid_of(group))

    def handle_of(self, uid: int) -> Handle | None:
        same = [thread for thread in threading.enumerate() if thread.name == peer_name(uid)]
        return partial(self._serve_user, uid) if len(same) < PEERS else None

    def usage(self) -> dict[str, Any]:
        """Return what each account has used, as JSON values."""
        with self._lock:
            return self._board.share.usage.to_json()

    def _refuse(self, op: str, header: Mapping[str, Any], body: bytes, answer: Answer) -> None:
        raise AssertionError("each user has a handle")

    def _serve_user(self, uid: int, op: str, header: Mapping[str, Any], body: bytes, answer: Answer) -> None:
        try:
            answer(self._reply(uid, op, header), b"", True)
        except AscendrunError as error:  # of any other only this connection ends, with its thread
            answer(error, b"", True)
        time.sleep(PACE_S)

    def _reply(self, uid: int, op: str, header: Mapping[str, Any]) -> Message:
        user = user_of(uid)
        if op == Contend.OP:
            request = Contend.from_header(header)
            with self._lock:
                self._board.report(user, request.head, request.entries)
                if request.used is not None:
                    self._board.take_used(user, request.head, request.used)
                if request.drains and self._is_admin(uid, user):
                    with suppress(ConflictError):  # a full disk: its jobs are decided all the same
                        self._store(self._board.newer_drains(request.drains))
                self._decide()
                new = tuple(one for one in self._board.drains if one.closure.since_s > request.drains_s)
                answers, half_life_s = self._board.answers(user, request.head), self._board.share.usage.half_life_s
                return Decided(answers, new, half_life_s)
        if op == ListQueue.OP:
            with self._lock:
                return queue.QueueRows(self._board.rows())
        if op == QueryAdmin.OP:
            return self._admins_for(QueryAdmin.from_header(header).uid)
        if op == queue.DrainHosts.OP:
            return self._drain(uid, queue.DrainHosts.from_header(header).drains)
        raise ConflictError.of("queue.unknown-request", "the shared queue does not support {op}", op=op)

    def _decide(self) -> None:
        """Decide again; with very many jobs at most half of the time."""
        start_mono = time.monotonic()
        if start_mono >= self._next_mono:
            self._board.decide()
            took_s = time.monotonic() - start_mono
            self._next_mono = start_mono + 2 * took_s if took_s > BUSY_S else 0.0

    def _drain(self, uid: int, drains: Sequence[QueueDrain]) -> queue.QueueDrains:
        """Drain machines for all users; stored before the reply, and before it is in effect."""
        admins = self._admins_for(uid)
        if drains and not admins.is_admin:
            english = "only administrators of the shared queue may drain hosts for all users"
            raise ConflictError.of("queue.drain-not-admin", english, "ask one of: {admins}", admins=list(admins.names))
        with self._lock:
            self._store(self._board.decided_drains(drains, user_of(uid)))
            return queue.QueueDrains(self._board.drains)

    def _store(self, drains: tuple[QueueDrain, ...]) -> None:
        """Store drains before they are in effect. Raises ConflictError."""
        if drains == self._board.drains:
            return
        path = str(self._drains_file)
        try:
            write_json(path, queue.QueueDrains(drains).to_header())
        except OSError as error:
            what = Text("queue.not-stored", "cannot write {path}: {error}", path=path, error=str(error))
            raise ConflictError(what) from error
        self._board.drains = drains

    def _admins_for(self, uid: int) -> Admins:
        names = dict.fromkeys(["root", user_of(os.getuid()), *self._admins])
        return Admins(self._is_admin(uid, user_of(uid)), tuple(names))

    def _is_admin(self, uid: int, user: str) -> bool:
        if uid in (0, os.getuid()) or user in self._admins:
            return True
        try:
            mine = os.getgrouplist(user, pwd.getpwuid(uid).pw_gid)
        except KeyError:
            return False
        return any(f"@{_group_of(gid)}" in self._admins for gid in mine)


def user_of(uid: int) -> str:
    """Return the name of a user; the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_of(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _gid_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConflictError.of("queue.no-group", "this machine has no group {group}", group=group) from None


def run_queue(folder: Path, policy: SharePolicy, *, admins: Sequence[str] = (), group: str | None = None) -> None:
    """Serve until SIGTERM or ^C. Raises ConflictError: another process serves this directory, or others may write to
    it."""
    if not folder.exists():
        folder.mkdir(parents=True)
        os.chown(folder, -1, -1 if group is None else _gid_of(group))
        folder.chmod(0o755 if group is None else 0o750)
    if folder.stat().st_mode & 0o022:
        what = Text("queue.writable", "others may write to {path}", path=str(folder))
        raise ConflictError(what, hint=f"chmod go-w {folder}")
    with open(os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as lock:
        os.fchmod(lock.fileno(), 0o600)  # who may open it may lock it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = Text("queue.already-runs", "the shared queue of {path} runs already", path=str(folder))
            raise ConflictError(what) from error
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        share = FairShare(policy, _read_usage(folder, policy.half_life_s))
        server = QueueServer(folder, Board(share), admins=admins, group=group)
        server.start()
        is_over = False
        while not is_over:
            is_over = ended.wait(SAVE_S)
            with suppress(OSError):  # a full disk: the next time
                write_json(str(folder / USAGE_NAME), server.usage(), durable=is_over)
        server.close()


def _read_drains(path: Path) -> tuple[QueueDrain, ...]:
    """Return the stored drains. Raises ConflictError: without them, jobs would start on drained hosts."""
    try:
        return queue.QueueDrains.from_header(read_json(str(path)) or {}).drains
    except (OSError, AscendrunError) as error:
        what = Text(
            "queue.drains-unreadable",
            "cannot read the drained hosts in {path}: {error}",
            path=str(path),
            error=str(error),
        )
        hint = Text("queue.drains-unreadable.hint", "remove the file, start the server, then drain the hosts again")
        raise ConflictError(what, hint=hint) from error


def _read_usage(folder: Path, half_life_s: float) -> Usage:
    """Return the usage that a server before this one stored; none if it is unreadable."""
    try:
        usage = Usage.from_json(read_json(str(folder / USAGE_NAME)) or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Usage(half_life_s)
    usage.half_life_s = half_life_s
    return usage
