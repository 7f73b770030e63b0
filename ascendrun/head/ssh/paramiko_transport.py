"""paramiko's transport, modified (no timers), and connections that carry streams without reader threads: data is passed
on in the thread that serves the transport, its own until the login and then one of a hub. Made by paramiko_login.py."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any, Callable

from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.head.ssh.config import SshTarget
from ascendrun.head.ssh.hub import next_hub
from ascendrun.head.ssh.paramiko_import import common, paramiko
from ascendrun.head.ssh.paramiko_packets import HandOver, Packetizer, QuickAckSocket
from ascendrun.head.ssh.transport import CLOSED_HERE, COMMAND_ENDED, Data, Receiver, StreamClosedError, sending
from ascendrun.text import Text

KEX_MESSAGES = range(30, 42)
"""Those of a method of key exchange."""
PIECE_BYTES = 32 * 1024
IN_FLIGHT_BYTES = 256 * 1024
"""Maximum unacknowledged bytes: sshd buffers more than this inefficiently (25 ms of its CPU for each MB)."""

CLOSE_S = 2.0
"""Seconds that a closed stream waits for the other side's confirmation before it counts as closed anyway."""

_EXTENDED_STDERR = 1
_GONE = (EOFError, OSError, paramiko.SSHException)


class SshTransport(paramiko.Transport):
    """A paramiko Transport that reports its phases by events, and passes channels' data to their sinks immediately."""

    active: bool
    clear_to_send: threading.Event
    kex_engine: Any
    _channels: Any
    _expected_packet: tuple[int, ...]
    _handler_table: dict[int, Callable[[paramiko.Message], object]]
    packetizer: Packetizer

    def __init__(self, sock: Any) -> None:
        super().__init__(sock, packetizer_class=Packetizer)
        self.sinks: dict[int, ParamikoStream] = {}
        self.has_banner = False
        self.banner_event = threading.Event()
        self.ready_event = threading.Event()
        self.ended_event = threading.Event()
        self.why_closed: Text | None = None
        self._held: list[Any] = []
        self._server = 0
        self.packetizer.on_idle = self._poll_sinks
        self.banner_timeout = 3600.0  # deadlines are kept by the caller, who knows the right error
        self.handshake_timeout = 3600.0

    def _check_banner(self) -> None:
        super()._check_banner()  # type: ignore[misc]  # paramiko's own, not in its stubs
        self.has_banner = True
        self.banner_event.set()

    def _auth_trigger(self) -> None:
        super()._auth_trigger()  # type: ignore[misc]  # paramiko's own, not in its stubs
        self.packetizer.hands_over = isinstance(self.sock, QuickAckSocket)  # not a channel through a jump host

    def run(self) -> None:
        self._server = threading.get_ident()
        try:
            super().run()
        except HandOver:
            paramiko.transport._active_threads.remove(self)  # type: ignore[attr-defined]  # joined at the exit
            hub = next_hub()
            self.packetizer.on_wait = hub.step_aside
            hub.add(self)
            return
        self._finish_sinks()

    # For the hub

    def fileno(self) -> int:
        number: int = self.sock.fileno()
        return number

    def serve(self) -> bool:
        self._server = threading.get_ident()
        try:
            if not self.packetizer.read_now():
                self._poll_sinks()
            while self.active and self.packetizer.has_packet():
                self._handle(*self.packetizer.read_message())
            if self.packetizer.need_rekey() and not self.in_kex:
                self._send_kex_init()  # type: ignore[attr-defined]  # paramiko's own, not in its stubs
        except Exception as error:  # an internal one too: the connection ends with it
            self.saved_exception = error
            return False
        finally:
            self._server = 0
        return self.active

    def end(self) -> None:
        for channel in self._channels.values():
            channel._unlink()
        self.active = False
        self.packetizer.close()
        for event in list(self.channel_events.values()):
            event.set()
        self._finish_sinks()

    def _handle(self, kind: int, message: paramiko.Message) -> None:
        """Handle a message after the login."""
        if kind in (common.MSG_IGNORE, common.MSG_DEBUG):
            return
        if kind == common.MSG_DISCONNECT:
            raise EOFError()
        if self._expected_packet:  # in a key exchange
            if kind not in self._expected_packet:
                raise paramiko.SSHException(f"message {kind} in place of one of {self._expected_packet}")
            self._expected_packet = ()
            if kind in KEX_MESSAGES:
                self.kex_engine.parse_next(kind, message)
                return
        if kind in self._handler_table:
            self._handler_table[kind](message)
        elif kind in self._channel_handler_table:
            self._handle_in_channel(kind, message)
        elif kind != common.MSG_UNIMPLEMENTED:
            reply = paramiko.Message()
            reply.add_byte(common.cMSG_UNIMPLEMENTED)
            reply.add_int(message.seqno)
            self._send_message(reply)  # type: ignore[attr-defined]  # paramiko's own, not in its stubs

    def _handle_in_channel(self, kind: int, message: paramiko.Message) -> None:
        number = message.get_int()
        channel = self._channels.get(number)
        if channel is not None:
            self._channel_handler_table[kind](channel, message)
        elif number not in self.channels_seen:
            raise paramiko.SSHException(f"message {kind} for channel {number}, which was not opened")

    def _finish_sinks(self) -> None:
        self.banner_event.set()
        self.ready_event.set()
        self.ended_event.set()
        reason = self.why_closed or self.why_ended()
        for sink in list(self.sinks.values()):
            sink.finish(reason)

    def why_ended(self) -> Text:
        """Return one line on why the connection ended by itself."""
        error = self.saved_exception
        if error is None or isinstance(error, EOFError):
            return Text("ssh.connection-ended", "the connection ended")
        why = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        return Text("ssh.connection-failed", "the connection failed ({error})", error=why)

    def drop(self, reason: Text) -> None:
        """End everything immediately; the thread that serves it finishes the sinks and closes the socket."""
        self.why_closed = self.why_closed or reason
        self.active = False
        self.packetizer.give_up()
        if self.ident is None:  # no thread serves it
            self.sock.close()

    def _send_user_message(self, data: Any) -> None:
        """Send a message. In a key exchange the thread that serves the transport must not wait: only it can finish the
        exchange."""
        if self._server == threading.get_ident() and not self.clear_to_send.is_set():
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
        sink = channel.transport.sinks.get(channel.chanid)
        if sink is not None:
            sink.on_started()
        channel._request_success(message)

    def _give_data(channel: Any, message: Any) -> None:
        sink = channel.transport.sinks.get(channel.chanid)
        if sink is None:
            channel._feed(message)
            return
        data: bytes = message.get_binary()
        sink.take(data, is_error=False)
        channel.transport._acknowledge(channel, len(data))

    def _give_error_data(channel: Any, message: Any) -> None:
        sink = channel.transport.sinks.get(channel.chanid)
        if sink is None:
            channel._feed_extended(message)
            return
        kind = message.get_int()
        data: bytes = message.get_binary()
        if kind == _EXTENDED_STDERR:
            sink.take(data, is_error=True)
        channel.transport._acknowledge(channel, len(data))

    def _give_close(channel: Any, message: Any) -> None:
        channel._handle_close(message)
        sink = channel.transport.sinks.get(channel.chanid)
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


class ParamikoStream:
    """One command on the host; implementation of `transport.Stream`."""

    def __init__(self, transport: SshTransport, channel: Any, receiver: Receiver) -> None:
        self._transport = transport
        self._channel = channel
        self._receiver = receiver
        self._room_at_start: int = channel.out_window_size
        self._send_lock = threading.Lock()
        self._start_lock = threading.Lock()
        self._has_started = False
        self._is_forgotten = False
        self._is_finished = False
        self._closing_until: float | None = None

    # -- the owner's side

    def send(self, data: Data, *, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        view = memoryview(data).cast("B")
        with sending(self._send_lock, deadline_s):
            while view:
                size = self._claim_room(len(view), until, deadline_s)
                self._write(view[:size])
                view = view[size:]

    def close_input(self) -> None:
        with suppress(*_GONE):  # `on_closed` reports it
            self._channel.shutdown_write()

    def close(self) -> None:
        if self._closing_until is None:
            self._closing_until = time.monotonic() + CLOSE_S
        with suppress(*_GONE):  # `on_closed` reports it
            self._channel.close()

    def _claim_room(self, wanted: int, until: float, deadline_s: float) -> int:
        """Wait until some of `wanted` bytes may be sent, and reserve that many. Raises StreamClosedError,
        DeadlineExceededError."""
        channel = self._channel
        with channel.lock:
            while True:
                if channel.closed or channel.eof_sent or not self._transport.active:
                    raise StreamClosedError()
                in_flight = self._room_at_start - channel.out_window_size
                room = min(channel.out_window_size, IN_FLIGHT_BYTES - in_flight)
                if room > 0:
                    break
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceededError.of(
                        "ssh.input-timeout",
                        "the host did not accept more input within {limit_s:g} s",
                        "check that the command reads its input and that the network is not congested",
                        limit_s=deadline_s,
                    )
                channel.out_buffer_cv.wait(left_s)
            size: int = min(wanted, room, PIECE_BYTES, channel.out_max_packet_size)
            channel.out_window_size -= size
            return size

    def _write(self, piece: memoryview) -> None:
        message = paramiko.Message()
        message.add_byte(common.cMSG_CHANNEL_DATA)
        message.add_int(self._channel.remote_chanid)
        message.add_string(bytes(piece))
        _send(self._transport, message)

    # -- the connection's side

    def take(self, data: bytes, *, is_error: bool) -> None:
        if self._closing_until is None:
            (self._receiver.on_error_data if is_error else self._receiver.on_data)(data)

    def on_started(self) -> None:
        with self._start_lock:
            self._has_started = not self._is_forgotten

    def finish(self, reason: Text) -> None:
        self._transport.sinks.pop(self._channel.chanid, None)
        if self._is_finished or not self._has_started:
            return
        self._is_finished = True
        status: int = self._channel.exit_status
        self._receiver.on_closed(reason, status if status >= 0 else None)

    def on_idle_poll(self) -> None:
        if self._closing_until is not None and time.monotonic() > self._closing_until:
            self.finish(CLOSED_HERE)

    def forget(self) -> bool:
        """Stop calls to the receiver after a failed start. Return False if it succeeded at the last moment."""
        with self._start_lock:
            self._is_forgotten = not self._has_started
        if self._is_forgotten:
            self._transport.sinks.pop(self._channel.chanid, None)
            self.close()
        return self._is_forgotten


class ParamikoConnection:
    """An authenticated connection to one host; implementation of `transport.Connection`."""

    def __init__(self, transport: SshTransport, target: SshTarget, peer_address: str | None) -> None:
        self.peer_address = peer_address
        self.transport = transport
        self._target = target

    def open(self, command: str, receiver: Receiver, *, deadline_s: float) -> ParamikoStream:
        """Open as `transport.Connection.open`. Raises UnreachableError also if sshd refuses a session (MaxSessions)."""
        until = time.monotonic() + deadline_s
        channel = self._open_channel(until, deadline_s)
        stream = ParamikoStream(self.transport, channel, receiver)
        self.transport.sinks[channel.chanid] = stream
        try:
            self._start(channel, command, until, deadline_s)
        except Exception:  # any error: a receiver that got the end already needs no second report
            if stream.forget():
                raise
        except BaseException:  # ^C, or an internal error: new data has no reader
            stream.forget()
            stream.close()
            raise
        return stream

    def has_unread(self) -> bool:
        return self.transport.packetizer.has_unread()

    def close(self) -> None:
        self.transport.drop(CLOSED_HERE)

    def _open_channel(self, until: float, deadline_s: float) -> Any:
        while True:
            left_s = until - time.monotonic()
            try:
                return self.transport.open_session(timeout=max(left_s, 0.001))
            except paramiko.ChannelException as error:
                # with MaxSessions 1 the last session's slot is free only once its process was reaped
                pause_s = random.uniform(0.02, 0.1)
                if self.transport.sinks or left_s <= pause_s:
                    raise UnreachableError.of(
                        "ssh.session-rejected",
                        "{host} ({endpoint}): sshd rejected another session ({error})",
                        "raise MaxSessions in sshd_config on the host",
                        **self._target.names,
                        error=error.text,
                    ) from error
                time.sleep(pause_s)
            except _GONE as error:
                raise self._no_reply(deadline_s, error) from error

    def _start(self, channel: Any, command: str, until: float, deadline_s: float) -> None:
        message = paramiko.Message()
        message.add_byte(common.cMSG_CHANNEL_REQUEST)
        message.add_int(channel.remote_chanid)
        message.add_string("exec")
        message.add_boolean(True)
        message.add_string(command)
        channel._event_pending()
        _send(self.transport, message)
        replied = channel.event.wait(max(until - time.monotonic(), 0.001))
        if replied and channel.event_ready:
            return
        if replied and self.transport.active:
            raise UnreachableError.of(
                "ssh.command-rejected",
                "{host} ({endpoint}): sshd rejected the command",
                "check ForceCommand, the login shell and restrictions of the key on the host",
                **self._target.names,
            )
        raise self._no_reply(deadline_s, None)

    def _no_reply(self, deadline_s: float, error: BaseException | None) -> Exception:
        if self.transport.active:
            return DeadlineExceededError.of(
                "ssh.command-timeout",
                "{host} ({endpoint}): the command was not started within {limit_s:g} s",
                **self._target.names,
                limit_s=deadline_s,
            )
        return StreamClosedError(self.transport.why_closed or self.transport.why_ended())


def _send(transport: SshTransport, message: Any) -> None:
    try:
        transport._send_user_message(message)
    except _GONE as error:
        transport.drop(transport.why_ended())
        raise StreamClosedError(transport.why_ended()) from error
    if not transport.active:
        raise StreamClosedError(transport.why_closed or transport.why_ended())
