"""The class `ascendrun.Cluster`: all calls by subject, and those about settings, templates and job records."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.cluster.files import FileCalls
from ascendrun.cluster.samples import SampleCalls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ascendrun.cluster.job import Job
    from ascendrun.core.settings import SettingView
    from ascendrun.health.report.data import Report
    from ascendrun.query.bundle.job import Bundle
    from ascendrun.query.explain import Explanation, JobStacks
    from ascendrun.query.new_job import NewJob
    from ascendrun.query.notice_view import NoticeTargetView, NoticeTestResult
    from ascendrun.query.templates import Template
    from ascendrun.text import Text

COLLECT_S = 180.0
STACKS_S = 40.0
"""Seconds, more than the sum of all deadlines of a collection of artifacts."""


def connect(state_dir: str | Path | None = None) -> Cluster:
    """Return the cluster of a state directory; None: that of the settings, as for the command line."""
    return Cluster(state_dir=state_dir)


class Cluster(SampleCalls, FileCalls):
    """One state directory: its store, its controller (started when a call needs it), its jobs.

    Every call raises only children of AscendrunError.
    """

    def _job(self, job_id: str) -> Job:
        from ascendrun.cluster.job import Job

        return Job(self, job_id)

    # Diagnosis and records

    def explain(
        self, ref: str, *, attempt: int | None = None, lang: str | None = None, fresh: bool = False
    ) -> Explanation:
        """Return why an attempt ended, with evidence; of a running job, anomalies. `lang` None: the process's.
        `fresh`: diagnose again even if the controller stored its diagnosis."""
        from ascendrun import text
        from ascendrun.query.explain import explain_job

        return explain_job(
            self.settings.state_dir,
            ref,
            attempt=attempt,
            lang=lang or text.language(),
            now_s=time.time(),
            liveness=self.liveness(),
            fresh=fresh,
        )

    def diagnosis(self, ref: str, *, lang: str | None = None) -> str | None:
        """Return which rank failed first and why, in one sentence. None: no failure, or the cause is unknown."""
        from ascendrun import text
        from ascendrun.core.errors import NotFoundError
        from ascendrun.query.explain import summary_line

        try:
            return summary_line(self.settings.state_dir, ref, lang=lang or text.language(), now_s=time.time())
        except NotFoundError:
            return None

    def stacks(self, ref: str, *, rank: int | None = None, attempt: int | None = None) -> JobStacks:
        """Return what the ranks of a running job do now, equal stacks once. `rank`: only this one, with all threads.

        Of an ended job, or with `attempt`: the stacks that were kept when it hung. Raises NotFoundError without any.
        """
        from ascendrun.core.errors import NotFoundError
        from ascendrun.head.protocol.control_messages import Stacks
        from ascendrun.query.explain import fold_stacks, kept_stacks
        from ascendrun.text import Text

        job = self.detail(ref).job
        if attempt is not None or job.state not in ("STARTING", "RUNNING", "STOPPING", "UNKNOWN"):
            kept = kept_stacks(self.settings.state_dir, job.id, rank=rank, attempt=attempt)
            if kept is None:
                what = Text("stacks.none-kept", "{job} ({state}): no stacks were kept", job=job.id, state=job.state)
                hint = Text("stacks.none-kept-hint", "stacks are kept of attempts that made no progress")
                raise NotFoundError(what, hint=hint)
            return kept
        with self._client() as client:
            replies = [reply for reply, _ in client.stream(Stacks(job.id), timeout_s=STACKS_S)]
        return fold_stacks(job, replies, rank=rank)

    def collect(self, ref: str, *, attempt: int | None = None) -> Iterator[tuple[str, Text | str | None]]:
        """Fetch the artifacts of an attempt; yield (host, None or the reason of a failure) in order of arrival."""
        from ascendrun.head.protocol.control_messages import Gather

        with self._client() as client:
            for reply, _ in client.stream(Gather(self.detail(ref).job.id, attempt), timeout_s=COLLECT_S):
                yield reply.host, reply.problem

    def report(self, ref: str, *, now_s: float | None = None) -> Report:
        """Return the course of one job, where its time went and its cost."""
        from ascendrun.query.report_reader import find_report

        return find_report(self.settings.state_dir, ref, now_s=time.time() if now_s is None else now_s)

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
        from ascendrun.query.bundle.job import BundleRequest, bundle_job

        request = BundleRequest(
            path=None if path is None else Path(path),
            layout=layout,
            with_logs=with_logs,
            max_bytes=max_bytes,
            is_dry=is_dry,
        )
        return bundle_job(
            self.settings.state_dir,
            ref,
            request,
            notices=self.settings.notices,
            environ=os.environ if environ is None else environ,
        )

    # Settings and notifications

    def config(self) -> tuple[SettingView, ...]:
        """Return every setting with its value and origin; notification targets without credentials."""
        from ascendrun.core.settings import view_settings

        return view_settings(self.settings)

    def notification_targets(self) -> tuple[NoticeTargetView, ...]:
        """Return where notifications go and the result of the last one of each target; without credentials."""
        from ascendrun.core.notice_settings import NoticeSettings
        from ascendrun.query.notice_view import view_targets

        return view_targets(self.settings.notices or NoticeSettings(), self.settings.state_dir)

    def test_notifications(self, name: str | None = None) -> tuple[NoticeTestResult, ...]:
        """Send a test notification to one target, or to all."""
        from ascendrun.core.notice_settings import NoticeSettings
        from ascendrun.query.notice_view import send_tests

        return send_tests(self.settings.notices or NoticeSettings(), name=name)

    # Templates and the schema of job files

    def templates(self) -> tuple[Template, ...]:
        """Return the templates of job files and hostfiles, by name."""
        from ascendrun.query.templates import list_templates

        return list_templates()

    def init(self, name: str, target: str | Path = ".") -> tuple[Path, ...]:
        """Copy a template into `target` and return the new files, the job file first.

        Raises NotFoundError for an unknown name, ConflictError if a file exists.
        """
        from ascendrun.query.templates import copy_template

        return copy_template(name, Path(target))

    def check_new_job(self, answers: NewJob, target: str | Path = ".") -> str:
        """Return the job file that `write_new_job` would write; raises as it does."""
        from ascendrun.query.new_job import check_new_job

        return check_new_job(answers, Path(target))

    def write_new_job(self, answers: NewJob, target: str | Path = ".") -> tuple[Path, ...]:
        """Write a job file and a hostfile into `target` and return the new files, the job file first.

        Raises InvalidInputError, ConflictError if a file exists.
        """
        from ascendrun.query.new_job import write_new_job

        return write_new_job(answers, Path(target))

    def dashboard(self) -> str:
        """Return a Grafana dashboard (JSON) of the metrics of `prometheus`."""
        from ascendrun.query.templates import templates_root

        return (templates_root() / "templates" / "grafana" / "ascendrun.json").read_text(encoding="utf-8")

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of job files."""
        from ascendrun.core.jobfile.spec import job_json_schema

        return job_json_schema()

    def describe_key(self, key: str) -> list[str]:
        """Return lines about a key of job files, a bundled program, or PROGRAM.OPTION. Raises NotFoundError."""
        from ascendrun.core.jobfile.keys import explain_key

        return explain_key(key)
