"""The controller's door: a Unix socket (0600, peers of the same user only) that speaks the frames of node/wire."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError, ConflictError, DeadlineExceededError, UnreachableError
from ascendrun.node import wire
from ascendrun.text import Text

SOCKET_NAME = "controller.sock"
PROTOCOL = 2
"""Of the messages between commands and the controller; raised with every change that the other side must know."""
ANY_PROTOCOL = ("status", "shutdown")
"""Requests that a controller of any version serves: with them another one is found and stopped."""
_UCRED = struct.Struct("3i")

Answer = Callable[[Mapping[str, Any], bytes, bool], None]
"""answer(header, body, is_last): called once or, for streams, several times, from any thread."""


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """The socket's path through /proc/self/fd: a Unix socket's path may not exceed 107 bytes, a state dir's may."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


class ControlServer:
    """Listens in the state folder; hands each request to `handle(op, header, body, answer)` in a thread of its own."""

    def __init__(self, state_dir: Path, handle: Callable[[str, Mapping[str, Any], bytes, Answer], None]) -> None:
        self._path = state_dir / SOCKET_NAME
        self._handle = handle
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path.unlink(missing_ok=True)
        with _short_path(state_dir) as path:
            self._listener.bind(path)
        os.chmod(self._path, 0o600)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed
            if _peer_uid(peer) != os.getuid():
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), name="control-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        reader, outgoing = wire.FrameReader(), _Outgoing(peer)
        with peer:
            try:
                while True:
                    data = peer.recv(65536)
                    if not data:
                        return
                    for header, body in reader.feed(data):
                        op, answer = str(header.get("op")), _answerer(outgoing, header.get("id"))
                        if op in ANY_PROTOCOL or header.get("protocol") == PROTOCOL:
                            self._handle(op, header, body, answer)
                        else:
                            answer(error_answer(other_version(PROTOCOL, header.get("protocol"))), b"", True)
            except (OSError, wire.FrameError):
                return  # the client went away, or never was one of ours


class _Outgoing:
    """Frames on their way to one client. Never makes the sender wait: `exec … | less` stops reading for an hour."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.append(frame)
                return
            rest = self._send_now(frame)
            if rest:
                self._waiting.append(rest)
                threading.Thread(target=self._send_rest, name="control-answer", daemon=True).start()

    def _send_now(self, frame: bytes) -> bytes:
        """What the socket does not take at once; b"" also when the client has left: it wants no answer."""
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


def _answerer(outgoing: _Outgoing, request_id: Any) -> Answer:
    def answer(header: Mapping[str, Any], body: bytes, is_last: bool) -> None:
        outgoing.send(wire.pack({"re": request_id, "last": is_last, "protocol": PROTOCOL, **header}, body))

    return answer


def _peer_uid(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])


def other_version(controller: object, command: object) -> ConflictError:
    """The controller and the command that uses it are of different versions; None: one from before there were any."""
    return ConflictError(
        Text(
            "control.other-version",
            "the controller is of another version (protocol {controller}, this command uses {command})",
            controller=controller,
            command=command,
        ),
        hint=Text(
            "control.other-version.hint",
            "run `ascendrun controller stop`, then repeat the command; running jobs are not affected",
        ),
    )


def error_answer(error: AscendrunError) -> Mapping[str, Any]:
    """An error as the header of an answer."""
    return {"ok": False, "error": error.to_json()}


class ControlClient:
    """A connection to the running controller."""

    def __init__(self, state_dir: Path) -> None:
        """Raises UnreachableError when no controller listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_path(state_dir) as path:
                self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise UnreachableError(
                Text(
                    "control.not-running",
                    "no controller is running for {path}: {error}",
                    path=str(state_dir),
                    error=error.strerror,
                ),
                hint=Text("control.not-running.hint", "run it in the foreground: ascendrun controller run"),
            ) from error
        self._next_id = 0
        self._reader = wire.FrameReader()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def call(
        self, op: str, fields: Mapping[str, Any] | None = None, body: bytes = b"", *, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """One request, one answer. Raises what the controller answers, UnreachableError when it dies,
        DeadlineExceededError."""
        for header, _ in self.stream(op, fields, body, timeout_s=timeout_s):
            return header
        raise UnreachableError(Text("control.no-reply", "the controller did not reply to {op}", op=op))

    def post(self, op: str, fields: Mapping[str, Any]) -> None:
        """One request whose answers nobody will read. Raises UnreachableError."""
        self._next_id += 1
        try:
            self._socket.sendall(wire.pack({"id": self._next_id, "op": op, "protocol": PROTOCOL, **fields}, b""))
        except OSError as error:
            raise UnreachableError(
                Text("control.ended", "the controller ended during {op}", op=op),
                hint=Text("control.ended.hint", "repeat the command; it starts a new controller"),
            ) from error

    def stream(
        self, op: str, fields: Mapping[str, Any] | None = None, body: bytes = b"", *, timeout_s: float
    ) -> Iterator[tuple[dict[str, Any], bytes]]:
        """One request, its answers as they come; `timeout_s` bounds the wait for each."""
        self._next_id += 1
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(
                wire.pack({"id": self._next_id, "op": op, "protocol": PROTOCOL, **(fields or {})}, body)
            )
            while True:
                data = self._socket.recv(262144)
                if not data:
                    raise UnreachableError(
                        Text("control.ended", "the controller ended during {op}", op=op),
                        hint=Text("control.ended.hint", "repeat the command; it starts a new controller"),
                    )
                for header, answer_body in self._reader.feed(data):
                    if op not in ANY_PROTOCOL and header.get("protocol") != PROTOCOL:
                        raise other_version(header.get("protocol"), PROTOCOL)
                    if not header.get("ok", True):
                        raise AscendrunError.from_json(header["error"])
                    if not header.get("empty"):
                        yield header, answer_body
                    if header.get("last"):
                        return
        except socket.timeout as error:
            raise DeadlineExceededError(
                Text(
                    "control.timeout",
                    "the controller did not reply to {op} within {limit_s:g} s",
                    op=op,
                    limit_s=timeout_s,
                )
            ) from error
        except ConnectionError as error:
            raise UnreachableError(
                Text("control.ended", "the controller ended during {op}", op=op),
                hint=Text("control.ended.hint", "repeat the command; it starts a new controller"),
            ) from error
