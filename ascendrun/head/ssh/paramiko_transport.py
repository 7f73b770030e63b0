"""A connection through paramiko that carries streams without reader threads; made by paramiko_login.py."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.head.ssh.config import SshTarget
from ascendrun.head.ssh.connection import SshTransport
from ascendrun.head.ssh.paramiko_import import common, paramiko
from ascendrun.head.ssh.transport import CLOSED_HERE, Data, Receiver, StreamClosedError, sending
from ascendrun.text import Text

PIECE_BYTES = 32 * 1024
IN_FLIGHT_BYTES = 256 * 1024
"""Maximum unacknowledged bytes: sshd buffers more than this inefficiently (25 ms of its CPU for each MB)."""

CLOSE_S = 2.0
"""Seconds that a closed stream waits for the other side's confirmation before it counts as closed anyway."""


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
        try:
            self._channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException):
            pass  # gone already: `on_closed` reports it

    def close(self) -> None:
        if self._closing_until is None:
            self._closing_until = time.monotonic() + CLOSE_S
        try:
            self._channel.close()
        except (OSError, EOFError, paramiko.SSHException):
            pass  # gone already: `on_closed` reports it

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
                    raise DeadlineExceededError(
                        Text(
                            "ssh.input-timeout",
                            "the host did not accept more input within {limit_s:g} s",
                            limit_s=deadline_s,
                        ),
                        hint=Text(
                            "ssh.input-timeout.hint",
                            "check that the command reads its input and that the network is not congested",
                        ),
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
                    raise UnreachableError(
                        Text(
                            "ssh.session-rejected",
                            "{host}: sshd rejected another session ({error})",
                            host=self._target.label,
                            error=error.text,
                        ),
                        hint=Text("ssh.session-rejected.hint", "raise MaxSessions in sshd_config on the host"),
                    ) from error
                time.sleep(pause_s)
            except (paramiko.SSHException, EOFError, OSError) as error:
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
            raise UnreachableError(
                Text("ssh.command-rejected", "{host}: sshd rejected the command", host=self._target.label),
                hint=Text(
                    "ssh.command-rejected.hint",
                    "check ForceCommand, the login shell and restrictions of the key on the host",
                ),
            )
        raise self._no_reply(deadline_s, None)

    def _no_reply(self, deadline_s: float, error: BaseException | None) -> Exception:
        if self.transport.active:
            return DeadlineExceededError(
                Text(
                    "ssh.command-timeout",
                    "{host}: the command was not started within {limit_s:g} s",
                    host=self._target.label,
                    limit_s=deadline_s,
                )
            )
        return StreamClosedError(self.transport.why_closed or self.transport.why_ended())


def _send(transport: SshTransport, message: Any) -> None:
    try:
        transport._send_user_message(message)
    except (EOFError, OSError, paramiko.SSHException) as error:
        transport.drop(transport.why_ended())
        raise StreamClosedError(transport.why_ended()) from error
    if not transport.active:
        raise StreamClosedError(transport.why_closed or transport.why_ended())
