"""All connections of a controller to agents: one for each way to connect to a host, made on demand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.head.agents.oneshot import OneShotCommand
from ascendrun.head.protocol.agent_bootstrap import AgentImage
from ascendrun.head.protocol.agent_messages import Exec, ExecReply
from ascendrun.head.protocol.remote import AgentConnection, ConnectionListener, Reply
from ascendrun.head.ssh.transport import Backend, Connection

CONNECTING_AT_ONCE = 32
"""More concurrent handshakes compete for the interpreter lock: about 32 measured best for any number of hosts."""
SENDING_AT_ONCE = 16


class Connections:
    """Connections of a controller. `get` and use: any thread; `run_once`, `start_agents`, `tick`: one thread."""

    def __init__(self, backend: Backend, image: AgentImage, listener: ConnectionListener) -> None:
        self._backend, self._image, self._listener = backend, image, listener
        self._connecting = ThreadPoolExecutor(CONNECTING_AT_ONCE, thread_name_prefix="connect")
        self._sending = ThreadPoolExecutor(SENDING_AT_ONCE, thread_name_prefix="send")
        self._links: dict[Host, AgentConnection] = {}
        self._making = threading.Lock()
        self._kept: deque[Callable[[], None]] = deque()

    def get(self, host: Host) -> AgentConnection:
        """Return the connection to `host`, which starts to connect; hosts with equal connection settings share it."""
        link = self._known(host)
        link.tick()
        return link

    def run_once(
        self, host: Host, request: Exec, *, deadline_s: float, done: Callable[[Reply[ExecReply]], None]
    ) -> bool:
        """Run a command on a host that is not connected yet, and keep the connection until `start_agents`.

        False: the host's agent runs or is starting, use that.
        """
        link = self._known(host)
        turn = link.acquire()
        if turn is None:
            return False

        def failed(error: AscendrunError) -> None:
            link.call(request, deadline_s=deadline_s, done=done)  # in case it becomes available
            link.fail(turn, error)

        def keep(connection: Connection) -> None:
            self._kept.append(lambda: link.adopt(turn, connection))

        command = OneShotCommand(
            host, request, backend=self._backend, done=done, keep=keep, failed=failed, lost=partial(link.fail, turn)
        )
        self._connecting.submit(command.run)
        return True

    def start_agents(self) -> None:
        """Start agents on the connections that `run_once` left, so that the next command is quick.

        Not earlier: while replies are awaited, agents would only slow down the remaining hosts.
        """
        while self._kept:
            self._kept.popleft()()

    def _known(self, host: Host) -> AgentConnection:
        key = dialled(host)
        with self._making:  # two entries for one host would be two connections, and the first would never be closed
            link = self._links.get(key)
            if link is None:
                link = AgentConnection(
                    host,
                    backend=self._backend,
                    image=self._image,
                    listener=self._listener,
                    connecting=self._connecting,
                    sending=self._sending,
                )
                self._links[key] = link
        return link

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(tuple(self._links.values()))

    def same(self, one: Host, other: Host) -> bool:
        return dialled(one) == dialled(other)

    def tick(self) -> None:
        for link in tuple(self._links.values()):
            link.tick()

    def close(self) -> None:
        links, self._links = tuple(self._links.values()), {}
        for link in links:
            link.close()
        self._connecting.shutdown(wait=False, cancel_futures=True)
        self._sending.shutdown(wait=False, cancel_futures=True)


@lru_cache(maxsize=8192)
def dialled(host: Host) -> Host:
    """Return the part of a host that is equal for hosts that share a connection."""
    return replace(host, slots=None, devices=None, groups=(), line=0)
