"""paramiko's transport, modified: one read for many packets, data passed on in its own thread, no timers."""

from __future__ import annotations

import errno
import socket
import threading
import time
from typing import Any, Callable, Protocol

from ascendrun.head.ssh.paramiko_import import NeedRekeyException, common, paramiko
from ascendrun.head.ssh.transport import COMMAND_ENDED
from ascendrun.text import Text

READ_BYTES = 256 * 1024
STALL_S = 10.0
"""A write without progress for this many seconds ends the connection: half a packet cannot be taken back."""

IDLE_POLL_S = 5.0
"""Interval at which an idle connection checks its sinks; paramiko's own 0.1 s costs 5 % of a core at 256 hosts."""

_EXTENDED_STDERR = 1


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
        parts = [self._buffer[self._position :], self._take_remainder()]
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

    def _take_remainder(self) -> bytes:
        """Return the bytes that paramiko read beyond the banner line."""
        name = "_Packetizer__remainder"
        remainder: bytes = getattr(self, name)
        setattr(self, name, b"")
        return remainder

    def write_all(self, out: Any) -> None:
        view = memoryview(out)
        moved_at = time.monotonic()
        while view:
            try:
                sent = self._sock.send(view)
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


class Sink(Protocol):
    """Interface of a channel's owner; called in the transport's thread only."""

    def on_started(self) -> None:
        """Handle that the command was started."""

    def take(self, data: bytes, *, is_error: bool) -> None:
        """Handle received bytes."""

    def finish(self, reason: Text) -> None:
        """Handle the end of the data."""

    def on_idle_poll(self) -> None:
        """Handle IDLE_POLL_S without any event."""


class SshTransport(paramiko.Transport):
    """A paramiko Transport that reports its phases by events, and passes channels' data to their sinks immediately."""

    active: bool
    clear_to_send: threading.Event
    packetizer: Packetizer

    def __init__(self, sock: Any) -> None:
        super().__init__(sock, packetizer_class=Packetizer)
        self.sinks: dict[int, Sink] = {}
        self.has_banner = False
        self.banner_event = threading.Event()
        self.ready_event = threading.Event()
        self.ended_event = threading.Event()
        self.why_closed: Text | None = None
        self._held: list[Any] = []
        self.packetizer.on_idle = self._poll_sinks
        self.banner_timeout = 3600.0  # deadlines are kept by the caller, who knows the right error
        self.handshake_timeout = 3600.0

    def _check_banner(self) -> None:
        super()._check_banner()  # type: ignore[misc]  # paramiko's own, not in its stubs
        self.has_banner = True
        self.banner_event.set()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.banner_event.set()
            self.ready_event.set()
            self.ended_event.set()
            reason = self.why_closed or self.why_ended()
            for sink in list(self.sinks.values()):
                sink.finish(reason)

    def why_ended(self) -> Text:
        """Return one line on why the thread ended by itself."""
        error = self.saved_exception
        if error is None or isinstance(error, EOFError):
            return Text("ssh.connection-ended", "the connection ended")
        why = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        return Text("ssh.connection-failed", "the connection failed ({error})", error=why)

    def drop(self, reason: Text) -> None:
        """End everything immediately; the transport's thread finishes the sinks and closes the socket."""
        self.why_closed = self.why_closed or reason
        self.active = False
        self.packetizer.give_up()
        if not self.is_alive():
            self.sock.close()

    def _send_user_message(self, data: Any) -> None:
        """Send a message. In a key exchange the transport's thread must not wait: only it can finish the exchange."""
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            self._held.append(data)
            return
        super()._send_user_message(data)  # type: ignore[misc]  # paramiko's own, not in its stubs

    def _parse_newkeys(self, m: Any) -> None:
        super()._parse_newkeys(m)  # type: ignore[misc]  # paramiko's own, not in its stubs
        held, self._held = self._held, []
        for data in held:
            self._send_user_message(data)

    def _log(self, level: int, msg: Any, *args: Any) -> None:
        pass  # 36 calls in a handshake, without any use

    def _poll_sinks(self) -> None:
        for sink in list(self.sinks.values()):
            sink.on_idle_poll()

    def _give_success(channel: Any, message: Any) -> None:
        transport: SshTransport = channel.transport
        sink = transport.sinks.get(channel.chanid)
        if sink is not None:
            sink.on_started()
        channel._request_success(message)

    def _give_data(channel: Any, message: Any) -> None:
        transport: SshTransport = channel.transport
        sink = transport.sinks.get(channel.chanid)
        if sink is None:
            channel._feed(message)
            return
        data: bytes = message.get_binary()
        sink.take(data, is_error=False)
        transport._acknowledge(channel, len(data))

    def _give_error_data(channel: Any, message: Any) -> None:
        transport: SshTransport = channel.transport
        sink = transport.sinks.get(channel.chanid)
        if sink is None:
            channel._feed_extended(message)
            return
        kind = message.get_int()
        data: bytes = message.get_binary()
        if kind == _EXTENDED_STDERR:
            sink.take(data, is_error=True)
        transport._acknowledge(channel, len(data))

    def _give_close(channel: Any, message: Any) -> None:
        transport: SshTransport = channel.transport
        channel._handle_close(message)
        sink = transport.sinks.get(channel.chanid)
        if sink is not None:
            sink.finish(COMMAND_ENDED)

    def _acknowledge(self, channel: Any, size: int) -> None:
        """Let the other side send the same amount again; paramiko would do it when a reader thread takes the data."""
        grown = channel._check_add_window(size)
        if grown > 0:
            message = paramiko.Message()
            message.add_byte(common.cMSG_CHANNEL_WINDOW_ADJUST)
            message.add_int(channel.remote_chanid)
            message.add_int(grown)
            self._send_user_message(message)

    _channel_handler_table = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]  # paramiko's own, not in its stubs
        common.MSG_CHANNEL_SUCCESS: _give_success,
        common.MSG_CHANNEL_DATA: _give_data,
        common.MSG_CHANNEL_EXTENDED_DATA: _give_error_data,
        common.MSG_CHANNEL_CLOSE: _give_close,
    }
