"""Why jobs ended, and their records: explanation, stacks, artifacts, report, bundle."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun import text
from ascendrun.cluster.api import Part
from ascendrun.core.errors import NotFoundError
from ascendrun.core.jobs.reasons import CONFIDENCE
from ascendrun.head.protocol.control_messages import Gather, Stacks
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.health.diagnosis import Confidence
from ascendrun.health.diagnosis.render import render
from ascendrun.query.explain import explain_job, fold_stacks, kept_stacks, stored_diagnosis
from ascendrun.query.report_reader import read_report
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ascendrun.health.report.data import Report
    from ascendrun.query.bundle.job import Bundle
    from ascendrun.query.views import JobView
from ascendrun.query.explain import Explanation, JobStacks

COLLECT_S = 180.0
"""Seconds, more than the sum of all deadlines of a collection of artifacts."""
STACKS_S = 40.0


class Diagnosis(Part):
    """Why jobs ended, and their records."""

    def explain(
        self, ref: str, *, attempt: int | None = None, lang: str | None = None, fresh: bool = False
    ) -> Explanation:
        """Return why an attempt ended, with evidence; of a running job, anomalies. `lang` None: the process's.
        `fresh`: diagnose again even if the controller stored its diagnosis."""
        return explain_job(
            self._head.state_dir,
            ref,
            attempt=attempt,
            lang=lang or text.language(),
            now_s=time.time(),
            liveness=self._cluster.controller.liveness(),
            fresh=fresh,
        )

    def summary(self, ref: str, *, lang: str | None = None) -> str | None:
        """Return which rank failed first and why, in one sentence. None: no failure, or the cause is unknown."""
        lang = lang or text.language()
        try:
            found = explain_job(self._head.state_dir, ref, lang=lang, now_s=time.time()).diagnosis
        except NotFoundError:
            return None
        if found.confidence is Confidence.UNKNOWN or not found.message:
            return None
        return f"{found.message} [{CONFIDENCE[found.confidence.value].render(lang)}]"

    def known_cause(self, job: JobView) -> str | None:
        """Return why a failed job failed, as the controller has stored it, in one sentence. None: not known."""
        if job.state != "FAILED" or job.confidence == "preliminary":
            return None
        found = stored_diagnosis(spool_dir(self._head.state_dir, job.id, job.attempt))
        return None if found is None or found.confidence is Confidence.UNKNOWN else render(found).message or None

    def stacks(self, ref: str, *, rank: int | None = None, attempt: int | None = None) -> JobStacks:
        """Return what the ranks of a running job do now, equal stacks once. `rank`: only this one, with all threads.

        Of an ended job, or with `attempt`: the stacks that were kept when it hung. Raises NotFoundError without any.
        """
        job = self._cluster.jobs.detail(ref).job
        if attempt is not None or job.state not in ("STARTING", "RUNNING", "STOPPING", "UNKNOWN"):
            kept = kept_stacks(self._head.state_dir, job.id, rank=rank, attempt=attempt)
            if kept is None:
                what = Text("stacks.none-kept", "{job} ({state}): no stacks were kept", job=job.id, state=job.state)
                hint = Text("stacks.none-kept-hint", "stacks are kept of attempts that made no progress")
                raise NotFoundError(what, hint=hint)
            return kept
        replies = [reply for reply, _ in self._head.stream(Stacks(job.id), timeout_s=STACKS_S)]
        return fold_stacks(job, replies, rank=rank)

    def collect(self, ref: str, *, attempt: int | None = None) -> Iterator[tuple[str, Text | str | None]]:
        """Fetch the artifacts of an attempt; yield (host, None or the reason of a failure) in order of arrival."""
        for reply, _ in self._head.stream(Gather(self._cluster.jobs.detail(ref).job.id, attempt), timeout_s=COLLECT_S):
            yield reply.host, reply.problem

    def report(self, ref: str, *, now_s: float | None = None) -> Report:
        """Return the course of one job, where its time went and its cost."""
        return read_report(self._head.state_dir, ref, now_s=time.time() if now_s is None else now_s)

    def bundle(
        self,
        ref: str,
        *,
        path: str | Path | None = None,
        layout: str = "ascendrun",
        with_logs: bool = True,
        max_bytes: int = 100 * 1024**2,
        is_dry: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> Bundle:
        """Pack a job's records into an archive without credentials. `path` None: LAYOUT-JOB.tar.gz in this directory.

        `layout`: ascendrun or ascend-fd; `is_dry`: list the contents, write nothing. `environ`: variables whose values
        are masked if their names indicate a secret; None: those of this process.
        """
        from ascendrun.core.notices.settings import read_notices
        from ascendrun.query.bundle.job import bundle_job

        return bundle_job(
            self._head.state_dir,
            ref,
            None if path is None else Path(path),
            layout=layout,
            with_logs=with_logs,
            max_bytes=max_bytes,
            is_dry=is_dry,
            notices=read_notices(self._head.settings),
            environ=os.environ if environ is None else environ,
        )
