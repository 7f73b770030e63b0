"""The head's copies of a job's files: those of the present attempt, and of earlier ones until every byte is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ascendrun.core.events import Event
from ascendrun.head.loop.job.attempt_files import AttemptFiles, incomplete_attempts
from ascendrun.head.loop.job.live_job import LiveJob
from ascendrun.head.protocol.file_messages import FileData
from ascendrun.head.spool.collector import PullLimits

TakeRecords = Callable[[str, Sequence[Mapping[str, Any]]], None]


class JobCopies:
    """`present`: the files of the present attempt, whose new records `on_records` gets. Every method runs in the
    controller's thread, except `follows` and `take_data`."""

    def __init__(self, live: LiveJob, on_records: TakeRecords) -> None:
        self._live, self._on_records = live, on_records
        self.limits = PullLimits(live.context.state_dir / "jobs" / live.job.id, live.context.retention)
        self._earlier = tuple(incomplete_attempts(live, self.limits))
        self.present = self._of_attempt()

    def begin_attempt(self) -> None:
        """Begin with nothing after the record has moved to a new attempt; files of the old one are still copied."""
        if self.present.hosts:
            self._earlier += (self.present,)
        self.present = self._of_attempt()

    def _of_attempt(self) -> AttemptFiles:
        return AttemptFiles(self._live, self.limits, self._live.job.attempt, on_records=self._on_records)

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
        self._live.context.record(job.id, [Event(code, values, attempt=job.attempt, at_s=time.time())])
        for files in self:
            files.follow_again()

    def drain(self) -> None:
        """Compare with the sizes of the nodes' files until all bytes are here; called periodically after the end."""
        job = self._live.job
        is_started = job.go_sent_at_s is not None
        if is_started and not self.present.is_complete(job.hosts, growing=job.held_hosts):
            return
        if not self._earlier:
            self._live.context.drained(job.id)

    def has_all(self, *, but: Collection[str]) -> bool:
        """Return whether every byte of the ended attempt is here, whatever the hosts `but` still have; else request
        what is missing."""
        job = self._live.job
        is_complete = self.present.is_complete(job.hosts, growing=job.held_hosts)
        return is_complete or self.present.has_all_of(set(job.hosts) - set(but))
