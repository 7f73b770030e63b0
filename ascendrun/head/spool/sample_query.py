"""Serve one request for samples: ask each host's agent for one, and reply for each host."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.core.samples import Newest
from ascendrun.head.agents.connections import Connections
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import Sample, SampleReply
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.remote import Link, Reply, is_permanent
from ascendrun.head.spool.sample_ingest import SampleKeeper
from ascendrun.health.samples.device_samples import sampling_items
from ascendrun.text import Text

CONNECT_TRIES = 2
TOOL_S = 8.0
"""How long a tool may take on a host that is asked; the host has its answer ready a moment later."""
MARGIN_S = 2.0


class SampleOperation:
    """Use from the controller's thread. `waiting`: hosts without a reply.

    Every host has its reply within timeout_s, `refused` when it took no sample.
    """

    def __init__(
        self,
        request: Sample,
        links: Connections,
        post: Callable[[Callable[[], None]], None],
        answer: Answer,
        keeper: SampleKeeper,
        *,
        ended: Callable[[], None],
    ) -> None:
        self._hosts = request.hosts
        self._timeout_s = request.timeout_s
        self._items = sampling_items(request.device_type)
        self._links, self._post, self._answer, self._keeper, self._ended = links, post, answer, keeper, ended
        self.waiting: set[str] = {host.name for host in self._hosts}

    def start(self) -> None:
        tool_s = max(0.5, min(TOOL_S, self._timeout_s - MARGIN_S))
        items: list[Mapping[str, Any]] = [{**item, "timeout_s": tool_s} for item in self._items]
        late = threading.Timer(self._timeout_s, lambda: self._post(self._give_up))
        late.daemon = True
        late.start()
        for host in self._hosts:
            link = self._links.get(host)
            if not link.is_up:
                link.connect()
            link.call(agent.Sample(items, tool_s), deadline_s=self._timeout_s, done=self._done_of(host))

    def on_down(self, link: Link, error: AscendrunError) -> None:
        is_final = is_permanent(error) or link.failures >= CONNECT_TRIES
        for host in self._hosts:
            if is_final and self._links.same(host, link.host):
                self._refuse(host.name, Failure.of(error))

    def _done_of(self, host: Host) -> Callable[[Reply[agent.SampleReply]], None]:
        def done(reply: Reply[agent.SampleReply]) -> None:
            now_s = time.time()
            self._post(lambda: self._hear(host.name, reply, now_s))

        return done

    def _hear(self, host: str, reply: Reply[agent.SampleReply], heard_s: float) -> None:
        if host not in self.waiting:
            return
        if reply.error is not None:
            self._refuse(host, reply.error)
            return
        ahead_s = reply.message.at_ns / 1e9 - heard_s
        self._keeper.take_lines(
            host, reply.message.lines, ahead_s=ahead_s, done=lambda newest: self._post(lambda: self._tell(host, newest))
        )

    def _tell(self, host: str, newest: Newest) -> None:
        self._say(SampleReply(host, newest.devices, newest.hosts))

    def _give_up(self) -> None:
        for host in sorted(self.waiting):
            late = Text("agent.no-samples", "no samples within {limit_s:g} s", limit_s=self._timeout_s)
            self._refuse(host, Failure("deadline", late))

    def _refuse(self, host: str, failure: Failure) -> None:
        self._say(SampleReply(host, refused=failure))

    def _say(self, reply: SampleReply) -> None:
        if reply.host not in self.waiting:
            return
        self.waiting.discard(reply.host)
        self._answer(reply, b"", not self.waiting)
        if not self.waiting:
            self._ended()
