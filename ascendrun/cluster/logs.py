"""Output of ranks, and events of jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Callable, Union

from ascendrun.cluster.api import Part
from ascendrun.core.errors import NotFoundError
from ascendrun.core.logs.folding import FoldedLine
from ascendrun.core.logs.log_view import LogView
from ascendrun.head.spool.spool_files import find_streams, read_bytes
from ascendrun.head.state.job_files import job_folder, pruned_at_s
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.query.log_files import AttemptFiles, LogGap, read_attempt_files, read_gaps
from ascendrun.query.log_follow import EventStream, FollowUpdate, check_choice, follow_job, stored_lines
from ascendrun.query.views import JobDetail, choose_attempt
from ascendrun.text import Text

JobRef = Union[str, "JobDetail"]
"""Id, name, or start of an id; or a job that `jobs.detail` returned, which is not read again."""


class Logs(Part):
    """Calls for logs and events. `view`: selects lines; None: all. `attempt` None: the newest. Raise NotFoundError."""

    def lines(
        self,
        ref: JobRef,
        view: LogView | None = None,
        *,
        attempt: int | None = None,
        follow: bool = False,
        warn: Callable[[Text], None] | None = None,
    ) -> Iterator[FoldedLine]:
        """Yield the output of a job's ranks, merged by time; a line that several ranks share is returned once.

        `follow`: until the job has ended, also later attempts. `warn` gets why lines that only a node has are missing.
        """
        detail, view, attempt = self._choice(ref, view, attempt)
        if follow:
            return (line for update in self.follow(detail.job.id, view) for line in update.lines)
        return stored_lines(self._head.state_dir, detail, attempt, view, warn=warn)

    def follow(self, ref: str, view: LogView | None = None, *, with_lines: bool = True) -> Iterator[FollowUpdate]:
        """Yield states and output of a job as they arrive, until it has ended and every line has arrived."""
        return follow_job(self._head.state_dir, self._cluster.jobs.detail, ref, view, with_lines=with_lines)

    def raw(self, ref: JobRef, view: LogView | None = None, *, attempt: int | None = None) -> Iterator[bytes]:
        """Yield the exact bytes of the chosen streams, rank after rank."""
        detail, view, attempt = self._choice(ref, view, attempt)
        folder = self._attempt_dir(detail, attempt)
        for files in find_streams(folder, attempt, hosts=view.hosts, ranks=view.ranks, streams=view.streams):
            yield from read_bytes(files)

    def gaps(self, ref: JobRef, view: LogView | None = None, *, attempt: int | None = None) -> tuple[LogGap, ...]:
        """Return lost output of the chosen streams, by time."""
        detail, view, attempt = self._choice(ref, view, attempt)
        return tuple(
            gap
            for gap in read_gaps(self._attempt_dir(detail, attempt), attempt)
            if gap.stream in view.streams and view.has_host(gap.host) and view.has_rank(gap.rank)
        )

    def files(self, ref: JobRef, view: LogView | None = None, *, attempt: int | None = None) -> AttemptFiles:
        """Return every stored file of an attempt, the HCCL settings in its logs, and the hosts with pending files."""
        detail, view, attempt = self._choice(ref, view, attempt)
        return read_attempt_files(self._head.state_dir, detail.job, attempt, view)

    def events(
        self, ref: str | None = None, *, since_s: float | None = None, codes: Collection[str] | None = None
    ) -> EventStream:
        """Return the events of one job or pipeline, or of all. `.new_events()`: those written since its last call."""
        job = None if ref is None else self._cluster.jobs.detail(ref).job
        whole = self._cluster.jobs.whole_pipeline(ref, job) if ref is not None and job is not None else None
        return EventStream(
            self._head.state_dir,
            job=None if whole is not None or job is None else job.id,
            pipeline=None if whole is None else whole.id,
            since_s=since_s,
            codes=codes,
        )

    def event_codes(self) -> tuple[str, ...]:
        """Return the codes of stored events."""
        with self._head.store() as store:
            return store.events.codes()

    def _choice(self, ref: JobRef, view: LogView | None, attempt: int | None) -> tuple[JobDetail, LogView, int]:
        detail = self._cluster.jobs.detail(ref) if isinstance(ref, str) else ref
        folder = job_folder(self._head.state_dir, detail.job.id)
        at_s = pruned_at_s(folder)
        if at_s is not None:
            raise NotFoundError.of(
                "logs.pruned",
                "the logs of {job} were removed at {at_s:clock}",
                "set keep_jobs_days and keep_jobs_gib (ascendrun config)",
                job=detail.job.id,
                at_s=at_s,
            )
        view = view or LogView()
        check_choice(detail, view)
        return detail, view, choose_attempt(detail.job, attempt)

    def _attempt_dir(self, detail: JobDetail, attempt: int) -> Path:
        return spool_dir(self._head.state_dir, detail.job.id, attempt)
