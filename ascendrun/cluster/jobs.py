"""Jobs: submit, list, show, stop, wait."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.cluster.api import POLL_S, Part
from ascendrun.cluster.hosts import WAITING
from ascendrun.core.errors import ConflictError, DeadlineExceededError
from ascendrun.core.jobs.job import TERMINAL, pipeline_status
from ascendrun.core.reachability import UNKNOWN
from ascendrun.head.loop.guard import should_run
from ascendrun.head.protocol.command_place import login_name, reading_place
from ascendrun.head.protocol.control_messages import HoldJob, Prune, ReadJob, Remove, Retry, Stop, Submit
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.query.views import find_job, make_found_views, make_job_detail, make_job_view, make_pipeline_view
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ascendrun.cluster.job import Job
    from ascendrun.core.jobs.job import Job as JobRecord
    from ascendrun.core.pulse import Sight
    from ascendrun.head.protocol.control_messages import PruneReply
    from ascendrun.head.state.job_table import StoredJob
    from ascendrun.health.report.cost import JobUse
    from ascendrun.query.views import JobDetail, JobView

PRUNE_S = 900.0


class Jobs(Part):
    """Operations on jobs. `ref` in a signature: id, name (the newest of it) or unambiguous start of an id."""

    def submit(
        self,
        job_file: str | Path,
        *,
        overrides: Sequence[str] = (),
        hostfile: str | Path | None = None,
        key: str | None = None,
        resume: str | None = None,
        from_stage: str | None = None,
        until_stage: str | None = None,
        only_stages: Sequence[str] = (),
        priority: int = 0,
        hosts: str | None = None,
        exclude: str | None = None,
        engine: str | None = None,
        install_log: Callable[[str], None] | None = None,
    ) -> Job:
        """Validate the file, stage its directories, store the job. After the return, the job survives a crash.

        `overrides`: "args.lr=1e-4" texts. `key`: repeated calls with one key return the same job. `resume`: a pipeline
        of the same stages to resume in its directory, from `from_stage`; None: from the first stage that has not
        succeeded. `from_stage`, `until_stage`, `only_stages`: only these stages of the file. `priority`: jobs with a
        higher one are placed first. `hosts`, `exclude`: use only these hosts of the hostfile (`npu[01-03]` or
        `@group`), or not these. `engine`: of the settings, in place of the job's own. `install_log`: packages that
        bundled programs lack are installed if the job runs on this machine, which takes minutes the first time; it gets
        each line of progress. None: nothing is installed.

        Raises InvalidInputError with every problem of the file, PreflightError if packages are missing.
        """
        from ascendrun.cluster.job import Job
        from ascendrun.cluster.submitting import StageChoice, check_blocks, read_jobs, with_trees

        check_blocks(self._head.settings)
        before = [stored.job for stored in self.stages(resume)] if resume is not None else []
        request = ReadJob(
            str(job_file),
            key or os.urandom(16).hex(),
            place=reading_place(),
            user=login_name(),
            overrides=tuple(overrides),
            hostfile=None if hostfile is None else str(hostfile),
            only=hosts,
            exclude=exclude,
            priority=priority,
        )
        stages = StageChoice(only_stages, from_stage, until_stage, resume, before)
        read = read_jobs(self._head.settings, request, stages, engine=engine)
        if read.needs_stack and install_log is not None:
            from ascendrun.query.train_env import ensure_training_stack

            ensure_training_stack(install_log)
        submissions = with_trees(read, self._head.state_dir)
        # The controller may die after it stored the job and before it replies; the key makes a repeat harmless.
        pipeline = before[0].pipeline if before else None
        job_id = self._head.request(Submit(submissions, pipeline), repeat=True).job
        specs = [one["spec"] for one in submissions]
        sweep = specs[0].get("sweep") or {}
        return Job(self._cluster, job_id, warnings_of(specs, self._head.state_dir), sweep.get("id", ""))

    def retry(self, ref: str) -> JobView:
        """Start the next attempt of a job that failed or was stopped, with a new budget of restarts. A pipeline is
        resumed as with `submit(file, resume=...)`. Raises NotFoundError; ConflictError if it has not ended so."""
        stages = self.stages(ref)
        if stages:
            names = {stage.job.stage for stage in stages if stage.job.stage}
            return self.submit(stages[-1].file or "", resume=stages[-1].job.pipeline, only_stages=sorted(names)).view
        job = self.detail(ref).job
        self._head.request(Retry(job.id, job.attempt, self._head.sender), repeat=True)
        return self.detail(job.id).job

    def hold(self, ref: str) -> JobView:
        """Keep a queued job, or the queued stages of a pipeline, from being placed. Raises ConflictError."""
        return self._set_hold(ref, self._head.user)

    def unhold(self, ref: str) -> JobView:
        """Let a job be placed again. Raises ConflictError for the hold of an administrator of a shared queue."""
        return self._set_hold(ref, None)

    def list(self, *, everything: bool = False, folded: bool = False, ended: int = 0) -> tuple[JobView, ...]:
        """Return live jobs, newest first; also the `ended` newest jobs that have ended, with `everything` all of them.
        `folded`: one view for each pipeline."""
        chosen = self._newest_first(everything, ended)
        sight = self._sight_of([stored.job for stored in chosen])
        if sight is not None and sight.is_new:
            chosen = self._newest_first(everything, ended)
        if not folded:
            return tuple(self._view(stored, sight) for stored in chosen)
        views = [self._view(stored, sight) for stored in chosen if stored.job.pipeline is None]
        for pipeline in {stored.job.pipeline for stored in chosen} - {None}:
            views.append(self._pipeline_view(self.stages(str(pipeline)), sight))
        return tuple(sorted(views, key=lambda view: view.created_at_s, reverse=True))

    def names(self) -> Mapping[str, str]:
        """Return the name of every job by its id, the oldest first. Works without a controller."""
        with self._head.store() as store:
            return store.jobs.names()

    def count_states(self) -> Mapping[str, int]:
        """Return the number of jobs in each state, including ended jobs. Live jobs may be in the state UNKNOWN."""
        with self._head.store() as store:
            states = store.jobs.states().values()
        is_known = all(state in TERMINAL for state in states) or self._cluster.controller.sight().is_known
        return Counter(state.value if is_known or state in TERMINAL else UNKNOWN for state in states)

    def history(self, *, since_s: float | None = None, user: str | None = None) -> tuple[JobUse, ...]:
        """Return the use of devices by each ended job, the newest end first: device-hours over all attempts.

        `since_s`: only jobs that ended since (UTC seconds); `user`: only those that this user submitted. None: all.
        Works without a controller.
        """
        from ascendrun.query.history import read_history

        with self._head.store() as store:
            return read_history(store, since_s=since_s, user=user)

    def find(self, ref: str) -> Job:
        """Return a job, or a pipeline, by id, name (the newest of it) or unambiguous start of an id. Raises
        NotFoundError."""
        from ascendrun.cluster.job import Job

        with self._head.store() as store:
            return Job(self._cluster, store.jobs.pipeline_id(ref) or store.jobs.find(ref).job.id)

    def detail(self, ref: str) -> JobDetail:
        """Return the details of a job: nodes, ranks, events. Raises NotFoundError."""
        stored, events = find_job(self._head.state_dir, ref)
        sight = self._sight_of([stored.job])
        if sight is not None and sight.is_new:
            stored, events = find_job(self._head.state_dir, ref)
        seen = None if sight is None else sight.job(stored.job.id)
        return make_job_detail(stored, self._view(stored, sight), events, seen, self._head.settings)

    def pipeline(self, ref: str) -> JobView | None:
        """Return one view of a pipeline, in the state of its representative stage; None if `ref` is not a pipeline."""
        stages = self.stages(ref)
        return self._pipeline_view(stages, self._sight_of([stored.job for stored in stages])) if stages else None

    def stages(self, ref: str) -> tuple[StoredJob, ...]:
        """Return every job of a pipeline, oldest first; () if `ref` (an id or a name) is not a pipeline."""
        with self._head.store() as store:
            pipeline = store.jobs.pipeline_id(ref)
            return store.jobs.stages(pipeline) if pipeline else ()

    def whole_pipeline(self, ref: str, job: JobView) -> JobView | None:
        """Return the pipeline if `ref`, for which `job` was found, is a pipeline; None: it is a job."""
        whole = self.pipeline(ref) if job.pipeline is not None else None
        return whole if whole is not None and whole.id == job.pipeline else None

    def stop(self, ref: str, *, now: bool = False) -> JobView:
        """Request a stop and return immediately; `now` skips the grace period. Of a pipeline all stages are stopped.

        `ref` may also be the id or the tag of a found attempt; its view stays in the state FOUND until it has ended.
        Raises NotFoundError; ConflictError if it has ended.
        """
        by = self._head.sender
        found = [view for view in self.found_attempts() if ref in (view.id, view.name)]
        if found and ref not in self.names():
            self._head.request(Stop(ref, now, by), repeat=True)
            return found[0]
        live = [stored.job.id for stored in self.stages(ref) if not stored.job.is_terminal]
        job = self.detail(ref).job
        chosen = tuple(reversed(live or [job.id]))  # the last stage first: none starts when the previous stage ends
        ended: list[ConflictError] = []
        for job_id in chosen:
            try:
                self._head.request(Stop(job_id, now, by), repeat=True)
            except ConflictError as conflict:  # a stage may end while the others are stopped
                ended.append(conflict)
        if len(ended) == len(chosen):
            raise ended[-1]
        return self.detail(job.id).job

    def found_attempts(self) -> tuple[JobView, ...]:
        """Return the attempts that run on hosts and that no record explains: state FOUND, the tag as name."""
        return make_found_views(self._cluster.hosts.held())

    def wait(self, ref: str, *, timeout_s: float | None = None) -> JobDetail:
        """Return when the job, or the complete pipeline, has ended. Raises DeadlineExceededError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            detail = self.detail(ref)
            is_over = all(stored.job.is_terminal for stored in self.stages(ref))
            if detail.job.ended_at_s is not None and is_over:
                return detail
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineExceededError.of(
                    "cluster.wait-timeout",
                    "{job}: not finished after {limit_s:duration} (state {state})",
                    "follow the job: ascendrun logs -f {job}",
                    job=detail.job.id,
                    state=detail.job.state,
                    limit_s=timeout_s,
                )
            time.sleep(POLL_S)

    def remove(self, ref: str, *, force: bool = False) -> Iterator[PruneReply]:
        """Remove an ended job, or a pipeline, with its logs, outputs and files on the head node and on its nodes.

        Yield what was removed on each host, the head node (host None) last; `refused` there: the job stays. `force`:
        also if outputs were not fetched or a host is unreachable, which then keeps the files. Files in directories that
        the job names itself (`checkpoint.dir`, absolute paths) stay. Raises NotFoundError, ConflictError.
        """
        job = self.detail(ref).job
        if job.pipeline is not None and self.whole_pipeline(ref, job) is None:
            raise ConflictError(
                Text("remove.stage", "{job} is a stage of {pipeline}", job=job.id, pipeline=job.pipeline),
                hint=f"ascendrun rm {job.pipeline}",
            )
        ids = tuple(stored.job.id for stored in self.stages(ref)) or (job.id,)
        for reply, _ in self._head.stream(Remove(ids, force), timeout_s=PRUNE_S):
            yield reply

    def prune(
        self, *, older_s: float | None = None, keep: Sequence[str] = (), dry_run: bool = False
    ) -> Iterator[PruneReply]:
        """Remove old data of ended jobs: logs on the head node (host None) and on the nodes, unused staged directories.

        Yield what was removed on each host, with `dry_run` what would be. Limits: the settings `keep_…`; `older_s`:
        this age instead. `keep`: ids or names of jobs. Checkpoints and files that ranks wrote are never removed.
        """
        for name in keep:
            self.detail(name)
        for reply, _ in self._head.stream(Prune(older_s, tuple(keep), dry_run), timeout_s=PRUNE_S):
            yield reply

    def prune_engine(self, name: str, *, dry_run: bool = False) -> Iterator[PruneReply]:
        """End what jobs have left in an engine with a queue: allocations of this head that no job uses, and those of
        any head in which nothing runs. Yield each of their hosts. Raises NotFoundError, PreflightError."""
        from ascendrun.cluster.borrowing import end_unused
        from ascendrun.core.engines import find_engine
        from ascendrun.core.hosts import queue_of
        from ascendrun.head.protocol.control_messages import PruneReply

        engine = find_engine(self._head.settings, name)
        if queue_of({"engine": engine}) is None:
            return
        with self._head.store() as store:
            used, ours = {stored.job.allocation for stored in store.jobs.live()}, f"{store.head_id}-"

        def is_over(key: str) -> bool:
            return key.startswith(ours) and key not in used

        for host in end_unused(self._head.settings, engine, is_over, dry_run=dry_run):
            yield PruneReply(host)

    def _set_hold(self, ref: str, by: str | None) -> JobView:
        stages = [stored.job.id for stored in self.stages(ref) if stored.job.state.value in WAITING]
        for job_id in stages or [self.detail(ref).job.id]:
            self._head.request(HoldJob(job_id, by, self._head.user), repeat=True)
        return self.detail(ref).job

    def _newest_first(self, everything: bool, ended: int) -> Sequence[StoredJob]:
        with self._head.store() as store:
            if everything:
                return store.jobs.all()[::-1]
            return (*store.jobs.unended()[::-1], *(store.jobs.newest_ended(ended) if ended else ()))

    def _sight_of(self, jobs: Sequence[JobRecord]) -> Sight | None:
        """Return what is known now; None if all jobs have ended. A controller that died then may have left output of
        them on the nodes: it is started again."""
        is_live = not all(job.is_terminal for job in jobs)
        sight = self._cluster.controller.sight() if is_live or should_run(str(self._head.state_dir)) else None
        return sight if is_live else None

    def _view(self, stored: StoredJob, sight: Sight | None) -> JobView:
        return make_job_view(stored, self._progress(stored), None if sight is None else sight.job(stored.job.id))

    def _pipeline_view(self, stored: Sequence[StoredJob], sight: Sight | None) -> JobView:
        whole = pipeline_status([stage.job for stage in stored])
        return make_pipeline_view(stored, whole, self._view(stored[whole.representative], sight))

    def _progress(self, stored: StoredJob) -> Mapping[str, Any] | None:
        """Return the newest values of the attempt. A job that has ended shows those of its last attempt with a step:
        one that was restarted after its last step has none."""
        job = stored.job
        host = next((node.host for node in job.nodes if 0 in node.ranks), None)
        if host is None:
            return None
        from ascendrun.core.metrics import progress_pattern
        from ascendrun.head.spool.metrics_reader import newest_progress

        pattern = progress_pattern(stored.spec)
        for attempt in range(job.attempt, 0 if job.is_terminal else job.attempt - 1, -1):
            directory = spool_dir(self._head.state_dir, job.id, attempt)
            values = newest_progress(directory, host=host if attempt == job.attempt else None, pattern=pattern)
            if values is not None and job.state.value != "RUNNING":
                values = {name: value for name, value in values.items() if name != "phase"} or None
            if values is not None:
                return values
        return None


def warnings_of(specs: Sequence[Mapping[str, Any]], state_dir: Path) -> list[Text]:
    """Return what the user of these jobs should know: credentials in `env`, restarts that may not come."""
    found = []
    secret = _secret_names({name for spec in specs for name in spec.get("env") or ()})
    if secret:
        english = "env: {names} would be stored with the job; write NAME=VALUE into a file: env_file: [secrets.env]"
        found.append(Text("submit.secret-env", english, names=secret))
    sections = (spec.get("restart") or {} for spec in specs)
    if any(section.get("max_restarts") for section in sections) and not _is_installed(state_dir):
        english = (
            "neither systemd nor cron starts the controller again after a reboot, or when its guard is killed too: "
            "`ascendrun controller install`"
        )
        found.append(Text("submit.no-entry", english))
    return found


def _secret_names(names: set[str]) -> list[str]:
    if not names:
        return []
    from ascendrun.core.logs.redaction import SECRET_NAME

    return sorted(filter(SECRET_NAME.search, names))


def _is_installed(state_dir: Path) -> bool:
    from ascendrun.cluster.install import installed

    return installed(state_dir) is not None
