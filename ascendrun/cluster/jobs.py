"""Jobs (submit, list, show, stop, wait) and the job files that define them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.cluster.controller import POLL_S, ControllerCalls
from ascendrun.core.errors import ConflictError, DeadlineExceededError
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ascendrun.core.hosts import Host
    from ascendrun.core.jobfile.spec import JobSpec
    from ascendrun.core.jobs.job import Job
    from ascendrun.head.protocol.control_messages import ControllerStatus
    from ascendrun.head.state.store import StoredJob
    from ascendrun.query.submit import ValidStage
    from ascendrun.query.views import JobDetail, JobView


class JobCalls(ControllerCalls):
    """Operations on jobs."""

    # Job files

    def validate(
        self, job_file: str | Path, *, overrides: Sequence[str] = (), hostfile: str | Path | None = None
    ) -> tuple[ValidStage, ...]:
        """Return the stages of a job file (without stages: its one job) with their hosts. Queries no node.

        Raises InvalidInputError with every problem.
        """
        from ascendrun.query.submit import validate

        return validate(Path(job_file), overrides=overrides, hostfile=_path(hostfile))

    def read_job(self, job_file: str | Path, *, overrides: Sequence[str] = ()) -> JobSpec:
        """Return the job of a file (of a pipeline its first stage), without its hosts. Raises InvalidInputError."""
        from ascendrun.query.submit import read_job

        return read_job(Path(job_file), overrides=overrides)

    def job_hosts(
        self, job_file: str | Path, *, overrides: Sequence[str] = (), hostfile: str | Path | None = None
    ) -> tuple[Host, ...]:
        """Return the hosts that the job would use, in the order of their ranks. Raises InvalidInputError."""
        from ascendrun.query.submit import read_hosts

        return read_hosts(self.read_job(job_file, overrides=overrides), Path(job_file), hostfile=_path(hostfile))

    def install_training_stack(
        self,
        job_file: str | Path,
        *,
        overrides: Sequence[str] = (),
        hostfile: str | Path | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Install the packages of bundled programs if the job runs on this machine. Takes minutes the first time.

        `log` gets every line of progress, None: stderr. Raises PreflightError.
        """
        from ascendrun.query.submit import read_hosts, read_stages
        from ascendrun.query.train_env import ensure_training_stack

        specs = [stage.spec for stage in read_stages(Path(job_file), overrides=overrides)]
        hosts = [
            host
            for spec in specs
            if spec.program is not None and spec.python is None
            for host in read_hosts(spec, Path(job_file), hostfile=_path(hostfile))
        ]
        if any(host.is_local for host in hosts):
            ensure_training_stack(None, log)

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
        """Validate the file, stage its directories, store the job. After the return, the job survives a crash.

        `overrides`: "args.lr=1e-4" texts. `key`: repeated calls with one key return the same job. `resume`: a pipeline
        of the same stages to resume in its directory, from `from_stage`; None: from the first stage that has not
        succeeded. For a pipeline, the view of the pipeline is returned.
        """
        import secrets

        from ascendrun.head.protocol.control_messages import Submit
        from ascendrun.query.submit import make_submissions, stages_to_repeat

        submissions = make_submissions(
            Path(job_file),
            overrides=overrides,
            hostfile=_path(hostfile),
            state_dir=self.settings.state_dir,
            key=key or secrets.token_hex(16),
        )
        # The controller may die after it stored the job and before it replies; the key makes a repeat harmless.
        if resume is None and from_stage is None and submissions[0].stage is None:
            return self.job(self._request(Submit((submissions[0].to_json(),)), repeat=True).job).job
        before = self.stages(resume) if resume is not None else ()
        repeated = stages_to_repeat(submissions, [stored.job for stored in before], from_stage, resume)
        request = Submit(tuple(stage.to_json() for stage in repeated), before[0].job.pipeline if before else None)
        view = self.pipeline(self._request(request, repeat=True).job)
        assert view is not None
        return view

    def plan(
        self, job_file: str | Path, *, overrides: Sequence[str] = (), hostfile: str | Path | None = None
    ) -> tuple[Mapping[str, Any], ...]:
        """Return exactly what `submit` would start, one plan for each stage. Queries the nodes, starts nothing."""
        from ascendrun.head.protocol.control_messages import Plan
        from ascendrun.query.submit import make_submissions

        submissions = make_submissions(
            Path(job_file),
            overrides=overrides,
            hostfile=_path(hostfile),
            state_dir=self.settings.state_dir,
            key="dry-run",
        )
        return tuple(self._request(Plan(stage.to_json()), timeout_s=120.0).plan for stage in submissions)

    def jobs(self, *, everything: bool = False, folded: bool = False) -> tuple[JobView, ...]:
        """Return live jobs, newest first; with `everything` also ended jobs. `folded`: one view for each pipeline."""
        with self._reading() as store:
            every = store.all_jobs()
        chosen = [stored for stored in reversed(every) if everything or not stored.job.is_terminal]
        self._keep_watched([stored.job for stored in chosen])
        status = self._status_of([stored.job for stored in chosen])
        if not folded:
            return tuple(self._view(stored, status) for stored in chosen)
        views = [self._view(stored, status) for stored in chosen if stored.job.pipeline is None]
        for pipeline in {stored.job.pipeline for stored in chosen} - {None}:
            views.append(self._pipeline_view([stored for stored in every if stored.job.pipeline == pipeline], status))
        return tuple(sorted(views, key=lambda view: view.created_at_s, reverse=True))

    def job_names(self) -> Mapping[str, str]:
        """Return the name of every job by its id, the oldest first. Works without a controller."""
        with self._reading() as store:
            return store.job_names()

    def count_states(self) -> Mapping[str, int]:
        """Return the number of jobs in each state, including ended jobs."""
        from collections import Counter

        with self._reading() as store:
            return Counter(state.value for state in store.states().values())

    def stages(self, ref: str) -> tuple[StoredJob, ...]:
        """Return every job of a pipeline, oldest first; () if `ref` (an id or a name) is not a pipeline."""
        with self._reading() as store:
            pipeline = store.pipeline_id(ref)
            return store.stages(pipeline) if pipeline else ()

    def pipeline(self, ref: str) -> JobView | None:
        """Return one view of a pipeline, in the state of its representative stage; None if `ref` is not a pipeline."""
        stages = self.stages(ref)
        return self._pipeline_view(stages, self._status_of([stored.job for stored in stages])) if stages else None

    def whole_pipeline(self, ref: str, job: JobView) -> JobView | None:
        """Return the pipeline if `ref`, for which `job` was found, is a pipeline; None: it is a job."""
        whole = self.pipeline(ref) if job.pipeline is not None else None
        return whole if whole is not None and whole.id == job.pipeline else None

    def job(self, ref: str) -> JobDetail:
        """Return a job by id, name (the newest of it) or unambiguous start of an id. Raises NotFoundError."""
        from ascendrun.query.views import make_job_detail

        with self._reading() as store:
            stored = store.find(ref)
            events = store.events(stored.job.id)
        self._keep_watched([stored.job])
        status = self._status_now() if not stored.job.is_terminal else None
        liveness = {} if status is None else status.liveness.get(stored.job.id, {})
        return make_job_detail(stored, self._view(stored, status), events, liveness, self.settings)

    def stop(self, ref: str, *, now: bool = False) -> JobView:
        """Request a stop and return immediately; `now` skips the grace period. Of a pipeline all stages are stopped.

        Raises NotFoundError; ConflictError if it has ended.
        """
        from ascendrun.head.protocol.control_messages import Stop

        live = [stored.job.id for stored in self.stages(ref) if not stored.job.is_terminal]
        job = self.job(ref).job
        chosen = tuple(reversed(live or [job.id]))  # the last stage first: none starts when the previous stage ends
        ended: list[ConflictError] = []
        for job_id in chosen:
            try:
                self._request(Stop(job_id, now), repeat=True)
            except ConflictError as conflict:  # a stage may end while the others are stopped
                ended.append(conflict)
        if len(ended) == len(chosen):
            raise ended[-1]
        return self.job(job.id).job

    def wait(self, ref: str, *, timeout_s: float | None = None) -> JobDetail:
        """Return when the job, or the complete pipeline, has ended. Raises DeadlineExceededError."""
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

    def _holders(self) -> Mapping[str, str]:
        """Return {host: the live job that uses it}."""
        return {host: job.id for job in self.jobs() for host in job.hosts if job.state not in ("QUEUED", "BACKOFF")}

    def _keep_watched(self, jobs: Sequence[Job]) -> None:
        """Start the controller if a live job has none: the previous controller may have been killed."""
        if any(job.ended_at_s is None for job in jobs):
            from ascendrun.head.loop.daemon import is_running

            if not is_running(self.settings.state_dir):
                self.ensure_controller()

    def _status_of(self, jobs: Sequence[Job]) -> ControllerStatus | None:
        """Return the controller's status if a job runs, since its stored state may be older than the controller's."""
        return self._status_now() if any(job.state.value in ("RUNNING", "STAGING") for job in jobs) else None

    def _view(self, stored: StoredJob, status: ControllerStatus | None) -> JobView:
        from ascendrun.query.views import Reachability, make_job_view

        now = None
        if status is not None:
            job_id = stored.job.id
            now = Reachability(
                status.liveness.get(job_id, {}), status.silence_s.get(job_id, {}), status.staged.get(job_id, {})
            )
        return make_job_view(stored, self._progress(stored.job), now)

    def _pipeline_view(self, stored: Sequence[StoredJob], status: ControllerStatus | None) -> JobView:
        from ascendrun.core.jobs.pipelines import pipeline_status
        from ascendrun.query.views import make_pipeline_view

        whole = pipeline_status([stage.job for stage in stored])
        return make_pipeline_view(stored, whole, self._view(stored[whole.representative], status))

    def _progress(self, job: Job) -> Mapping[str, Any] | None:
        from ascendrun.head.state.state_dir import spool_dir

        host = next((node.host for node in job.nodes if 0 in node.ranks), None)
        if host is None:
            return None
        from ascendrun.head.spool.metrics_reader import newest_values

        return newest_values(spool_dir(self.settings.state_dir, job.id, job.attempt), 0, host=host)


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)
