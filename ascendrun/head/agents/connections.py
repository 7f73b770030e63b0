"""All connections of a controller to agents: one for each way of reaching a host, made on demand and kept."""

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
"""More handshakes at once only fight for the interpreter lock: measured best at about 32 for any number of hosts."""
SENDING_AT_ONCE = 16


class Connections:
    """Any thread may get a connection and use it; `run_once`, `start_agents` and `tick` belong to one thread."""

    def __init__(self, backend: Backend, image: AgentImage, listener: ConnectionListener) -> None:
        self._backend, self._image, self._listener = backend, image, listener
        self._connecting = ThreadPoolExecutor(CONNECTING_AT_ONCE, thread_name_prefix="connect")
        self._sending = ThreadPoolExecutor(SENDING_AT_ONCE, thread_name_prefix="send")
        self._links: dict[Host, AgentConnection] = {}
        self._making = threading.Lock()
        self._kept: deque[Callable[[], None]] = deque()

    def get(self, host: Host) -> AgentConnection:
        """The connection to `host`; two hostfiles that dial it alike share it. It starts to connect immediately."""
        link = self._known(host)
        link.tick()
        return link

    def run_once(
        self, host: Host, request: Exec, *, deadline_s: float, done: Callable[[Reply[ExecReply]], None]
    ) -> bool:
        """Runs a command on a host that is not connected yet, and keeps the connection until `start_agents`.

        False: the host's agent is there or on its way, ask that.
        """
        link = self._known(host)
        turn = link.acquire()
        if turn is None:
            return False

        def failed(error: AscendrunError) -> None:
            link.call(request, deadline_s=deadline_s, done=done)  # should it come up after all
            link.fail(turn, error)

        def keep(connection: Connection) -> None:
            self._kept.append(lambda: link.adopt(turn, connection))

        command = OneShotCommand(
            host, request, backend=self._backend, done=done, keep=keep, failed=failed, lost=partial(link.fail, turn)
        )
        self._connecting.submit(command.run)
        return True

    def start_agents(self) -> None:
        """Brings up agents on the connections that `run_once` left, so that the next command is quick.

        Not earlier: while answers are awaited, agents would only slow down the hosts that come after.
        """
        while self._kept:
            self._kept.popleft()()

    def _known(self, host: Host) -> AgentConnection:
        key = dialled(host)
        with self._making:  # two links to one host would be two connections, and nobody would close the first
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
    """What is the same for two hosts that are reached alike."""
    return replace(host, slots=None, devices=None, groups=(), line=0)
