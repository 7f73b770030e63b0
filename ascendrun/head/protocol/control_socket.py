"""Unix sockets with frames of node/wire: that of the controller (0600, peers of the same user only), and the base of
others."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, TypeVar, Union

from ascendrun.core import errors
from ascendrun.head.protocol.messages import OTHER_VERSION_HINT, Message, R, Request
from ascendrun.head.protocol.release import own_release
from ascendrun.head.waiting import in_background
from ascendrun.node import wire
from ascendrun.node.files import write_all
from ascendrun.text import Text

SOCKET_NAME = "controller.sock"
PROTOCOL = 4
"""Version of the messages between commands and the controller; raised with every change that both sides must know."""
ANY_PROTOCOL = ("status", "shutdown")
"""Requests that a controller of any version serves: they find and stop a controller of another version."""
RESTARTS = Text("control.restarts", "the controller restarts as the new release when its present work is done")
RESTARTS_HINT = Text("control.restarts.hint", "repeat the command")
_UCRED = struct.Struct("3i")

C = TypeVar("C", bound="ControlClient")
Answer = Callable[[Union[Message, errors.AscendrunError, None], bytes, bool], None]
"""answer(reply, body, is_last): called once or, for streams, repeatedly, from any thread. None: no reply is left."""
Handle = Callable[[str, Mapping[str, Any], bytes, Answer], None]
"""handle(op, header, body, answer): called in a thread of each peer."""


@contextmanager
def _short_path(folder: Path, name: str) -> Iterator[str]:
    """Yield the socket's path through /proc/self/fd: a Unix socket's path is limited to 107 bytes."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def uid_of(peer: socket.socket) -> int:
    """Return the user of the process at the other end when it connected, or listened: the kernel knows it."""
    return int(_UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


class PeerServer:
    """Accepts the connections of processes of this machine in one thread. Subclasses serve them."""

    def __init__(self, listener: socket.socket, name: str) -> None:
        """`listener`: listens already, and is closed by `close`. `name`: of the thread."""
        self._listener = listener
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept, before another socket gets the number
        self._listener.close()

    def take(self, peer: socket.socket, uid: int) -> None:
        """Serve a connection of a user, and close it. No other one is accepted before this returns."""
        raise NotImplementedError

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed
            self.take(peer, uid_of(peer))


class ControlServer(PeerServer):
    """Server in the state directory. Subclasses serve other users. `MODE`, `group`: of the socket, -1: that of this
    process. `BACKLOG`: replies that a peer may leave unread, None: any number."""

    NAME, MODE = SOCKET_NAME, 0o600
    BACKLOG: int | None = None

    def __init__(
        self,
        state_dir: Path,
        handle: Handle,
        *,
        will_restart: Callable[[object], bool] = lambda release: False,
        group: int = -1,
    ) -> None:
        """`will_restart(release of a command)`: whether this controller restarts soon, as another release."""
        self._path = state_dir / self.NAME
        self._handle, self._will_restart = handle, will_restart
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path.unlink(missing_ok=True)
        with _short_path(state_dir, self.NAME) as path:
            listener.bind(path)
        os.chmod(self._path, 0o600)
        os.chown(self._path, -1, group)
        os.chmod(self._path, self.MODE)
        self._inode = os.stat(self._path).st_ino
        listener.listen(64)
        super().__init__(listener, "control")

    def close(self) -> None:
        with suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:  # not the one of another controller
                self._path.unlink()
        super().close()

    def handle_of(self, uid: int) -> Handle | None:
        """Return what serves a user; None: the user may not connect."""
        return self._handle if uid == os.getuid() else None

    def take(self, peer: socket.socket, uid: int) -> None:
        handle = self.handle_of(uid)
        if handle is None:
            peer.close()
        else:
            threading.Thread(target=self._serve, args=(peer, handle), name=peer_name(uid), daemon=True).start()

    def _serve(self, peer: socket.socket, handle: Handle) -> None:
        reader, outgoing = wire.FrameReader(), _Outgoing(peer)
        with peer:
            try:
                while True:
                    data = peer.recv(65536)
                    if not data:
                        return
                    for header, body in reader.feed(data):
                        op, answer = str(header.get("op")), _answerer(outgoing, header.get("id"))
                        will_restart = self._will_restart(header.get("release"))
                        if op in ANY_PROTOCOL or header.get("protocol") == PROTOCOL:
                            handle(op, header, body, answer)
                        elif will_restart:
                            answer(errors.ControllerReplacedError(RESTARTS, hint=RESTARTS_HINT), b"", True)
                        else:
                            answer(other_version(PROTOCOL, header.get("protocol")), b"", True)
                        if self.BACKLOG is not None and len(outgoing) > self.BACKLOG:
                            return
            except (OSError, wire.FrameError):
                return  # the client has disconnected, or was not a command of ascendrun


def peer_name(uid: int) -> str:
    """Return the name of the threads that serve a user."""
    return f"control-peer-{uid}"


class _Outgoing:
    """Queue of frames to one client. Never blocks the sender: the pager of `exec` may stop reading for an hour."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, frame: bytes) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.append(frame)
                return
            rest = self._send_now(frame)
            if rest:
                self._waiting.append(rest)
                in_background(self._send_rest, "control-answer")

    def _send_now(self, frame: bytes) -> bytes:
        """Return the bytes that the socket does not accept immediately; b"" also if the client has left."""
        try:
            return frame[self._peer.send(frame, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return frame
        except OSError:
            return b""

    def _send_rest(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                frame = self._waiting[0]
            try:
                self._peer.sendall(frame)
            except OSError:
                return
            with self._lock:
                self._waiting.popleft()


def _answerer(outgoing: _Outgoing, request_id: object) -> Answer:
    def answer(reply: Message | errors.AscendrunError | None, body: bytes, is_last: bool) -> None:
        if isinstance(reply, errors.AscendrunError):
            header: dict[str, Any] = {"ok": False, "error": reply.to_json()}
        else:
            header = {"ok": True, "empty": True} if reply is None else {"ok": True, **reply.to_header()}
        outgoing.send(wire.pack({"re": request_id, "last": is_last, "protocol": PROTOCOL, **header}, body))

    return answer


def other_version(controller: object, command: object) -> errors.ConflictError:
    """Make the error for different versions of controller and command; None: from before there were versions."""
    return errors.ConflictError(
        Text(
            "control.other-version",
            "the controller is of another version (protocol {controller}, this command uses {command})",
            controller=controller,
            command=command,
        ),
        hint=OTHER_VERSION_HINT,
    )


class ControlClient:
    """A connection to the running controller."""

    NAME = SOCKET_NAME

    def __init__(self, state_dir: Path) -> None:
        """Connect. Raises UnreachableError if no controller listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_path(state_dir, self.NAME) as path:
                self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise self.not_running(state_dir, error) from error
        self._next_id = 0
        self._reader = wire.FrameReader()

    @staticmethod
    def not_running(state_dir: Path, error: OSError) -> errors.UnreachableError:
        return errors.UnreachableError.of(
            "control.not-running",
            "no controller is running for {path}: {error}",
            "run it in the foreground: ascendrun controller run",
            path=str(state_dir),
            error=error.strerror,
        )

    @classmethod
    def over(cls: type[C], connected: socket.socket) -> C:
        """Return a client over a stream that `relay` connects with a controller on another machine.

        Raises UnreachableError: it ended before."""
        client = cls.__new__(cls)
        client._socket, client._next_id, client._reader = connected, 0, wire.FrameReader()
        before = b""
        while not before.endswith(wire.MAGIC):  # behind what a login prints
            byte = connected.recv(1)
            if not byte:
                connected.close()
                raise errors.UnreachableError(Text("control.relay-ended", "no controller responds there"))
            before += byte
        return client

    def relay(self, source: int, target: int) -> None:
        """Copy the bytes of two descriptors to and from the controller, until one side ends."""

        def copy_requests() -> None:
            with suppress(OSError):
                while data := os.read(source, 1 << 16):
                    self._socket.sendall(data)
                self._socket.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=copy_requests, name="relay", daemon=True).start()
        with suppress(OSError):
            write_all(target, wire.MAGIC)
            while data := self._socket.recv(1 << 18):
                write_all(target, data)

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def call(self, request: Request[R], *, timeout_s: float = 30.0) -> R:
        """Send one request, return its reply. Raises the controller's error, UnreachableError if it dies,
        DeadlineExceededError."""
        for reply, _ in self.stream(request, timeout_s=timeout_s):
            return reply
        raise errors.UnreachableError(Text("control.no-reply", "the controller did not reply to {op}", op=request.OP))

    def post(self, request: Request[Any]) -> None:
        """Send one request without reading its replies. Raises UnreachableError."""
        try:
            self._send(request)
        except OSError as error:
            raise _ended(request) from error

    def stream(self, request: Request[R], *, timeout_s: float) -> Iterator[tuple[R, bytes]]:
        """Send one request, yield its replies as they arrive; `timeout_s` limits the wait for each."""
        op = request.OP
        self._socket.settimeout(timeout_s)
        try:
            self._send(request)
            while True:
                data = self._socket.recv(262144)
                if not data:
                    raise _ended(request)
                for header, body in self._reader.feed(data):
                    error = header.get("error") or {}
                    is_other = op not in ANY_PROTOCOL and header.get("protocol") != PROTOCOL
                    if is_other and error.get("code") != errors.ControllerReplacedError.code:
                        raise other_version(header.get("protocol"), PROTOCOL)
                    if not header.get("ok", True):
                        raise errors.AscendrunError.from_json(header["error"])
                    if not header.get("empty"):
                        yield request.REPLY.from_header(header), body
                    if header.get("last"):
                        return
        except socket.timeout as error:
            raise no_reply(op, timeout_s) from error
        except ConnectionError as error:
            raise _ended(request) from error

    def _send(self, request: Request[Any]) -> None:
        self._next_id += 1
        header = {"id": self._next_id, "op": request.OP, "protocol": PROTOCOL, "release": own_release()}
        header.update(request.to_header())
        self._socket.sendall(wire.pack(header, b""))


def no_reply(op: str, limit_s: float) -> errors.DeadlineExceededError:
    """Make the error for a controller that runs and does not reply."""
    return errors.DeadlineExceededError.of(
        "control.timeout", "the controller did not reply to {op} within {limit_s:g} s", op=op, limit_s=limit_s
    )


def _ended(request: Request[Any]) -> errors.UnreachableError:
    return errors.UnreachableError.of(
        "control.ended",
        "the controller ended during {op}",
        "repeat the command; it starts a new controller",
        op=request.OP,
    )
