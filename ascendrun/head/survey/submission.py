"""Submission of a job: what the submitting process sends to the controller, for the store and the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.errors import ConflictError, InvalidInputError, Problem
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import Job, newest_stages
from ascendrun.core.jobs.job_copy import JobCopy
from ascendrun.core.jobs.placement import choose_hosts
from ascendrun.core.jobs.plan import Folders, LaunchPlan, Tree
from ascendrun.core.jobs.roles import parts_of
from ascendrun.core.rank_env import is_own_variable
from ascendrun.core.reports import NodeReport
from ascendrun.head.protocol.control_messages import Submit
from ascendrun.head.state.job_table import StoredJob, job_id_of
from ascendrun.head.state.state_dir import tree_file
from ascendrun.head.state.store import Store
from ascendrun.node import layout
from ascendrun.text import Text, to_json

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.core.jobs.schedule import Claim
    from ascendrun.head.spool.artifact_fetch import Subject
    from ascendrun.head.spool.output_fetch import JobOutputs


def _load_spec(values: Mapping[str, Any]) -> JobSpec:
    from ascendrun.core.jobfile.model import JobSpec

    return JobSpec.model_validate_json(json.dumps(values))


@dataclass(frozen=True)
class Submission:
    """A validated job. `key` makes repeats harmless; `hosts`: those that it may use, in the order of the hostfile.
    `stage`, `needs`: names of its own and the previous pipeline stage; None: not in a pipeline, no requirement.
    `examines`, `may_lack_files`: see core/jobs/job.Request. `user`: who submits it, None: unknown."""

    key: str
    spec: JobSpec = field(metadata={"read": _load_spec})
    hosts: tuple[Host, ...]
    trees: tuple[Tree, ...]
    file: str | None
    stage: str | None = None
    needs: str | None = None
    priority: int = 0
    examines: bool = False
    user: str | None = None
    may_lack_files: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """Return what is stored of it, as JSON values."""
        return {
            "key": self.key,
            "spec": json.loads(self.spec.model_dump_json()),
            "hosts": [to_json(host) for host in self.hosts],
            "trees": [asdict(tree) for tree in self.trees],
            "file": self.file,
        }

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), **self.values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Submission:
        return load_dataclass(cls, values)

    @classmethod
    def from_stored(cls, stored: StoredJob) -> Submission:
        return cls.from_json({name: getattr(stored, name) for name in ("key", "spec", "hosts", "trees", "file")})


def stages_around(store: Store, job: Job) -> tuple[list[Submission], list[Submission]]:
    """Return the stages of a job's pipeline before it, and those that wait for it, each as it was submitted last, on
    the hosts of the job if they may use them. ([], []): it is not in a pipeline."""
    stages = store.jobs.stages(job.pipeline) if job.pipeline else ()
    newest = [stages[index] for index in newest_stages([one.job for one in stages])]
    place = next((index for index, one in enumerate(newest) if one.job.stage == job.stage), len(newest))

    def placed(one: StoredJob) -> Submission:
        submission = Submission.from_stored(one)
        if job.engine is not None:  # it requests the hosts of the stage before it
            here = tuple(host for host in job.granted if host.name in job.hosts)
            return replace(submission, hosts=here, stage=one.job.stage)
        first = sorted(submission.hosts, key=lambda host: host.name not in job.hosts)
        return replace(submission, hosts=choose_hosts(submission.spec, first), stage=one.job.stage)

    later = [placed(one) for one in newest[place + 1 :] if not one.job.is_terminal]
    return [placed(one) for one in newest[:place]], later


def load_subject(stored: StoredJob) -> Subject:
    """Return the part of a stored job that is required to collect artifacts from its hosts."""
    from ascendrun.head.spool.artifact_fetch import Subject

    submission = Submission.from_stored(stored)
    job = stored.job
    hosts = tuple(host for host in submission.hosts if host.name in job.used_hosts)
    used = {number: job.hosts_of(number) for number in range(1, job.attempt + 1)}
    return Subject(job.id, job.run, submission.spec.devices.type, job.attempt, hosts, used)


def load_outputs(stored: StoredJob) -> JobOutputs:
    """Return the outputs of a stored job; without hosts if no attempt was started."""
    from ascendrun.head.spool.output_fetch import JobOutputs

    submission = Submission.from_stored(stored)
    spec, job = submission.spec, stored.job
    attempt = job.attempt if job.go_sent_at_s is not None else job.attempt - 1
    names = job.hosts_of(attempt) if attempt > 0 else ()
    is_separate = spec.outputs_from == "all"
    hosts = tuple(host for name in names for host in submission.hosts if host.name == name)
    return JobOutputs(
        job_id=job.id,
        folder=job.pipeline or job.id,
        run=job.home or job.run,
        attempt=job.attempt,
        patterns=spec.outputs,
        hosts=hosts if is_separate else hosts[:1],
        separate=is_separate,
    )


def make_job(submission: Submission, job_id: str, head_id: str, now_s: float) -> Job:
    """Make the first record of a submitted job."""
    job = JobCopy(
        id=job_id,
        number=0,
        name=submission.spec.name,
        run=layout.make_run(head_id, job_id),
        submitted_at_s=now_s,
        priority=submission.priority,
        user=submission.user,
        **submission.values,
    ).new_job()
    return replace(job, request=replace(job.request, examines=submission.examines))


def add_jobs(store: Store, request: Submit, *, now_s: float) -> Sequence[tuple[Job, Submission]]:
    """Store the jobs of a request, all or none. With keys that are known, return those jobs and store nothing.

    Raises ConflictError if a directory that was packed for it has been removed since.
    """
    submissions = [Submission.from_json(one) for one in request.submissions]
    first = submissions[0]
    for tree in {tree.sha256: tree for one in submissions for tree in one.trees}.values():
        if not tree_file(store.path.parent, tree.sha256).exists():
            what = Text("submit.tree-removed", "the packed directory {name} was removed meanwhile", name=tree.name)
            raise ConflictError(what, hint=Text("submit.tree-removed.hint", "submit again"))
    if first.stage is not None:
        return list(zip(add_stages(store, submissions, request.pipeline, now_s), submissions))

    with store.writing() as db:

        def add(one: Submission) -> Job:
            def make(number: int, head_id: str) -> Job:
                return make_job(one, job_id_of(number), head_id, now_s)

            return store.jobs.insert(db, **one.values, now_s=now_s, make_job=make)

        return [(add(one), one) for one in submissions]


def add_stages(store: Store, submissions: Sequence[Submission], pipeline: str | None, now_s: float) -> tuple[Job, ...]:
    """Store the stages of a pipeline, all or none; return their jobs. `pipeline`: the id to continue; None: new.

    With known keys, return those jobs and store nothing. All stages use the working directory of the pipeline, so that
    a stage finds the files of the previous stage on its host.
    """
    before = [one.job for one in store.jobs.stages(pipeline)] if pipeline else []
    ids = {str(job.stage): job.id for job in before}
    newest, count = before[-1].id if before else None, len(before)
    jobs: list[Job] = []
    with store.writing() as db:
        for submission in submissions:

            def make(number: int, head_id: str, submission: Submission = submission) -> Job:
                nonlocal pipeline
                pipeline = pipeline or job_id_of(number)
                job = make_job(submission, f"{pipeline}-{count + len(jobs) + 1}", head_id, now_s)
                needs = ids.get(submission.needs or "")
                return replace(
                    job,
                    request=replace(job.request, same_as=needs or newest, may_lack_files=submission.may_lack_files),
                    pipeline=pipeline,
                    stage=submission.stage,
                    home=layout.make_run(head_id, pipeline),
                    needs=needs,
                )

            job = store.jobs.insert(db, **submission.values, now_s=now_s, make_job=make)
            ids[str(job.stage)] = job.id
            jobs.append(job)
    return tuple(jobs)


def claims_of(spec: JobSpec, hosts: Sequence[Host]) -> dict[str, Claim]:
    """Return the job's claim on each host of its pool: named devices, counted slots on cpu, else the complete host.

    Unnamed NPUs and GPUs are not counted yet: without leases on the node two jobs could select the same ones. A host
    may get any role of the job: its claim has room for each.
    """
    from ascendrun.core.jobs.schedule import Claim  # not for those who only submit: it defines many types

    wanted = [part.spec.devices for part in parts_of(spec)]
    named = [set(devices.ids) for devices in wanted if devices.ids is not None]
    is_counted = not named and all(devices.type == "cpu" for devices in wanted)
    ids = tuple(sorted(set().union(*named))) if len(named) == len(wanted) else None
    claims = {}
    for host in hosts:
        count = max(devices.per_node or len(devices.ids or ()) or host.slots or 1 for devices in wanted)
        claims[host.name] = Claim(host.name, count, capacity=host.slots if is_counted else None, ids=ids)
    return claims


def build_plan(
    spec: JobSpec,
    hosts: tuple[Host, ...],
    reports: Mapping[str, NodeReport],
    job: Job,
    trees: tuple[Tree, ...],
    *,
    hosts_of_others: int = 0,
) -> LaunchPlan:
    """Return the plan of the job's current attempt. `hosts_of_others`: of the other live jobs of this head. Raises
    PreflightError or InvalidInputError with every reason."""
    from ascendrun.ascend.containers import RAY_NAMES, with_npus
    from ascendrun.core.jobs.plan import make_plan
    from ascendrun.health.samples.device_samples import sampling_request
    from ascendrun.planner.training import package_of

    if spec.min_nodes is not None and spec.nodes is not None:
        spec = spec.model_copy(update={"nodes": min(spec.nodes, len(hosts))})
    folders = {
        host: Folders(
            work=layout.work_dir(report.root, job.home or job.run, report.machine_key),
            checkpoints=layout.checkpoints_dir(report.root, job.run),
            attempt=layout.attempt_dir(report.root, job.run_id, report.machine_key),
            trees=f"{report.root}/trees",
        )
        for host, report in reports.items()
    }
    plan = make_plan(
        spec,
        hosts,
        reports,
        job=job.id,
        attempt=job.attempt,
        run_id=job.run_id,
        folders=folders,
        trees=trees,
        home=job.home,
        resume=job.resume,
        package=package_of(spec.program),
        ray_names=RAY_NAMES,
    )
    return replace(
        plan,
        nodes=tuple(replace(node, container=with_npus(node.container)) for node in plan.nodes),
        sampling=sampling_request(
            spec.devices.type, every_s=spec.sampling.interval_s, hosts=len(plan.nodes) + hosts_of_others
        ),
    )


def read_secret_env(spec: JobSpec) -> dict[str, str]:
    """Read the variables of the job's `env_file` files, now and never stored. Raises InvalidInputError."""
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for file in map(str, spec.env_file):
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = Text("staging.env-unreadable", "cannot read the file: {error}", error=str(error))
            problems.append(Problem(file, None, None, what))
            continue
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, equals, value = line.partition("=")
            name = name.strip()
            if not equals or not name.isidentifier():
                problems.append(Problem(file, number, 1, Text("staging.env-line", "expected NAME=value")))
            elif is_own_variable(name):
                what = Text("staging.env-reserved", "{name} is set by ascendrun", name=name)
                problems.append(Problem(file, number, 1, what, Text("staging.env-reserved.hint", "remove this line")))
            else:
                values[name] = value
    if problems:
        raise InvalidInputError(problems)
    return values
