"""The head's copies of a job's files, attempt by attempt: followed on its nodes until every byte is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ascendrun.core.events import Event
from ascendrun.core.samples import Source
from ascendrun.head.loop.job.live_job import AGAIN_S, REPLY_S, LiveJob
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.file_messages import FileData, Files, FilesReply
from ascendrun.head.protocol.messages import Done, R, Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.clocks import PING_DEADLINE_S, ClockFiles, ClockTracker, Reading
from ascendrun.head.spool.collector import KEEP_BYTES, LogPruner, NodeSpool, PullLimits, SpoolGapError
from ascendrun.head.state.state_dir import SPOOL_COMPLETE, claim_spool_dir, is_spool_of, make_spool_dir, spool_dir
from ascendrun.node.failpoint import failpoint
from ascendrun.node.layout import make_tag

ACKNOWLEDGE_S = 2.0
"""Seconds between two moves of the windows of samples."""
SAMPLES = "samples"

TakeRecords = Callable[[str, Sequence[Mapping[str, Any]]], None]


class AttemptFiles:
    """Files of one attempt. Every method runs in the controller's thread, except `take_data`.

    `on_records` gets the new lines of a host's `events`, in the controller's thread; those of an attempt that is over
    change nothing.
    """

    def __init__(
        self, live: LiveJob, limits: PullLimits, number: int, *, on_records: TakeRecords = lambda host, records: None
    ) -> None:
        self._live, self._limits, self._number, self._on_records = live, limits, number, on_records
        self._context = live.context
        self.tag = make_tag(live.job.run, number)
        self._folder = spool_dir(live.context.state_dir, live.job.id, number)
        self._spools: dict[str, NodeSpool] = {}
        self._complete: set[str] = set()
        self._sizes_requested: set[str] = set()
        self._due: dict[str, float] = {}
        self._clocks, self._clock_files = ClockTracker(self._ping, self._keep_clock), ClockFiles()
        self._pruner = LogPruner(self._release)
        self._ahead_s: dict[str, float] = {}
        self._windows: dict[str, tuple[int, int, int]] = {}
        self._resets: dict[str, int] = {}
        self._acknowledge_mono = 0.0

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts whose files were requested; the others of the attempt started nothing."""
        return frozenset(self._spools)

    def spool(self, host: str) -> NodeSpool:
        if host not in self._spools:
            if not self._spools:
                with suppress(OSError):  # no space: the folder is marked by the next controller
                    claim_spool_dir(self._folder, self.tag)
            self._spools[host] = NodeSpool(self._folder / host, self._context.retention.file_limits())
        return self._spools[host]

    def follow(self, host: str) -> None:
        """Request what the host has beyond the copies here, and everything that it appends from now on."""
        samples, source = self._context.samples, self._source(host)
        self._resets[host] = samples.resets
        offsets = {**self.spool(host).offsets(), SAMPLES: samples.offsets(source)}
        self._windows[host] = window = samples.window(source, len(self._live.job.hosts))
        request = agent.Follow(self.tag, offsets, self._limits.of_files(), {SAMPLES: window})
        self._call(host, request, then=partial(self._followed, host))
        self._clocks.measure(host)
        self.take_records(host)

    def _followed(self, host: str, reply: Reply[Done]) -> None:
        if reply.error is not None and reply.error.code != "connection-lost":
            self.follow_later(host)

    def _acknowledge(self, host: str) -> None:
        """Let the host send more samples when half of its window does not wait here any more; again what was lost."""
        if self._context.samples.resets != self._resets[host]:
            self.follow(host)
            return
        most, generation, offset = self._windows[host]
        passed = self._context.samples.passed(self._source(host))
        if passed[0] != generation or passed[1] - offset >= most // 2:
            self._windows[host] = (most, *passed)
            self._call(host, agent.Acknowledge(self.tag, SAMPLES, *passed), then=partial(self._followed, host))

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
            if self._live.link(host).is_up:
                self.follow(host)
        connected = self._connected()
        if now >= self._acknowledge_mono:
            self._acknowledge_mono = now + ACKNOWLEDGE_S
            for host in [host for host in connected if host in self._windows and host not in self._complete]:
                self._acknowledge(host)
        self._clocks.tick(connected)
        self._pruner.tick((host, self._spools[host]) for host in connected)

    def take_data(self, host: str, data: FileData, body: bytes) -> None:
        """Store bytes of a followed file; called in the connection's thread, the only writer of this host's spool."""
        if data.file == SAMPLES:
            ahead_s = self._ahead_s.get(host) or self._reported_offset_s(host)
            source = self._source(host)
            if not self._context.samples.take(source, data.generation, data.offset, body, ahead_s=ahead_s):
                self._context.links.post(lambda: self.follow_later(host))
            return
        try:
            self.spool(host).write(data.file, data.generation, data.offset, body)
        except SpoolGapError:
            self._context.links.post(lambda: self.follow_later(host, wait_s=0.0))
            return
        except OSError:  # the head's disk is full: nothing is lost, the node has it
            self._context.links.post(lambda: self.follow_later(host))
            return
        if data.file == "events":
            self._context.links.post(lambda: self.take_records(host))

    def take_records(self, host: str) -> None:
        self._on_records(host, self.spool(host).new_events())

    def is_complete(self, hosts: Collection[str], *, growing: Collection[str] = ()) -> bool:
        """Compare with the sizes on the nodes; True when every byte of `hosts` is here and the directory is marked so.

        `growing`: hosts where processes of the attempt may live although its end is recorded. Call periodically after
        the attempt's end.
        """
        for host in hosts:
            is_known = host in self._complete or host in self._sizes_requested or host in growing
            if not is_known and self._live.link(host).is_up:
                self._sizes_requested.add(host)
                self._call(host, Files(self.tag), then=partial(self._compare, host))
        if not self._complete.issuperset(hosts):
            return False
        self._clocks.tick(())
        make_spool_dir(self._folder)
        failpoint("spool.before_complete")
        (self._folder / SPOOL_COMPLETE).touch(0o600)
        return True

    def has_all_of(self, hosts: Collection[str]) -> bool:
        """Return whether every byte of these hosts was here when it was last compared."""
        return self._complete.issuperset(hosts)

    def _compare(self, host: str, reply: Reply[FilesReply]) -> None:
        self._sizes_requested.discard(host)
        if reply.error is not None or reply.message.phase not in (None, "ended"):
            # What still runs there, or was there when the node lost its power, is ended first: machine/reconcile.py.
            return
        sizes = dict(self._limits.expected(reply.message.files))
        lacks_samples = self._context.samples.lacks(self._source(host), sizes.pop(SAMPLES, {}))
        if lacks_samples or self.spool(host).differs_from(sizes):
            self.follow_later(host)
            return
        self._complete.add(host)
        self._context.samples.finish(self._source(host))
        self._call(host, agent.Unfollow(self.tag))

    # Helpers

    def _connected(self) -> list[str]:
        return [host for host in self._spools if self._live.link(host).is_up]

    def _source(self, host: str) -> Source:
        return Source(self.tag, host, self._live.job.id, self._number, self._live.spec.sampling.interval_s)

    def _reported_offset_s(self, host: str) -> float:
        """Return the seconds by which the host's clock is ahead, for samples before the first reading."""
        return next((node.clock_offset_s or 0.0 for node in self._live.job.nodes if node.host == host), 0.0)

    def _ping(self, host: str, on_reply: Callable[[int | None], None]) -> None:
        self._live.link(host).call(
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
        self._context.links.post(lambda: self._call(host, agent.Release(self.tag, have, KEEP_BYTES)))

    def _call(self, host: str, request: Request[R], *, then: Callable[[Reply[R]], None] = lambda reply: None) -> None:
        """Send a request; `then` runs in the controller's thread."""
        self._live.link(host).call(
            request, b"", deadline_s=REPLY_S, done=lambda reply: self._context.links.post(lambda: then(reply))
        )


class JobCopies:
    """`present`: the files of the present attempt, whose new records `on_records` gets. Every method runs in the
    controller's thread, except `follows` and `take_data`."""

    def __init__(self, live: LiveJob, on_records: TakeRecords) -> None:
        self._live, self._on_records = live, on_records
        self.limits = PullLimits(live.context.state_dir / "jobs" / live.job.id, live.context.retention)
        self._earlier = tuple(self._incomplete_attempts())
        self.present = self._of_attempt()

    def _incomplete_attempts(self) -> Iterator[AttemptFiles]:
        """Yield the files of attempts before the present one of which bytes may be missing on the head."""
        job, hosts = self._live.job, {host.name for host in self._live.hosts}
        for number in range(1, job.attempt):
            folder = spool_dir(self._live.context.state_dir, job.id, number)
            is_own = folder.is_dir() and is_spool_of(folder, make_tag(job.run, number))
            if is_own and not (folder / SPOOL_COMPLETE).exists():
                files = AttemptFiles(self._live, self.limits, number)
                for entry in folder.iterdir():
                    if entry.name in hosts:
                        files.spool(entry.name)
                if files.hosts:
                    yield files

    def begin_attempt(self) -> None:
        """Begin with nothing after the record has moved to a new attempt; files of the old one are still copied."""
        if self.present.hosts:
            self._earlier += (self.present,)
        self.present = self._of_attempt()

    def _of_attempt(self) -> AttemptFiles:
        number = self._live.job.attempt

        def take(host: str, records: Sequence[Mapping[str, Any]]) -> None:
            if self._live.job.attempt == number:  # else its late records would end the next attempt
                self._on_records(host, records)

        return AttemptFiles(self._live, self.limits, number, on_records=take)

    def __iter__(self) -> Iterator[AttemptFiles]:
        return iter((self.present, *self._earlier))

    def follows(self, tag: str) -> bool:
        """Return whether files of this attempt are still copied. Any thread."""
        return any(files.tag == tag for files in self)

    def take_data(self, host: str, data: FileData, body: bytes) -> None:
        """Store bytes of a followed file; called in the connection's thread, the only writer of this host's spool."""
        for files in self:
            if files.tag == data.tag:
                files.take_data(host, data, body)

    def on_up(self, host: str) -> None:
        """Request again what is missing of earlier attempts."""
        for files in self._earlier:
            if host in files.hosts:
                files.follow(host)

    def on_down(self, host: str) -> None:
        for files in self:
            files.on_down(host)

    def tick(self) -> None:
        """Repeat due requests; called periodically."""
        for files in self:
            files.tick()
        self._earlier = tuple(files for files in self._earlier if not files.is_complete(files.hosts))
        self._check_limits()

    def _check_limits(self) -> None:
        """Pause or resume the copying when the job has used its share of the disk, or the disk is nearly full."""
        job = self._live.job
        if job.go_sent_at_s is None or not self.limits.look():
            return
        pause = self.limits.pause
        code, values = ("pull-resumed", {}) if pause is None else ("pull-paused", {"cause": pause.value})
        self._live.record([Event(code, values, attempt=job.attempt, at_s=time.time())])
        for files in self:
            files.follow_again()

    def drain(self) -> None:
        """Compare with the sizes of the nodes' files until all bytes are here; called periodically after the end.

        While an allocation is kept, those of its hosts: others are not reached through it.
        """
        job = self._live.job
        if job.go_sent_at_s is not None and not self.present.is_complete(job.hosts, growing=job.held_hosts):
            return
        hosts = [files.hosts if job.allocation is None else files.hosts & set(job.pool) for files in self._earlier]
        if all(files.has_all_of(its) for files, its in zip(self._earlier, hosts)):
            self._live.drained()

    def has_all(self, *, but: Collection[str]) -> bool:
        """Return whether every byte of the ended attempt is here, whatever the hosts `but` still have; else request
        what is missing."""
        job = self._live.job
        is_complete = self.present.is_complete(job.hosts, growing=job.held_hosts)
        return is_complete or self.present.has_all_of(set(job.hosts) - set(but))
