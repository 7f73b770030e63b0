"""A connection to the agent of one host: connects on demand, reconnects with back-off, calls with deadlines."""

from __future__ import annotations

import itertools
import random
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, Callable, Generic, Protocol

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError, InvalidInputError
from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol import agent_bootstrap
from ascendrun.head.protocol.agent_messages import AgentInfo, Ping
from ascendrun.head.protocol.file_messages import EVENTS
from ascendrun.head.protocol.messages import Message, R, Request
from ascendrun.head.ssh.transport import Backend, Connection, Deadlines, Receiver, Stream, StreamClosedError
from ascendrun.node import wire
from ascendrun.text import Text

SUSPECT_S = 6.0
UNREACHABLE_S = 15.0
AWAY_S = 5.0
"""After this many seconds between two ticks this process was suspended: hosts cannot be evaluated by that time."""
SEND_S = 30.0
FLOOD_FRAMES, FLOOD_S = 10_000, 10.0
"""More frames than this that change nothing, in this many seconds, end the connection. An agent sends 5 of them."""
BOOT_S = 60.0
"""Seconds from login to the agent's first message; slow startup files of a login shell cause most of it."""
_RETRY_S = (0.5, 15.0)
_HOPELESS_RETRY_S = 60.0
"""After a rejected key or a wrong host key only the operator can help: sshd punishes repeated attempts."""


@dataclass(frozen=True)
class Reply(Generic[R]):
    """Reply of an agent: a message and its body, or an error.

    `error`: the agent's, or "connection-lost", "deadline", "too-large" and "invalid-reply" of this side.
    """

    received: R | None
    body: bytes = b""
    error: Failure | None = None

    @property
    def message(self) -> R:
        """Return the message of a reply without an error."""
        assert self.received is not None
        return self.received


@dataclass
class _Call:
    request: Request[Any]
    body: bytes
    deadline_mono: float
    done: Callable[[Reply[Any]], None]


@dataclass(frozen=True)
class ConnectionListener:
    """Callbacks, called in the threads of the connection: they must not block.

    `on_event` is called in order of arrival; `on_down` each time an attempt to connect fails or a connection dies.
    """

    on_up: Callable[[AgentConnection], None]
    on_down: Callable[[AgentConnection, AscendrunError], None]
    on_event: Callable[[AgentConnection, Message, bytes], None]


class Fence(Protocol):
    """The term of a head. `allows`: whether a request may be sent now; any thread."""

    @property
    def head_id(self) -> str: ...

    @property
    def term(self) -> int: ...

    def allows(self, op: str) -> bool: ...


class AgentConnection:
    """Connection to one host. Everything public may be called from any thread and never blocks."""

    def __init__(
        self,
        host: Host,
        *,
        backend: Backend,
        image: agent_bootstrap.AgentImage,
        listener: ConnectionListener,
        connecting: Executor,
        sending: Executor,
        fence: Fence | None = None,
    ) -> None:
        self.host, self._fence = host, fence
        self._info: AgentInfo | None = None
        self.login = agent_bootstrap.Login()
        self.peer_address: str | None = None
        self.last_error: AscendrunError | None = None
        self.first_error: AscendrunError | None = None
        """The first one since it was connected: why it was lost. None: it is connected, or was not lost."""
        self._backend, self._image, self._listener = backend, image, listener
        self._connecting, self._sending = connecting, sending
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._epoch = 0
        self._connection: Connection | None = None
        self._stream: Stream | None = None
        self.is_up = self._is_connecting = self._is_draining = self._is_closed = self._is_reserved = False
        self._outbox: dict[int, _Call] = {}
        self._pending: dict[int, _Call] = {}
        self.failures = 0
        """Consecutive failed connects and lost connections."""
        self._retry_mono = 0.0
        self._boot_deadline_mono: float | None = None
        self._useless, self._rest_s = (0.0, 0), 0.0
        self.beat_s = self._told_beat_s = wire.BEAT_S
        """The interval of beats that the agent shall keep: the next request has it if it differs from the last one."""
        self._received_mono = self._sent_mono = self._ticked_mono = time.monotonic()
        self.heard_boot_s: float | None = None
        """Seconds from the boot of this machine to the last frame of an agent there; None: none came yet."""

    # State for callers

    @property
    def info(self) -> AgentInfo:
        """Return the info of the last agent that was connected. Call only after one was connected."""
        assert self._info is not None
        return self._info

    @property
    def is_resting(self) -> bool:
        """Return whether no reply, no frame of a running attempt, no retry and no start is awaited."""
        return self.is_up and self._rest_s > 0.0 and not self._pending and not self._outbox

    def liveness(self) -> str:
        """Return ALIVE, SUSPECT (6 s without a frame; later by as much as beats are rarer than BEAT_S) or UNREACHABLE
        (15 s, or a failed connect). Both are later by `_rest_s` for an agent that rests: it has announced that its next
        frame takes longer."""
        silence_s = time.monotonic() - self._received_mono - self._rest_s
        if silence_s >= UNREACHABLE_S or (self.failures and not self.is_up):
            return "UNREACHABLE"
        return "SUSPECT" if silence_s >= SUSPECT_S + self._told_beat_s - wire.BEAT_S else "ALIVE"

    def connect(self) -> None:
        """Start to connect now, without back-off, unless it is connected or connecting."""
        with self._lock:
            self._retry_mono = 0.0
            if self._is_reserved:
                self._is_reserved = self._is_connecting = False
        self.tick()

    def acquire(self) -> int | None:
        """Reserve the next attempt to connect for the caller; None if it is connected or connecting.

        End with `adopt` or `fail` and this number; `connect` takes the attempt back.
        """
        with self._lock:
            if self.is_up or self._is_connecting or self._is_closed:
                return None
            self._is_reserved = self._is_connecting = True
            self._epoch += 1
            return self._epoch

    def is_reserved(self, epoch: int) -> bool:
        """Return whether this attempt is still that of the caller of `acquire`."""
        return self._is_reserved and epoch == self._epoch

    def adopt(self, epoch: int, connection: Connection) -> None:
        """Start the agent on a connection that the caller made."""
        with self._lock:
            self._is_reserved = self._is_reserved and epoch != self._epoch  # `connect` does not take it back any more
        self._connecting.submit(self._start_agent, epoch, connection)

    def call(
        self, request: Request[R], body: bytes = b"", *, deadline_s: float, done: Callable[[Reply[R]], None]
    ) -> None:
        """Send a request; `done` gets exactly one Reply, within `deadline_s` also if the host never responds."""
        request_id = next(self._ids)
        call = _Call(request, body, time.monotonic() + deadline_s, done)
        with self._lock:
            self._outbox[request_id] = call
        self._pump()

    def tick(self) -> None:
        """Handle deadlines, missing frames and reconnects. Call a few times a second, more rarely if `is_resting`, and
        always within AWAY_S."""
        now = time.monotonic()
        expired: list[_Call] = []
        error: AscendrunError | None = None
        with self._lock:
            self._allow_for_pause(now)
            for calls in (self._pending, self._outbox):
                for request_id in [i for i, call in calls.items() if call.deadline_mono <= now]:
                    expired.append(calls.pop(request_id))
            is_silent = self.is_up and now - self._received_mono > UNREACHABLE_S + self._rest_s
            if is_silent and self._connection is not None and self._connection.has_unread():
                # it is this process that is late: the host is not lost, nor seen
                self._received_mono = now - SUSPECT_S - (self._told_beat_s - wire.BEAT_S)
            elif is_silent:
                error = agent_bootstrap.no_reply(self.host.name, UNREACHABLE_S)
            elif self._boot_deadline_mono is not None and now > self._boot_deadline_mono:
                error = agent_bootstrap.agent_start_timeout(self.host.name, BOOT_S)
            should_connect = not (self.is_up or self._is_connecting or self._is_closed) and now >= self._retry_mono
            if should_connect:
                self._is_connecting = True
                self._epoch += 1
            epoch = self._epoch
            must_beat = self.is_up and now - self._sent_mono > wire.HEAD_BEAT_S
        if must_beat:
            self._sent_mono = now
            self.call(Ping(), deadline_s=wire.HEAD_BEAT_S, done=lambda reply: None)
        self._pump()  # what waited for the lease of this head
        for call in expired:
            name, hint = self.host.name, self.last_error.hint if self.last_error else None
            late_reply = Text("agent.reply-timeout", "{host} did not reply in time", host=name)
            call.done(Reply(None, error=Failure("deadline", late_reply, hint, host=name)))
        if error is not None:
            self.fail(epoch, error)
        if should_connect:
            self._connecting.submit(self._connect, epoch)

    def _allow_for_pause(self, now: float) -> None:
        away_s, self._ticked_mono = now - self._ticked_mono, now
        if away_s < AWAY_S:
            return
        self._received_mono = min(now, self._received_mono + away_s)
        if self._boot_deadline_mono is not None:
            self._boot_deadline_mono += away_s
        for call in (*self._pending.values(), *self._outbox.values()):
            call.deadline_mono += away_s

    def close(self) -> None:
        """End the connection; every open call gets the error "connection-lost"."""
        with self._lock:
            self._is_closed = True
            epoch = self._epoch
        self.fail(epoch, agent_bootstrap.closed(self.host.name))
        with self._lock:
            rest, self._outbox = list(self._outbox.values()), {}
        for call in rest:
            call.done(Reply(None, error=Failure.of(agent_bootstrap.closed(self.host.name), "connection-lost")))

    # Connecting

    def _connect(self, epoch: int) -> None:
        try:
            connection = agent_bootstrap.connect(self._backend, self.host)
        except AscendrunError as error:
            self.fail(epoch, error)
            return
        self._start_agent(epoch, connection)

    def _start_agent(self, epoch: int, connection: Connection) -> None:
        with self._lock:
            stale = self._is_closed or epoch != self._epoch or not self._is_connecting
            if not stale:
                self._is_reserved = False
                self._connection = connection
        if stale:
            connection.close()
            return
        fence = None if self._fence is None else (self._fence.head_id, self._fence.term)
        bootstrap = agent_bootstrap.AgentBootstrap(self.host.name, self._image, fence)
        receiver = Receiver(
            on_data=lambda data: self._on_data(epoch, bootstrap, data),
            on_error_data=bootstrap.feed_error,
            on_closed=lambda reason, status: self.fail(epoch, bootstrap.why_closed(reason, status)),
        )
        try:
            stream = connection.open(self._image.login_command, receiver, deadline_s=Deadlines().open_s)
        except (AscendrunError, StreamClosedError) as error:
            self.fail(epoch, self._as_error(error))
            return
        with self._lock:
            if epoch == self._epoch:  # else it has failed already
                self._stream = stream
                if not self.is_up:  # the agent's first message may come before `open` returns
                    self._boot_deadline_mono = time.monotonic() + BOOT_S
        if bootstrap.needs_input():
            self._sending.submit(self._send_input, epoch, bootstrap, stream)

    def _send_input(self, epoch: int, bootstrap: agent_bootstrap.AgentBootstrap, stream: Stream) -> None:
        try:
            stream.send(bootstrap.make_input(), deadline_s=SEND_S)
        except (AscendrunError, StreamClosedError) as error:
            self.fail(epoch, error if isinstance(error, AscendrunError) else bootstrap.why_closed(error.reason, None))

    def _on_data(self, epoch: int, bootstrap: agent_bootstrap.AgentBootstrap, data: bytes) -> None:
        if epoch != self._epoch:
            return  # a connection that was given up
        self._received_mono = time.monotonic()
        try:
            for header, body in bootstrap.feed(data):
                self._on_frame(epoch, bootstrap, header, body)
            stream = self._stream  # None: the reply came before `open` returned; _connect checks again
            if stream is not None and bootstrap.needs_input():
                self._sending.submit(self._send_input, epoch, bootstrap, stream)
        except (ValueError, InvalidInputError) as error:  # FrameError is a ValueError
            self.fail(epoch, agent_bootstrap.invalid_data(self.host.name, error))
        except AscendrunError as error:
            self.fail(epoch, error)
        except Exception as error:  # a bug: the controller's log has the traceback
            traceback.print_exc()
            self.fail(epoch, agent_bootstrap.internal_failure(self.host.name, error))

    def _on_frame(
        self, epoch: int, bootstrap: agent_bootstrap.AgentBootstrap, header: Mapping[str, Any], body: bytes
    ) -> None:
        self.heard_boot_s = boot_s()
        number = header.get("re")
        if number is not None:
            with self._lock:
                call = self._pending.pop(number, None) if isinstance(number, int) else None
            if call is not None:
                call.done(read_reply(call.request, header, body))
            else:  # it came after its deadline
                self._count_useless()
            return
        kind = EVENTS.get(str(header.get("event")))
        if kind is AgentInfo:
            self._take_info(epoch, header, bootstrap.login())
        elif kind is not None:
            self._listener.on_event(self, kind.from_header(header), body)
        else:  # a heartbeat
            self._rest_s = wire.RESTING_BEAT_S - wire.BEAT_S if header.get("rests") is True else 0.0
            self._count_useless()

    def _count_useless(self) -> None:
        """Count a frame that changes nothing. Raises FrameError if there are too many of them."""
        now = time.monotonic()
        since_mono, count = self._useless
        self._useless = (now, 1) if now - since_mono > FLOOD_S else (since_mono, count + 1)
        if self._useless[1] > FLOOD_FRAMES:
            raise wire.FrameError(f"more than {FLOOD_FRAMES} messages without a request in {FLOOD_S:g} s")

    def _take_info(self, epoch: int, header: Mapping[str, Any], login: agent_bootstrap.Login) -> None:
        if header.get("protocol") != wire.PROTOCOL:
            self.fail(epoch, agent_bootstrap.other_version(self.host.name, header.get("protocol")))
            return
        info = AgentInfo.from_header(header)
        with self._lock:
            if epoch != self._epoch or self._is_closed:
                return
            self._info, self.login = info, login
            self.peer_address = self._connection.peer_address if self._connection else None
            self.is_up, self._is_connecting, self.failures = True, False, 0
            self.last_error = self.first_error = self._boot_deadline_mono = None
            self._rest_s, self._told_beat_s = 0.0, wire.BEAT_S
        self._listener.on_up(self)
        self._pump()

    def fail(self, epoch: int, error: AscendrunError) -> None:
        """End the connection of `epoch` (or its attempt): fail its calls, plan the next try."""
        with self._lock:
            if epoch != self._epoch or not (self.is_up or self._is_connecting):
                return
            self.is_up = self._is_connecting = self._is_reserved = False
            self._boot_deadline_mono = None
            self._epoch += 1
            self.failures += 1
            self.last_error, self.first_error = error, self.first_error or error
            self._retry_mono = time.monotonic() + _retry_after_s(self.failures, error)
            connection, self._connection, self._stream = self._connection, None, None
            lost, self._pending = list(self._pending.values()), {}
        if connection is not None:
            connection.close()
        for call in lost:
            call.done(Reply(None, error=Failure.of(error, "connection-lost")))
        self._listener.on_down(self, error)

    def _as_error(self, error: AscendrunError | StreamClosedError) -> AscendrunError:
        if isinstance(error, AscendrunError):
            return error
        return agent_bootstrap.on_host(self.host.name, error.reason, "connection-ended")

    # Sending: one task at a time drains the outbox, so frames keep their order and no caller's thread waits

    def _pump(self) -> None:
        with self._lock:
            if not self.is_up or self._is_draining or not self._outbox:
                return
            self._is_draining = True
        self._sending.submit(self._drain)

    def _next_allowed(self) -> int | None:
        """Return the first request that the fence allows; the others wait as for a host that is away."""
        fence, outbox = self._fence, self._outbox
        if fence is None:
            return next(iter(outbox), None)
        return next((number for number, call in outbox.items() if fence.allows(call.request.OP)), None)

    def _drain(self) -> None:
        while True:
            with self._lock:
                request_id = self._next_allowed()
                if not self.is_up or request_id is None or self._stream is None:
                    self._is_draining = False
                    return
                epoch, stream = self._epoch, self._stream
                call = self._pending[request_id] = self._outbox.pop(request_id)
                self._sent_mono = time.monotonic()
            try:
                header = {"id": request_id, "op": call.request.OP, **call.request.to_header()}
                if self.beat_s != self._told_beat_s:
                    header["beat_s"] = self._told_beat_s = self.beat_s
                stream.send(wire.pack(header, call.body), deadline_s=SEND_S)
            except (AscendrunError, StreamClosedError) as error:
                self.fail(epoch, self._as_error(error))
            except wire.FrameError as error:
                with self._lock:
                    self._pending.pop(request_id, None)
                refused = agent_bootstrap.on_host(self.host.name, str(error))
                call.done(Reply(None, error=Failure.of(refused, "too-large")))


def boot_s() -> float:
    """Return the seconds since this machine booted, also while it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_reply(request: Request[R], header: Mapping[str, Any], body: bytes) -> Reply[R]:
    """Return the reply to `request` in a frame; an unreadable reply is an error."""
    try:
        if header.get("ok"):
            return Reply(request.REPLY.from_header(header), body)
        return Reply(None, error=Failure.of_node(header.get("error") or {}))
    except InvalidInputError as error:
        reason: Text | str = error.problems[0].message
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = repr(error)
    message = Text("agent.invalid-reply", "invalid reply of the agent: {reason}", reason=reason)
    return Reply(None, error=Failure("invalid-reply", message))


def _retry_after_s(failures: int, error: AscendrunError) -> float:
    if agent_bootstrap.is_permanent(error):
        return _HOPELESS_RETRY_S
    first_s, most_s = _RETRY_S
    ceiling_s: float = min(most_s, first_s * 2.0 ** min(failures, 10))
    return random.uniform(ceiling_s / 2, ceiling_s)
