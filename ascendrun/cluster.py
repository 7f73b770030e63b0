"""Python API: everything that the command line does, as method calls. The command line uses this module only.

from ascendrun import Cluster

cluster = Cluster()
job = cluster.submit("jobs/quickstart.yaml")
for line in cluster.logs(job.id, follow=True):
    print(line.ranks, line.text)
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import ConflictError, DeadlineExceededError, NotFoundError, UnreachableError
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.settings import Settings, load_settings
from ascendrun.head.spool.metrics_reader import newest_values
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.query.views import (
    ExecResult,
    HostStatus,
    JobDetail,
    JobView,
    NodeView,
    RankView,
    Reachability,
    make_exec_result,
    make_host_status,
    make_job_detail,
    make_job_view,
    make_pipeline_view,
)
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.spec import JobSpec
    from ascendrun.core.jobs.job import Job
    from ascendrun.core.logs.folding import FoldedLine
    from ascendrun.core.logs.log_view import LogView
    from ascendrun.core.metrics import MetricsLine
    from ascendrun.core.samples import Newest
    from ascendrun.head.protocol.control_messages import ControllerStatus
    from ascendrun.head.protocol.control_socket import ControlClient
    from ascendrun.head.protocol.messages import R, Request
    from ascendrun.head.state.store import Store, StoredJob
    from ascendrun.health.comparison import DoctorReport
    from ascendrun.health.forecast import Forecast
    from ascendrun.health.report.data import Report
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.query.bundle.job import Bundle
    from ascendrun.query.deep_check import DeepCheck, DeepOptions
    from ascendrun.query.event_stream import EventStream
    from ascendrun.query.explain import Explanation
    from ascendrun.query.notice_view import NoticeTargetView, NoticeTestResult
    from ascendrun.query.top_source import TopSource


__all__ = ["Cluster", "Event", "ExecResult", "HostStatus", "JobDetail", "JobView", "NodeView", "RankView"]

POLL_S = 0.1
STATUS_S = 3.0
COLLECT_S = 180.0
"""More than all deadlines of a collection of artifacts together."""
CONTROLLER_START_S = 20.0
SURVEY_S = 180.0
"""More than all deadlines of a survey together: connecting, probing, looking, touching."""


class Cluster:
    """One state directory: its store, its controller (started when a call needs it), its jobs.

    Every call raises children of AscendrunError only.
    """

    def __init__(self, settings: Settings | None = None, *, state_dir: str | Path | None = None) -> None:
        """`settings`: None reads the environment and the settings files, as the command line does."""
        self.settings = settings or load_settings(
            os.environ, flags={} if state_dir is None else {"state_dir": str(state_dir)}
        )

    # Jobs

    def submit(
        self,
        job_file: str | Path,
        *,
        overrides: Sequence[str] = (),
        hostfile: str | Path | None = None,
        key: str | None = None,
        resume: str | None = None,
        from_stage: str | None = None,
    ) -> JobView:
        """Checks the file completely, stages its folders, stores the job. When this returns the job survives a crash.
        `overrides`: "args.lr=1e-4" texts. `key`: repeat a call with the same key and get the same job.
        `resume`: a pipeline of the same stages that goes on, in its folder, `from_stage` on; None: from the first
        stage that has not succeeded. Of a pipeline the view of the whole is returned."""
        import secrets

        from ascendrun.head.protocol.control_messages import Submit
        from ascendrun.query.submit import make_submissions, stages_to_repeat

        submissions = make_submissions(
            Path(job_file),
            overrides=overrides,
            hostfile=None if hostfile is None else Path(hostfile),
            state_dir=self.settings.state_dir,
            key=key or secrets.token_hex(16),
        )
        # The controller may die between storing and answering; the key makes asking again harmless.
        if resume is None and from_stage is None and submissions[0].stage is None:
            return self.job(self._ask(Submit((submissions[0].to_json(),)), repeat=True).job).job
        before = self.stages(resume) if resume is not None else ()
        wanted = stages_to_repeat(submissions, [one.job for one in before], from_stage, resume)
        request = Submit(tuple(one.to_json() for one in wanted), before[0].job.pipeline if before else None)
        view = self.pipeline(self._ask(request, repeat=True).job)
        assert view is not None
        return view

    def plan(
        self, job_file: Path, *, overrides: Sequence[str] = (), hostfile: Path | None = None
    ) -> tuple[Mapping[str, Any], ...]:
        """Exactly what `submit` would start, as `core.plan.render_plan` shows it, one for each stage: asks the nodes,
        starts nothing."""
        from ascendrun.head.protocol.control_messages import Plan
        from ascendrun.query.submit import make_submissions

        submissions = make_submissions(
            job_file, overrides=overrides, hostfile=hostfile, state_dir=self.settings.state_dir, key="dry-run"
        )
        return tuple(self._ask(Plan(one.to_json()), timeout_s=120.0).plan for one in submissions)

    def jobs(self, *, everything: bool = False, folded: bool = False) -> tuple[JobView, ...]:
        """Live jobs, newest first; with `everything` the ended ones too. `folded`: of a pipeline one view."""
        with self._reading() as store:
            stored = store.all_jobs()
        wanted = [one for one in reversed(stored) if everything or not one.job.is_terminal]
        self._keep_watched([one.job for one in wanted])
        status = self._status_of([one.job for one in wanted])
        if folded:
            whole = {
                one.job.pipeline: [each for each in stored if each.job.pipeline == one.job.pipeline]
                for one in wanted
                if one.job.pipeline is not None
            }
            views = [self._view(one, status) for one in wanted if one.job.pipeline is None]
            views += [self._pipeline_view(stages, status) for stages in whole.values()]
            views.sort(key=lambda view: view.created_at_s, reverse=True)
        else:
            views = [self._view(one, status) for one in wanted]
        return tuple(views)

    def stages(self, ref: str) -> tuple[StoredJob, ...]:
        """Every job of a pipeline, oldest first; () when `ref` (an id or a name) names none."""
        with self._reading() as store:
            pipeline = store.pipeline_id(ref)
            return store.stages(pipeline) if pipeline else ()

    def pipeline(self, ref: str) -> JobView | None:
        """A whole pipeline in one view, as the stage stands that tells most; None when `ref` names none."""
        stages = self.stages(ref)
        return self._pipeline_view(stages, self._status_of([one.job for one in stages])) if stages else None

    def job(self, ref: str) -> JobDetail:
        """By id, name (the newest of that name) or unambiguous start of an id. Raises NotFoundError."""
        with self._reading() as store:
            stored = store.find(ref)
            events = store.events(stored.job.id)
        self._keep_watched([stored.job])
        status = self._status_now() if not stored.job.is_terminal else None
        liveness = {} if status is None else status.liveness.get(stored.job.id, {})
        return make_job_detail(stored, self._view(stored, status), events, liveness)

    def stop(self, ref: str, *, now: bool = False) -> JobView:
        """Asks for a stop and returns at once; `now` skips the grace. Of a pipeline all its stages are stopped.

        Raises NotFoundError; ConflictError when it has ended.
        """
        from ascendrun.head.protocol.control_messages import Stop

        live = [stored.job.id for stored in self.stages(ref) if not stored.job.is_terminal]
        job = self.job(ref).job
        wanted = tuple(reversed(live or [job.id]))  # the last stage first: none begins when the one before it ends
        ended: list[ConflictError] = []
        for job_id in wanted:
            try:
                self._ask(Stop(job_id, now), repeat=True)
            except ConflictError as conflict:  # a stage may end while the others are stopped
                ended.append(conflict)
        if len(ended) == len(wanted):
            raise ended[-1]
        return self.job(job.id).job

    def wait(self, ref: str, *, timeout_s: float | None = None) -> JobDetail:
        """Returns when the job, or the whole pipeline, has ended. Raises DeadlineExceededError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            detail = self.job(ref)
            is_over = all(stored.job.is_terminal for stored in self.stages(ref))
            if detail.job.ended_at_s is not None and is_over:
                return detail
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineExceededError(
                    Text(
                        "cluster.wait-timeout",
                        "{job}: not finished after {limit_s:duration} (state {state})",
                        job=detail.job.id,
                        state=detail.job.state,
                        limit_s=timeout_s,
                    ),
                    hint=Text("cluster.follow", "follow the job: ascendrun logs -f {job}", job=detail.job.id),
                )
            time.sleep(POLL_S)

    # Hosts

    def execute(self, hosts: Sequence[Host], argv: Sequence[str], *, timeout_s: float) -> Iterator[ExecResult]:
        """Runs argv on every host at once; results come as hosts answer, one for every host."""
        from ascendrun.head.protocol.control_messages import Exec

        with self._client() as client:
            request = Exec(tuple(hosts), tuple(argv), timeout_s)
            for reply, body in client.stream(request, timeout_s=timeout_s + 60.0):
                yield make_exec_result(reply, body, timeout_s)

    def nodes(self, hosts: Sequence[Host], *, timeout_s: float = 90.0) -> Iterator[HostStatus]:
        """Asks every host how it is; results come as hosts answer, one for every host."""
        from ascendrun.head.protocol.control_messages import Nodes

        holders = {host: job.id for job in self.jobs() for host in job.hosts if job.state not in ("QUEUED", "BACKOFF")}
        with self._client() as client:
            for reply, _ in client.stream(Nodes(tuple(hosts)), timeout_s=timeout_s):
                yield make_host_status(reply, holders)

    def survey(
        self,
        hosts: Sequence[Host],
        *,
        job_file: Path | None = None,
        overrides: Sequence[str] = (),
        family: str | None = None,
        paths: Sequence[str] = (),
        names: Sequence[str] | None = None,
        is_full: bool = True,
        every_pair: bool = False,
    ) -> CheckContext:
        """What every host says of itself, in the shell that a job would get there; one answer for every host.

        `job_file`: ask as this job would (its hosts then are those that it takes). `names`: these probes only.
        `every_pair`: of NPU ports is tried, not a sample; on many hosts that takes minutes.
        """
        from ascendrun.head.protocol.control_messages import Survey
        from ascendrun.query.survey_reader import read_world

        submission = None
        if job_file is not None:
            from ascendrun.query.submit import make_submission

            submission = make_submission(
                job_file,
                overrides=overrides,
                hostfile=None,
                hosts=hosts,
                state_dir=self.settings.state_dir,
                key="doctor",
            )
            hosts = submission.hosts
        request = Survey(
            tuple(hosts),
            None if submission is None else submission.to_json(),
            device_type=family,
            paths=tuple(paths),
            names=None if names is None else tuple(names),
            is_full=is_full,
            every_pair=every_pair,
        )
        with self._client() as client:
            answers = [reply for reply, _ in client.stream(request, timeout_s=SURVEY_S)]
        return read_world(answers, submission, family=family, now_s=time.time())

    def doctor(
        self,
        hosts: Sequence[Host],
        *,
        job_file: Path | None = None,
        overrides: Sequence[str] = (),
        family: str | None = None,
        paths: Sequence[str] = (),
        is_full: bool = True,
        every_pair: bool = False,
    ) -> DoctorReport:
        """Check every node, compare them, and return findings with fixes. Nothing on the nodes is changed."""
        from ascendrun.health.checks import choose_checks, run_checks
        from ascendrun.health.comparison import make_report

        began = time.monotonic()
        context = self.survey(
            hosts,
            job_file=job_file,
            overrides=overrides,
            family=family,
            paths=paths,
            is_full=is_full,
            every_pair=every_pair,
        )
        wanted = context.job.checks if context.job is not None else None
        skip, require = (wanted.skip, wanted.require) if wanted is not None else ((), ())
        findings = run_checks(context, is_full=is_full, skip=skip, require=require)
        count = len(choose_checks(is_full=is_full, skip=skip, require=require))
        report = make_report(context, findings, checks=count, wall_s=time.monotonic() - began)
        return replace(report, forecast=self.forecast(len(hosts))) if hosts else report

    def forecast(self, nodes: int) -> Forecast:
        """What failures will cost on so many nodes, from published rates and what this cluster has seen itself."""
        from ascendrun.health.forecast import make_forecast
        from ascendrun.query.history import read_history

        return make_forecast(nodes, read_history(self.settings.state_dir, now_s=time.time()))

    def deep(
        self,
        hosts: Sequence[Host],
        base: JobSpec,
        *,
        options: DeepOptions | None = None,
        unfit: Sequence[str] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> DeepCheck:
        """Measures the hosts alone and in pairs with small jobs made from `base` (see head/deep.make_base), and keeps
        the report. Hosts that a job holds are left in peace, and the `unfit` too. `say` gets a line for every step."""
        from ascendrun.query.deep_check import StoreJobs, default_options, evaluate_and_save, run_deep_check

        holders = {host: job.id for job in self.jobs() for host in job.hosts if job.state not in ("QUEUED", "BACKOFF")}
        jobs = StoreJobs(
            self.settings.state_dir, lambda request: self._ask(request, repeat=True), self.ensure_controller
        )
        options = options or default_options(base.devices.type)
        report = run_deep_check(
            jobs, base, hosts, options, state_dir=self.settings.state_dir, busy=holders, unfit=unfit, say=say
        )
        return evaluate_and_save(report, self.settings.state_dir)

    # Measurements

    def samples(self, *, hosts: Collection[str] | None = None, since_s: float | None = None) -> Newest:
        """The newest stored sample of every device, host and rank. `since_s`: UTC seconds; None: the last minute."""
        from ascendrun.query.top_reader import newest_samples

        return newest_samples(self.settings.state_dir, hosts=hosts, since_s=since_s)

    def sample_now(
        self, hosts: Sequence[Host], *, timeout_s: float = 20.0, device_type: str | None = None
    ) -> tuple[Newest, Mapping[str, str]]:
        """A sample that the agents of these hosts take now; it is stored too. Also {host: why it sent none}.

        `device_type`: npu or cuda; None: whatever the host has.
        """
        from ascendrun.core.samples import Newest
        from ascendrun.head.protocol.control_messages import Sample

        if not hosts:
            return Newest(), {}
        request = Sample(tuple(hosts), timeout_s, device_type)
        with self._client() as client:
            replies = [reply for reply, _ in client.stream(request, timeout_s=timeout_s + 10.0)]
        newest = Newest(
            devices=tuple(sample for reply in replies for sample in reply.devices),
            hosts=tuple(sample for reply in replies for sample in reply.hosts),
        )
        return newest, {reply.host: str(reply.refused.line()) for reply in replies if reply.refused is not None}

    def request_samples(self, hosts: Sequence[Host], *, timeout_s: float = 20.0) -> None:
        """As `sample_now` without waiting: the samples are stored. A host with a request under way gets no second."""
        from ascendrun.head.protocol.control_messages import Sample

        with self._client() as client:
            client.post(Sample(tuple(hosts), timeout_s, unless_asked=True))

    def top(self, hosts: Sequence[Host] = (), *, is_patient: bool = False) -> TopSource:
        """What `top` shows, again and again: `.look(now_s=…)`. `hosts`: also sampled when no job runs there."""
        from ascendrun.query.top_source import TopSource

        return TopSource(self, hosts, is_patient=is_patient)

    def count_states(self) -> Mapping[str, int]:
        """How many jobs are in each state, ended ones too."""
        from collections import Counter

        with self._reading() as store:
            return Counter(state.value for state in store.states().values())

    def metrics(self, ref: str, *, rank: int = 0, attempt: int | None = None) -> tuple[MetricsLine, ...]:
        """The metrics that a rank has written, in order. `attempt`: None: the newest."""
        from ascendrun.head.spool.metrics_reader import find_metrics, iter_lines

        job = self.job(ref).job
        folder = spool_dir(self.settings.state_dir, job.id, attempt or max(job.attempt, 1))
        return tuple(iter_lines(find_metrics(folder, ranks=[rank]).get(rank, ())))

    # Logs and events

    def logs(
        self, ref: str, view: LogView | None = None, *, attempt: int | None = None, follow: bool = False
    ) -> Iterator[FoldedLine]:
        """The output of a job's ranks, merged by time; lines that ranks share come once. `view`: which lines.

        `attempt`: None: the newest. `follow`: goes on until the job has ended, later attempts too.
        """
        from ascendrun.query.log_follow import follow_lines, stored_lines

        if follow:
            return follow_lines(self, ref, view)
        detail = self.job(ref)
        return stored_lines(self.settings.state_dir, detail, attempt or max(detail.job.attempt, 1), view)

    def events(
        self, ref: str | None = None, *, since_s: float | None = None, codes: Collection[str] | None = None
    ) -> EventStream:
        """The events of one job or pipeline, or of all: `.new_events()` has those written since its last call."""
        from ascendrun.query.event_stream import EventStream

        job = None if ref is None else self.job(ref).job
        whole = self.whole_pipeline(ref, job) if ref is not None and job is not None else None
        return EventStream(
            self.settings.state_dir,
            job=None if whole is not None or job is None else job.id,
            pipeline=None if whole is None else whole.id,
            since_s=since_s,
            codes=codes,
        )

    def event_codes(self) -> tuple[str, ...]:
        """The codes of events that are stored."""
        from ascendrun.query.event_stream import event_codes

        return event_codes(self.settings.state_dir)

    def whole_pipeline(self, ref: str, job: JobView) -> JobView | None:
        """The pipeline, when `ref`, for which `job` was found, names one; None: it names a job."""
        whole = self.pipeline(ref) if job.pipeline is not None else None
        return whole if whole is not None and whole.id == job.pipeline else None

    # Diagnosis

    def explain(self, ref: str, *, attempt: int | None = None, lang: str | None = None) -> Explanation:
        """Why a job's attempt ended, with evidence; of a job that runs, its anomalies. `lang`: None: of the process."""
        from ascendrun import text
        from ascendrun.query.explain import explain_job

        return explain_job(
            self.settings.state_dir,
            ref,
            attempt=attempt,
            lang=lang or text.language(),
            now_s=time.time(),
            liveness=self.liveness(),
        )

    def diagnosis(self, ref: str, *, lang: str | None = None) -> str | None:
        """One sentence: which rank failed first and why. None: it did not fail, or the cause is unknown."""
        from ascendrun import text
        from ascendrun.query.explain import summary_line

        try:
            return summary_line(self.settings.state_dir, ref, lang=lang or text.language(), now_s=time.time())
        except NotFoundError:
            return None

    def collect(self, ref: str, *, attempt: int | None = None) -> Iterator[tuple[str, str | None]]:
        """Fetch the artifacts of an attempt from its hosts: (host, None or why not), as they come."""
        from ascendrun.head.protocol.control_messages import Gather

        with self._client() as client:
            for reply, _ in client.stream(Gather(self.job(ref).job.id, attempt), timeout_s=COLLECT_S):
                yield reply.host, None if reply.problem is None else str(reply.problem)

    def report(self, ref: str, *, now_s: float | None = None) -> Report:
        """What one job did, where its time went and what it cost."""
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
        are masked when their names say that they are secret; None: those of this process.
        """
        from ascendrun.query.bundle.job import BundleRequest, bundle_job

        wish = BundleRequest(
            path=None if path is None else Path(path),
            layout=layout,
            with_logs=with_logs,
            max_bytes=max_bytes,
            is_dry=is_dry,
        )
        return bundle_job(
            self.settings.state_dir,
            ref,
            wish,
            notices=self.settings.notices,
            environ=os.environ if environ is None else environ,
        )

    # Notifications

    def notification_targets(self) -> tuple[NoticeTargetView, ...]:
        """Where notifications go, and the result of the last one; without credentials."""
        from ascendrun.core.notice_settings import NoticeSettings
        from ascendrun.query.notice_view import view_targets

        return view_targets(self.settings.notices or NoticeSettings(), self.settings.state_dir)

    def test_notifications(self, name: str | None = None) -> tuple[NoticeTestResult, ...]:
        """Send a test notification to one target, or to all."""
        from ascendrun.core.notice_settings import NoticeSettings
        from ascendrun.query.notice_view import send_tests

        return send_tests(self.settings.notices or NoticeSettings(), name=name)

    # The controller

    def ensure_controller(self) -> None:
        """Starts the controller when none runs. Raises UnreachableError when it does not come up."""
        self._client().close()

    def controller_status(self, *, timeout_s: float = 10.0) -> ControllerStatus | None:
        """The state of the running controller; None: none runs. Raises DeadlineExceededError."""
        from ascendrun.head.protocol.control_messages import Status
        from ascendrun.head.protocol.control_socket import ControlClient

        try:
            with ControlClient(self.settings.state_dir) as client:
                return client.call(Status(), timeout_s=timeout_s)
        except UnreachableError:
            return None

    def _status_now(self) -> ControllerStatus | None:
        """For who shows it beside other things: None also when the controller is too busy, or paused, to tell."""
        try:
            return self.controller_status(timeout_s=STATUS_S)
        except DeadlineExceededError:
            return None

    def liveness(self, *, timeout_s: float = STATUS_S) -> Mapping[str, Mapping[str, str]]:
        """By job and host, as the running controller sees it; {} where none runs or it does not respond in time."""
        try:
            status = self.controller_status(timeout_s=timeout_s)
        except DeadlineExceededError:
            return {}
        return {} if status is None else status.liveness

    def stop_controller(self, *, timeout_s: float = 30.0) -> None:
        """Ends the controller; jobs go on. Returns when it is gone; nothing happens when none runs."""
        from ascendrun.head.protocol.control_messages import Shutdown
        from ascendrun.head.protocol.control_socket import ControlClient

        try:
            with ControlClient(self.settings.state_dir) as client:
                client.call(Shutdown(), timeout_s=timeout_s)
        except UnreachableError:
            return
        from ascendrun.head.loop.daemon import wait_until_free

        wait_until_free(self.settings.state_dir, timeout_s=timeout_s)

    def run_controller(self) -> bool:
        """Is the controller, in this process, until it ends. False at once when another process already is."""
        from ascendrun.backends.controller import run_controller

        return run_controller(self.settings)

    def _client(self) -> ControlClient:
        from ascendrun.head.protocol.control_socket import ControlClient

        try:
            return ControlClient(self.settings.state_dir)
        except UnreachableError:
            from ascendrun.head.loop.daemon import start_controller

            start_controller(self.settings.state_dir, deadline_s=CONTROLLER_START_S)
            return ControlClient(self.settings.state_dir)

    def _ask(self, request: Request[R], *, timeout_s: float = 60.0, repeat: bool = False) -> R:
        """One question to the controller. `repeat`: it may be asked again when the controller dies over it."""
        until = time.monotonic() + CONTROLLER_START_S
        while True:
            try:
                with self._client() as client:
                    return client.call(request, timeout_s=timeout_s)
            except UnreachableError:
                if not repeat or time.monotonic() > until:
                    raise
            time.sleep(POLL_S)  # a killed controller's socket may still accept for a moment

    def _keep_watched(self, jobs: Sequence[Job]) -> None:
        """Start the controller when a live job has none: the one before may have been killed."""
        if any(job.ended_at_s is None for job in jobs):
            from ascendrun.head.loop.daemon import is_running

            if not is_running(self.settings.state_dir):
                self.ensure_controller()

    # Reading

    def _reading(self) -> Store:
        from ascendrun.head.state.store import Store

        return Store.open_for_reading(self.settings.state_dir)

    def _status_of(self, jobs: Sequence[Job]) -> ControllerStatus | None:
        """The controller's status where a job runs, whose state may be older than what the controller knows."""
        return self._status_now() if any(job.state.value in ("RUNNING", "STAGING") for job in jobs) else None

    def _view(self, stored: StoredJob, status: ControllerStatus | None) -> JobView:
        now = None
        if status is not None:
            job_id = stored.job.id
            now = Reachability(
                status.liveness.get(job_id, {}), status.silence_s.get(job_id, {}), status.staged.get(job_id, {})
            )
        return make_job_view(stored, self._progress(stored.job), now)

    def _pipeline_view(self, stored: Sequence[StoredJob], status: ControllerStatus | None) -> JobView:
        from ascendrun.core.jobs.pipelines import pipeline_status

        whole = pipeline_status([one.job for one in stored])
        return make_pipeline_view(stored, whole, self._view(stored[whole.representative], status))

    def _progress(self, job: Job) -> Mapping[str, Any] | None:
        host = next((node.host for node in job.nodes if 0 in node.ranks), None)
        folder = spool_dir(self.settings.state_dir, job.id, job.attempt)
        return None if host is None else newest_values(folder, 0, host=host)
