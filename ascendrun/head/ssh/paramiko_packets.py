"""paramiko's reader and writer of packets, modified: one read for many packets, in threads that serve many connections;
and the socket below it."""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from contextlib import suppress
from typing import Any, Callable

from ascendrun.head.ssh.paramiko_import import NeedRekeyException, paramiko

READ_BYTES = 256 * 1024
LENGTH_BYTES = 4
PACKET_BYTES = 256 * 1024
"""No packet is longer in OpenSSH; ours have 32 KiB of data."""
STALL_S = 10.0
"""A write without progress for this many seconds ends the connection: half a packet cannot be taken back."""

QUICK_READS = 40
"""A handshake has fewer reads; immediate acknowledgements save 40 ms each time the peer's Nagle algorithm waits."""

_REMAINDER = "_Packetizer__remainder"
"""What paramiko read beyond the banner line."""
_AEAD, _ENCRYPT_THEN_MAC = "_Packetizer__aead_in", "_Packetizer__etm_in"
"""Whether what is read is encrypted so. With either, the length of a packet is not encrypted."""


class HandOver(BaseException):
    """The transport's own thread ends between two packets, and the hub serves the connection. No Exception: paramiko's
    thread would end the connection."""


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
        self.on_wait: Callable[[], None] = lambda: None
        self.hands_over = False
        """Whether the thread that reads ends before the next packet."""

    def has_unread(self) -> bool:
        """Return whether bytes have arrived that no thread has read yet; any thread."""
        is_ready: bool = self._sock.recv_ready()  # of QuickAckSocket, or of a channel through a jump host
        return is_ready

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
        if check_rekey and self.hands_over:  # between two packets
            self.hands_over = False
            raise HandOver()
        start, end, here = self._position, self._position + n, len(self._buffer)
        if end < here:
            self._position = end
            return self._buffer[start:end]
        if end == here:  # a thousand connections would keep what they read last, 256 KiB each
            piece = self._buffer[start:]
            self._buffer, self._position = b"", 0
            return piece
        return self._read_more(n, check_rekey=check_rekey)

    def read_now(self) -> bool:
        """Read what has arrived; return whether there was something. Raises EOFError at the stream's end."""
        piece = self._sock.recv_now(READ_BYTES)
        if piece is None:
            return False
        if not piece:
            raise EOFError()
        self._buffer, self._position = self._buffer[self._position :] + piece, 0
        return True

    def has_packet(self) -> bool:
        """Return whether all of the next packet was read; where its length is encrypted, whether some of it was."""
        here = len(self._buffer) - self._position
        if not (vars(self)[_AEAD] or vars(self)[_ENCRYPT_THEN_MAC]):
            return here > 0
        size = int.from_bytes(self._buffer[self._position : self._position + LENGTH_BYTES], "big")
        if here < LENGTH_BYTES:
            return False
        if size > PACKET_BYTES:
            raise paramiko.SSHException(f"a packet of {size} bytes")
        return here >= LENGTH_BYTES + size + self.get_mac_size_in()

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
        data = b"".join(parts)
        if have > n:
            self._buffer, self._position = data, n
        return data[:n]

    def _read_once(self) -> bytes | None:
        """Return bytes, or None if none arrived within the socket's timeout. Raises EOFError at the stream's end."""
        self.on_wait()
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
        return piece

    def _send(self, view: memoryview) -> int:
        """Send as much as there is room for; this may wait for the host, or for the connection to its jump host."""
        if isinstance(self._sock, QuickAckSocket):
            with suppress(BlockingIOError):
                return self._sock.send(view, socket.MSG_DONTWAIT)
        self.on_wait()
        sent: int = self._sock.send(view)
        return sent

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


class QuickAckSocket:
    """Socket that acknowledges its first reads immediately: the kernel resets TCP_QUICKACK, so each read sets it.

    The kernel keeps its timeouts: Python would call `poll` first, after which a thread may wait twice for the
    interpreter.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._quick_reads = QUICK_READS if hasattr(socket, "TCP_QUICKACK") else 0
        self.send, self.close = sock.send, sock.close
        self.getpeername, self.fileno = sock.getpeername, sock.fileno
        self.settimeout(sock.gettimeout() or 0.0)

    def settimeout(self, seconds: float) -> None:
        """Let a call wait so long; 0: as long as it takes."""
        self._sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
            )

    def recv(self, size: int) -> bytes:
        """Raises socket.timeout."""
        if self._quick_reads:
            self._quick_reads -= 1
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        try:
            return self._sock.recv(size)
        except BlockingIOError as error:
            raise socket.timeout() from error

    def recv_now(self, size: int) -> bytes | None:
        """Return what has arrived; None: nothing."""
        try:
            return self._sock.recv(size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def recv_ready(self) -> bool:
        """Return whether `recv` would return immediately; any thread."""
        ready = select.poll()
        ready.register(self._sock, select.POLLIN)
        return bool(ready.poll(0))

    def wake(self) -> None:
        """End the connection both ways, so that a thread waiting in `recv` returns immediately (unlike `close`)."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more: no thread waits

    @property
    def _closed(self) -> bool:
        """Return whether it is closed; read by paramiko's Transport when it stops."""
        return self._sock.fileno() < 0
