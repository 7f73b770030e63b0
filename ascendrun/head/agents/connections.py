"""All connections of a controller to agents: one for each way to connect to a host, made on demand.

On a host without an agent the login itself starts a command; its arguments are never parsed by a shell. The connection
then rests for REST_S: it takes the next command, behind which the agent starts, or whatever else needs an agent.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Callable, NamedTuple, Protocol

from ascendrun.core.errors import AscendrunError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.agent_bootstrap import AgentImage, connect
from ascendrun.head.protocol.agent_messages import Exec, ExecReply
from ascendrun.head.protocol.messages import R, Request
from ascendrun.head.protocol.remote import AgentConnection, ConnectionListener, Fence, Reply
from ascendrun.head.ssh.transport import Backend, Connection, Deadlines, Receiver, Stream, StreamClosedError
from ascendrun.head.waiting import in_background
from ascendrun.node.wire import beat_interval_s
from ascendrun.text import Text

CONNECTING_AT_ONCE = 32
"""More concurrent handshakes compete for the interpreter lock: about 32 measured best for any number of hosts."""
SENDING_AT_ONCE = 16
MANY, TURNS, RESTING_TURNS = 256, 4, 2
"""More connections than MANY have their deadlines checked in up to so many turns, within a second or so, and those that
rest in two seconds: far from AWAY_S, after which silence would be forgiven as a suspension of this process."""
TURN_SLACK_S = 0.1
REST_S = 60.0
"""Seconds after its command in which a connection without an agent is kept for the next one."""


class Links(Protocol):
    """Connections to hosts. `post` runs a call in the controller's thread, in order."""

    def get(self, host: Host) -> AgentConnection: ...

    def post(self, call: Callable[[], None]) -> None: ...


class Resting(NamedTuple):
    """A connection without an agent after its command. `turn`: the attempt of its link that `run_once` reserved."""

    turn: int
    connection: Connection
    since_mono: float


class Connections:
    """Connections of a controller, as Links. `get` and use: any thread; `run_once`, `start_agents`, `tick`: one
    thread."""

    def __init__(
        self,
        backend: Backend,
        image: AgentImage,
        listener: ConnectionListener,
        post: Callable[[Callable[[], None]], None],
        fence: Fence | None = None,
    ) -> None:
        self.backend, self._image, self._listener, self.post = backend, image, listener, post
        self._fence = fence
        self._connecting = ThreadPoolExecutor(CONNECTING_AT_ONCE, thread_name_prefix="connect")
        self._sending = ThreadPoolExecutor(SENDING_AT_ONCE, thread_name_prefix="send")
        self._links: dict[str, AgentConnection] = {}
        self._making = threading.Lock()
        self._resting: dict[str, Resting] = {}
        self._used_again: deque[Callable[[], None]] = deque()
        self._ticked_mono, self._turn = float("-inf"), 0
        self.busy_hosts = 0
        """Hosts of live jobs. The more there are, the rarer are their beats."""

    def get(self, host: Host) -> AgentConnection:
        """Return the connection to `host`, which starts to connect; hosts with equal connection settings share it."""
        known = self.find(host)
        if known is not None and known.is_up:
            return known  # asked a thousand times a second
        with self._making:
            link, resting = self._known(host), self._resting.pop(dialled(host), None)
        if resting is not None:
            link.adopt(resting.turn, resting.connection)
        link.tick()
        return link

    def find(self, host: Host) -> AgentConnection | None:
        """Return the connection to `host`, None: none was made."""
        return self._links.get(dialled(host))

    def forget(self, host: Host) -> None:
        """Close the connection to a host that will not be there again."""
        with self._making:
            link, resting = self._links.pop(dialled(host), None), self._resting.pop(dialled(host), None)
        if resting is not None:
            resting.connection.close()
        if link is not None:
            link.close()

    def run_once(
        self, host: Host, request: Exec, *, deadline_s: float, done: Callable[[Reply[ExecReply]], None]
    ) -> bool:
        """Run a command on a host that has no agent and runs no such command, and let the connection rest.

        False: use the host's agent.
        """
        if self._fence is not None:
            return False  # the agent refuses it where this head was superseded
        with self._making:
            link, resting = self._known(host), self._resting.pop(dialled(host), None)
        turn = link.acquire() if resting is None else resting.turn
        if turn is None:
            return False
        connection = None if resting is None else resting.connection

        def ended(connection: Connection) -> None:
            if resting is not None:
                self._used_again.append(partial(link.adopt, turn, connection))
            else:
                self._rest(link, turn, connection)

        command = OneShotCommand(link, turn, request, self.backend, connection, deadline_s, done, ended)
        self._connecting.submit(command.run)
        return True

    def _rest(self, link: AgentConnection, turn: int, connection: Connection) -> None:
        with self._making:
            if link.is_reserved(turn):
                self._resting[dialled(link.host)] = Resting(turn, connection, time.monotonic())
                return
        connection.close()  # an agent was needed meanwhile, and has a connection

    def start_agents(self) -> None:
        """Start agents on the connections that have had a second command.

        Not earlier: while replies are awaited, agents would only slow down the remaining hosts.
        """
        while self._used_again:
            self._used_again.popleft()()

    def _known(self, host: Host) -> AgentConnection:
        """Return the link to a host; call with `_making`: a second one for it would never be closed."""
        key = dialled(host)
        link = self._links.get(key)
        if link is None:
            link = AgentConnection(
                host,
                backend=self.backend,
                image=self._image,
                listener=self._listener,
                connecting=self._connecting,
                sending=self._sending,
                fence=self._fence,
            )
            self._links[key] = link
        return link

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self._links)

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(tuple(self._links.values()))

    def tick(self, now: float | None = None) -> None:
        """Call at least once a second. Where it is called more often, many connections take turns; those that rest
        always do. `now`: monotonic."""
        now, before = time.monotonic() if now is None else now, self._ticked_mono
        self._close_rested(now - REST_S)
        links = tuple(self._links.values())
        turns = min(TURNS, 1 + len(links) // MANY) if now - before < 1.0 / TURNS + TURN_SLACK_S else 1
        self._ticked_mono, self._turn = now, self._turn + 1
        resting = self._turn // turns % RESTING_TURNS
        beat_s = beat_interval_s(min(self.busy_hosts, len(links)))
        for place, link in enumerate(links[self._turn % turns :: turns]):
            if place % RESTING_TURNS == resting or not link.is_resting:
                link.beat_s = beat_s
                link.tick()

    def _close_rested(self, until_mono: float) -> None:
        with self._making:
            over = {host: one for host, one in self._resting.items() if one.since_mono <= until_mono}
            for host in over:
                del self._resting[host], self._links[host]
        for one in over.values():
            one.connection.close()

    def close(self) -> None:
        self._close_rested(time.monotonic())
        links, self._links = tuple(self._links.values()), {}
        for link in links:
            link.close()
        self._connecting.shutdown(wait=False, cancel_futures=True)
        self._sending.shutdown(wait=False, cancel_futures=True)


def ask(links: Links, host: Host, request: Request[R], *, deadline_s: float, then: Callable[[Reply[R]], None]) -> None:
    """Send a request to a host; `then` gets the reply in the controller's thread."""
    links.get(host).call(request, deadline_s=deadline_s, done=lambda reply: links.post(partial(then, reply)))


def post_later(links: Links, seconds: float, call: Callable[[], None]) -> None:
    """Post a call to the controller's thread after some seconds."""
    in_background(partial(links.post, call), "later", after_s=seconds)


def dialled(host: Host) -> str:
    """Return a key that is equal for hosts that share a connection. It is kept with the host."""
    kept = vars(host)
    if _KEY not in kept:
        kept[_KEY] = repr((host.name, host.addr, host.user, host.port, host.engine, host.allocation))
    key: str = kept[_KEY]
    return key


_KEY = "_dialled"
MAGIC = b"\nASCENDRUN-ONCE\n"
"""Output before it comes from the login's startup files."""

TIMED_OUT = 124
SEND_S = 30.0

# The arguments come on standard input, a line each: "=" precedes literal text, "%" text for printf's %b, which
# costs a fork. They become arguments and nothing else.
# No backslash, newline, exclamation mark or single quote may be in the line (csh and fish parse those).
_SHELL = (
    "echo; echo ASCENDRUN-ONCE; set --; "
    "while IFS= read -r w; do "
    'case $w in =*) w=${w#=}. ;; *) w=$(printf %b "${w#?}.") ;; esac; set -- "$@" "${w%.}"; done; '
    't=$1; shift; if command -v timeout >/dev/null 2>&1; then exec timeout -k 2 "$t" "$@" </dev/null; '
    'else exec "$@" </dev/null; fi'
)
COMMAND = f"exec /bin/sh -c '{_SHELL}'"


def encode_argv(argv: Sequence[str]) -> bytes:
    """Encode the arguments as COMMAND reads them. Raises ValueError on a NUL, which no argument can contain."""
    lines = []
    for argument in argv:
        data = argument.encode("utf-8", "surrogateescape")
        if b"\0" in data:
            raise ValueError("an argument cannot hold a NUL")
        if all(32 <= byte < 127 for byte in data):
            lines.append(b"=" + data)
        else:
            lines.append(b"%" + re.sub(rb"[^A-Za-z0-9]", lambda odd: b"\\0%03o" % odd.group()[0], data))
    return b"".join(line + b"\n" for line in lines)


class OneShotCommand:
    """Connects `link` in its `turn`, then runs a command and calls `done` exactly once.

    `request`: as for an agent, so that callers are independent of the runner. If it cannot connect, the link gets the
    request, in case it becomes available within `deadline_s`. `connection`: one of this turn, None or lost: a new one
    is made. `ended` gets the connection after the command.
    """

    def __init__(
        self,
        link: AgentConnection,
        turn: int,
        request: Exec,
        backend: Backend,
        connection: Connection | None,
        deadline_s: float,
        done: Callable[[Reply[ExecReply]], None],
        ended: Callable[[Connection], None],
    ) -> None:
        self._link, self._turn, self._host, self._backend = link, turn, link.host, backend
        self._request, self._deadline_s, self._done, self._ended = request, deadline_s, done, ended
        self._out, self._err = _Part(request.max_bytes, after=MAGIC), _Part(request.max_bytes)
        self._connection = connection
        self._stream: Stream | None = None
        self._is_over = threading.Lock()
        self._started_mono = time.monotonic()

    def run(self) -> None:
        """Run in a worker thread: blocks for the connect, not for the command."""
        receiver = Receiver(self._out.take, self._err.take, self._closed)
        if self._connection is not None:
            try:
                self._send(self._connection.open(COMMAND, receiver, deadline_s=Deadlines().open_s))
                return
            except (AscendrunError, StreamClosedError):  # it was lost while it rested
                self._connection.close()
        try:
            connection = connect(self._backend, self._host)
        except AscendrunError as error:
            self._link.call(self._request, deadline_s=self._deadline_s, done=self._done)
            self._link.fail(self._turn, error)
            return
        self._connection = connection
        try:
            self._send(connection.open(COMMAND, receiver, deadline_s=Deadlines().open_s))
        except AscendrunError as error:
            self._closed(error.message, None)
        except StreamClosedError as error:
            self._closed(error.reason, None)

    def _send(self, stream: Stream) -> None:
        self._stream, self._started_mono = stream, time.monotonic()
        argv = [f"{self._request.timeout_s:g}", *self._request.argv]
        try:
            stream.send(encode_argv(argv), deadline_s=SEND_S)
            stream.close_input()
        except AscendrunError as error:
            self._closed(error.message, None)
        except StreamClosedError as error:
            self._closed(error.reason, None)
        except ValueError as error:
            self._closed(str(error), None)

    def _closed(self, reason: Text | str, status: int | None) -> None:
        if not self._is_over.acquire(blocking=False):
            return  # reported already
        connection = self._connection
        assert connection is not None
        if status is None:
            connection.close()
            error = UnreachableError.of(
                "agent.connection-lost",
                "{host}: connection lost while the command was running: {reason}",
                host=self._host.name,
                reason=reason,
                why_lost="connection-ended",
            )
            self._done(Reply(None, error=Failure.of(error, "connection-lost")))
            self._link.fail(self._turn, error)
            return
        signal = status - 128 if status > 128 else None
        ended = ExecReply(
            code=None if signal else status,
            signal=signal,
            # `timeout` exits with 124, and so may a command: check the run time too
            timed_out=status == TIMED_OUT and time.monotonic() - self._started_mono >= self._request.timeout_s,
            out_bytes=len(self._out.data),
            err_bytes=len(self._err.data),
            truncated=self._out.is_cut or self._err.is_cut,
        )
        self._ended(connection)
        self._done(Reply(ended, bytes(self._out.data + self._err.data)))


class _Part:
    """Output of one stream: its first bytes, `after` a magic text if there is one."""

    def __init__(self, limit: int, after: bytes = b"") -> None:
        self.data = bytearray()
        self.is_cut = False
        self._limit, self._after = limit, after

    def take(self, data: bytes) -> None:
        self.data += data
        if self._after:
            at = self.data.find(self._after)
            if at < 0:
                del self.data[: max(0, len(self.data) - len(self._after))]
                return
            del self.data[: at + len(self._after)]
            self._after = b""
        if len(self.data) > self._limit:
            self.is_cut = True
            del self.data[self._limit :]
