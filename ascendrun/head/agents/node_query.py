"""What a start asks several hosts in parallel: their reports, when all are connected, and their checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Callable

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import checkpoints
from ascendrun.core.jobs.checkpoints import Listed, Listings, OnlyCopy, ResumePoint
from ascendrun.core.jobs.job import Job
from ascendrun.core.jobs.restart import set_aside
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport
from ascendrun.head.agents.connections import Links, ask, dialled
from ascendrun.head.protocol.agent_bootstrap import is_permanent
from ascendrun.head.protocol.agent_events import make_report
from ascendrun.head.protocol.agent_messages import Checkpoints, CheckpointsReply, Probe, ProbeReply
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.node import layout

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec

PROBE_S = 60.0
LIST_S = 30.0
CONNECT_TRIES = 3
"""Consecutive failed attempts after which a host counts as unreachable."""


class NodeQuery:
    """One round of queries. Every host ends with exactly one call of `reported` or `refused(host, failure)`.

    Hosts are probed only when all are connected, since each reports its route to the addresses of the others. Use from
    the controller's thread; pass it the start and end of connections.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        links: Links,
        *,
        reported: Callable[[NodeReport], None],
        refused: Callable[[str, Failure], None],
    ) -> None:
        self._hosts, self._links = tuple(hosts), links
        self._reported, self._refused = reported, refused
        self._away = list(self._hosts)
        """Hosts of which the connection was not up at the last look, the next one last."""
        self._probed: set[str] = set()
        self._peers: dict[str, list[str]] = {}
        """Names of all hosts, made once: a thousand hosts have a million pairs."""
        self._repeated: set[str] = set()
        self._finished: set[str] = set()

    def start(self) -> None:
        for host in self._hosts:
            link = self._links.get(host)
            if not link.is_up:
                link.connect()
        self.on_up()

    @property
    def is_done(self) -> bool:
        return len(self._finished) == len(self._hosts)

    def on_up(self) -> None:
        if len(self._probed | self._finished) == len(self._hosts) or self._is_waiting():
            return
        links = {host: self._links.get(host) for host in self._hosts if host.name not in self._finished}
        self._away = [host for host, link in links.items() if not link.is_up]
        if self._away:
            return
        if not self._peers and len(links) > 1:
            self._peers = {host.name: _names_of(link) for host, link in links.items()}
        for host, link in links.items():
            if host.name not in self._probed:
                self._probed.add(host.name)
                link.call(Probe(self._peers), deadline_s=PROBE_S, done=self._on_reply(host, time.time_ns()))

    def _is_waiting(self) -> bool:
        """Return whether a host is not connected: of a thousand that connect one by one only the next is looked at."""
        while self._away and (self._away[-1].name in self._finished or self._links.get(self._away[-1]).is_up):
            self._away.pop()
        return bool(self._away)

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        is_final = is_permanent(error) or link.failures >= CONNECT_TRIES
        for host in self._hosts:
            if is_final and dialled(host) == dialled(link.host) and host.name not in self._finished:
                self._finished.add(host.name)
                self._refused(host.name, Failure.of(error))
                self.on_up()  # the other hosts need not wait for it

    def give_up_connecting(self, failure: Failure) -> None:
        """Fail hosts that are not connected by now with this; the others do not wait any longer."""
        for host in self._hosts:
            if host.name not in self._finished and not self._links.get(host).is_up:
                self._finished.add(host.name)
                self._refused(host.name, failure)
        self.on_up()

    def _on_reply(self, host: Host, sent_ns: int) -> Callable[[Reply[ProbeReply]], None]:
        def done(reply: Reply[ProbeReply]) -> None:
            middle_ns = (sent_ns + time.time_ns()) // 2
            self._links.post(lambda: self._take_reply(host, reply, middle_ns))

        return done

    def _take_reply(self, host: Host, reply: Reply[ProbeReply], middle_ns: int) -> None:
        if host.name in self._finished:
            return
        if reply.error is not None and reply.error.code == "connection-lost" and host.name not in self._repeated:
            self._repeated.add(host.name)
            self._probed.discard(host.name)
            self.on_up()
            return
        self._finished.add(host.name)
        if reply.error is not None:
            self._refused(host.name, reply.error)
            return
        offset_s = (reply.message.at_ns - middle_ns) / 1e9
        link = self._links.get(host)
        self._reported(make_report(host, link.info, reply.message, clock_offset_s=offset_s, login=link.login))


def _names_of(link: AgentConnection) -> list[str]:
    names = ["127.0.0.1"] if link.host.is_local else [link.peer_address, link.host.addr, link.host.name]
    return list(dict.fromkeys(name for name in names if name))


def query_checkpoints(
    spec: JobSpec, job: Job, hosts: Sequence[Host], *, links: Links, done: Callable[[Listings], None]
) -> None:
    """List the checkpoints of a job on connected hosts; `done` is called once, in the controller's thread.

    A first attempt without `checkpoint.dir` has none, and asks nobody.
    """
    found: dict[str, tuple[Listed, ...]] = {}
    waiting = {host.name for host in hosts} if spec.checkpoint.dir or job.attempt > 1 else set()

    def take(host: str, reply: Reply[CheckpointsReply]) -> None:
        waiting.discard(host)
        if reply.error is None:
            found[host] = tuple(load_dataclass(Listed, row) for row in reply.message.checkpoints)
        if not waiting:
            done(found)

    if not waiting:
        done(found)
        return
    for host in hosts:
        folder = spec.checkpoint.dir or layout.checkpoints_dir(links.get(host).info.root, job.run)
        ask(links, host, Checkpoints(folder), deadline_s=LIST_S, then=partial(take, host.name))


def choose(job: Job, hosts: Sequence[str], listings: Listings) -> ResumePoint | OnlyCopy | None:
    """Return what the attempt resumes from; None: unknown, since a host did not list its checkpoints."""
    if not set(hosts) <= set(listings):
        return None
    ran = [one for one in job.past if one.started_at_s is not None]
    known = [one.resumed_step for one in ran if one.resumed_step]
    return checkpoints.choose(
        listings,
        hosts,
        skip=set_aside(job.past),
        absent=[host for host in ran[-1].hosts if host not in (*hosts, *job.lost_hosts)] if ran else (),
        known_step=known[-1] if known else 0,
    )
