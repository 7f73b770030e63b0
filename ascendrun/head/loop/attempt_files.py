"""The head's copies of one attempt's files: followed on its nodes until every byte is here, also after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.retention import Retention
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.messages import Done, R, Request
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.spool.clocks import PING_DEADLINE_S, ClockFiles, ClockTracker, Reading
from ascendrun.head.spool.collector import KEEP_BYTES, LogPruner, NodeSpool, SpoolGapError
from ascendrun.head.spool.pull_limits import PullLimits
from ascendrun.head.spool.sample_ingest import SampleIngest, Source
from ascendrun.head.state.state_dir import SPOOL_COMPLETE, claim_spool_dir, is_spool_of, make_spool_dir, spool_dir
from ascendrun.node.layout import make_tag

REPLY_S = 30.0
AGAIN_S = 5.0
"""Seconds after an error reply until a request is repeated."""


@dataclass(frozen=True)
class AttemptName:
    """Names of an attempt: the job's id and the parts of the tag."""

    job_id: str
    run: str
    number: int

    @property
    def tag(self) -> str:
        return make_tag(self.run, self.number)

    def spool_dir(self, state_dir: Path) -> Path:
        return spool_dir(state_dir, self.job_id, self.number)


@dataclass(frozen=True)
class FilesContext:
    """What the copying uses. `post` runs a call in the controller's thread; `link` returns the connection of a host;
    `clock_offset_s`: seconds by which a host's clock is ahead, for samples that arrive before the first reading;
    `interval_s`: of the samples."""

    state_dir: Path
    post: Callable[[Callable[[], None]], None]
    link: Callable[[str], AgentConnection]
    samples: SampleIngest
    retention: Retention
    limits: PullLimits
    interval_s: float
    clock_offset_s: Callable[[str], float]


class AttemptFiles:
    """Files of one attempt. Every method runs in the controller's thread, except `take_data`.

    `on_records` gets the new lines of a host's `events`, in the controller's thread; those of an attempt that is over
    change nothing.
    """

    def __init__(
        self,
        name: AttemptName,
        context: FilesContext,
        *,
        on_records: Callable[[str, Sequence[Mapping[str, Any]]], None] = lambda host, records: None,
    ) -> None:
        self.name = name
        self._context = context
        self._on_records = on_records
        self._folder = name.spool_dir(context.state_dir)
        self._spools: dict[str, NodeSpool] = {}
        self._complete: set[str] = set()
        self._sizes_requested: set[str] = set()
        self._due: dict[str, float] = {}
        self._clocks, self._clock_files = ClockTracker(self._ping, self._keep_clock), ClockFiles()
        self._pruner = LogPruner(self._release)
        self._ahead_s: dict[str, float] = {}

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts whose files were requested; the others of the attempt started nothing."""
        return frozenset(self._spools)

    def spool(self, host: str) -> NodeSpool:
        if host not in self._spools:
            if not self._spools:
                with suppress(OSError):  # no space: the folder is marked by the next controller
                    claim_spool_dir(self._folder, self.name.tag)
            self._spools[host] = NodeSpool(self._folder / host, self._context.retention.file_limits())
        return self._spools[host]

    def follow(self, host: str) -> None:
        """Request what the host has beyond the copies here, and everything that it appends from now on."""

        def replied(reply: Reply[Done]) -> None:
            if reply.error is not None and reply.error.code != "connection-lost":
                self.follow_later(host)

        offsets = {**self.spool(host).offsets(), "samples": self._context.samples.offsets(self._source(host))}
        self._call(host, agent.Follow(self.name.tag, offsets, self._context.limits.of_files()), then=replied)
        self._clocks.measure(host)
        self.take_records(host)

    def follow_later(self, host: str, *, wait_s: float = AGAIN_S) -> None:
        self._due.setdefault(host, time.monotonic() + wait_s)

    def follow_again(self) -> None:
        """Follow the connected hosts with the present limits."""
        for host in self._connected():
            self.follow(host)

    def on_down(self, host: str) -> None:
        self._sizes_requested.discard(host)

    def tick(self) -> None:
        """Repeat due requests, read clocks, release logs that are safe here; called periodically."""
        now = time.monotonic()
        for host in [host for host, due in self._due.items() if due <= now]:
            del self._due[host]
            if self._context.link(host).is_up:
                self.follow(host)
        connected = self._connected()
        self._clocks.tick(connected)
        self._pruner.tick((host, self._spools[host]) for host in connected)

    def take_data(self, host: str, data: agent.FileData, body: bytes) -> None:
        """Store bytes of a followed file; called in the connection's thread, the only writer of this host's spool."""
        if data.file == "samples":
            ahead_s = self._ahead_s.get(host) or self._context.clock_offset_s(host)
            source = self._source(host)
            if not self._context.samples.take(source, data.generation, data.offset, body, ahead_s=ahead_s):
                self._context.post(lambda: self.follow_later(host))
            return
        try:
            self.spool(host).write(data.file, data.generation, data.offset, body)
        except SpoolGapError:
            self._context.post(lambda: self.follow_later(host, wait_s=0.0))
            return
        except OSError:  # the head's disk is full: nothing is lost, the node has it
            self._context.post(lambda: self.follow_later(host))
            return
        if data.file == "events":
            self._context.post(lambda: self.take_records(host))

    def take_records(self, host: str) -> None:
        self._on_records(host, self.spool(host).new_events())

    def is_complete(self, hosts: Collection[str], *, growing: Collection[str] = ()) -> bool:
        """Compare with the sizes on the nodes; True when every byte of `hosts` is here and the directory is marked so.

        `growing`: hosts where processes of the attempt may live although its end is recorded. Call periodically after
        the attempt's end.
        """
        for host in hosts:
            is_known = host in self._complete or host in self._sizes_requested or host in growing
            if not is_known and self._context.link(host).is_up:
                self._sizes_requested.add(host)
                self._call(host, agent.Files(self.name.tag), then=partial(self._compare, host))
        if not self._complete.issuperset(hosts):
            return False
        self._clocks.tick(())
        make_spool_dir(self._folder)
        (self._folder / SPOOL_COMPLETE).touch(0o600)
        return True

    def has_all_of(self, hosts: Collection[str]) -> bool:
        """Return whether every byte of these hosts was here when it was last compared."""
        return self._complete.issuperset(hosts)

    def _compare(self, host: str, reply: Reply[agent.FilesReply]) -> None:
        self._sizes_requested.discard(host)
        if reply.error is not None or reply.message.phase not in (None, "ended"):
            return  # what still runs there, or was there when the node lost its power, is ended first: loop/machines.py
        sizes = dict(self._context.limits.expected(reply.message.files))
        lacks_samples = self._context.samples.lacks(self._source(host), sizes.pop("samples", {}))
        if lacks_samples or self.spool(host).differs_from(sizes):
            self.follow_later(host)
            return
        self._complete.add(host)
        self._context.samples.finish(self._source(host))
        self._call(host, agent.Unfollow(self.name.tag))

    # Helpers

    def _connected(self) -> list[str]:
        return [host for host in self._spools if self._context.link(host).is_up]

    def _source(self, host: str) -> Source:
        return Source(self.name.tag, host, self.name.job_id, self.name.number, self._context.interval_s)

    def _ping(self, host: str, on_reply: Callable[[int | None], None]) -> None:
        self._context.link(host).call(
            agent.Ping(),
            deadline_s=PING_DEADLINE_S,
            done=lambda reply: on_reply(reply.message.at_ns if reply.error is None else None),
        )

    def _keep_clock(self, host: str, reading: Reading) -> None:
        self._ahead_s[host] = reading.offset_s
        try:
            self._clock_files.keep(self.spool(host).folder, reading)
        except OSError:  # the head's disk is full: the next reading may find space
            return

    def _release(self, host: str, have: Mapping[str, Mapping[str, int]]) -> None:
        """Request the deletion on the node of logs that are here. Called in a thread of the pruner."""
        self._context.post(lambda: self._call(host, agent.Release(self.name.tag, have, KEEP_BYTES)))

    def _call(self, host: str, request: Request[R], *, then: Callable[[Reply[R]], None] = lambda reply: None) -> None:
        """Send a request; `then` runs in the controller's thread."""
        self._context.link(host).call(
            request, b"", deadline_s=REPLY_S, done=lambda reply: self._context.post(lambda: then(reply))
        )


def incomplete_attempts(
    job_id: str, run: str, context: FilesContext, *, before: int, hosts: Collection[str]
) -> Iterator[AttemptFiles]:
    """Yield the files of attempts before number `before` of which bytes of `hosts` may be missing on the head."""
    for number in range(1, before):
        folder = spool_dir(context.state_dir, job_id, number)
        if folder.is_dir() and is_spool_of(folder, make_tag(run, number)) and not (folder / SPOOL_COMPLETE).exists():
            files = AttemptFiles(AttemptName(job_id, run, number), context)
            for entry in folder.iterdir():
                if entry.name in hosts:
                    files.spool(entry.name)
            if files.hosts:
                yield files
