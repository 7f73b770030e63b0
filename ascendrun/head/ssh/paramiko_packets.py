"""paramiko's reader and writer of packets, modified: one read for many packets, and turns between connections."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
import time
from typing import Any, Callable

from ascendrun.head.ssh.paramiko_import import NeedRekeyException, paramiko

READ_BYTES = 256 * 1024
STALL_S = 10.0
"""A write without progress for this many seconds ends the connection: half a packet cannot be taken back."""

TURNS = itertools.cycle((threading.Lock(), threading.Lock()))
"""As many connections handle at a time what arrived. The threads of the others wait here, not for the interpreter's
lock: each thread that waits for that one lets the controller's own wait up to 5 ms more."""
PATIENCE_S = 10.0
"""A thread that waited so long for its turn takes none: the one that has it waits for a disk."""

_REMAINDER = "_Packetizer__remainder"
"""What paramiko read beyond the banner line."""


class Packetizer(paramiko.packet.Packetizer):
    """Packetizer that reads 256 KiB at a time, not each packet's head and body separately, and keeps deadlines."""

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self._sock = sock
        self._buffer = b""
        self._position = 0
        self._handshake_until: float | None = None
        self.preamble: list[str] = []
        self.on_idle: Callable[[], None] = lambda: None
        self._turn, self._has_turn, self._reader = next(TURNS), False, 0

    def end_turn(self) -> None:
        """Let another connection's thread handle what it received; called in this connection's thread."""
        if self._has_turn:
            self._has_turn = False
            self._turn.release()

    def _take_turn(self) -> None:
        self._reader = threading.get_ident()
        self._has_turn = self._turn.acquire(timeout=PATIENCE_S)

    def give_up(self) -> None:
        """End reads and writes immediately, leaving the socket open: its number must not be reused under a reader."""
        self._Packetizer__closed = True
        wake = getattr(self._sock, "wake", self._sock.close)  # a channel through a jump host wakes on close
        wake()

    def readline(self, timeout: float) -> str:
        line: str = super().readline(timeout)
        self.preamble.append(line)
        return line

    def start_handshake(self, timeout: float) -> None:
        self._handshake_until = time.monotonic() + timeout

    def handshake_timed_out(self) -> bool:
        return self._handshake_until is not None and time.monotonic() > self._handshake_until

    def complete_handshake(self) -> None:
        self._handshake_until = None

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        start, end = self._position, self._position + n
        if end <= len(self._buffer):
            self._position = end
            return self._buffer[start:end]
        return self._read_more(n, check_rekey=check_rekey)

    def _read_more(self, n: int, *, check_rekey: bool) -> bytes:
        parts = [self._buffer[self._position :], vars(self)[_REMAINDER]]
        vars(self)[_REMAINDER] = b""
        have = sum(map(len, parts))
        self._buffer, self._position = b"", 0
        while have < n:
            if self.handshake_timed_out():
                raise EOFError()
            piece = self._read_once()
            if piece is not None:
                parts.append(piece)
                have += len(piece)
                continue
            if self.closed:
                raise EOFError()
            if check_rekey and have == 0 and self.need_rekey():
                raise NeedRekeyException()
            self.on_idle()
        self._buffer, self._position = b"".join(parts), n
        return self._buffer[:n]

    def _read_once(self) -> bytes | None:
        """Return bytes, or None if none arrived within the socket's timeout. Raises EOFError at the stream's end."""
        self.end_turn()
        try:
            piece: bytes = self._sock.recv(READ_BYTES)
        except socket.timeout:
            return None
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return None
            if self.closed:
                raise EOFError() from error
            raise
        if not piece:
            raise EOFError()
        self._take_turn()
        return piece

    def _send(self, view: memoryview) -> int:
        """Send as much as there is room for; this may wait for the host, or for the connection to its jump host."""
        had_turn = self._has_turn and threading.get_ident() == self._reader
        if had_turn:
            self.end_turn()
        try:
            sent: int = self._sock.send(view)
            return sent
        finally:
            if had_turn:
                self._take_turn()

    def write_all(self, out: Any) -> None:
        view = memoryview(out)
        moved_at = time.monotonic()
        while view:
            try:
                sent = self._send(view)
            except socket.timeout:
                sent = 0
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise EOFError() from error
                sent = 0
            if sent:
                view, moved_at = view[sent:], time.monotonic()
            elif self.closed or time.monotonic() - moved_at > STALL_S:
                raise EOFError()
