"""Job files: read, check, plan, write from templates; plans of trainings as the controller makes them at a start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.cluster.api import Part
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.keys import explain_key
from ascendrun.core.jobfile.model import JobSpec, job_json_schema
from ascendrun.core.jobfile.origins import Origin, origins_of
from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.core.jobs.placement import choose_hosts
from ascendrun.core.records import as_record
from ascendrun.head.protocol.command_place import login_name
from ascendrun.head.protocol.control_messages import Plan, ReadJob
from ascendrun.head.survey.job_reading import read_hosts, read_job, read_submissions, read_sweep
from ascendrun.head.survey.submission import Submission
from ascendrun.planner.training import load_programs
from ascendrun.query.submit import ValidStage, with_packed
from ascendrun.query.templates import check_new_job, copy_template, list_templates, write_new_job

if TYPE_CHECKING:
    from ascendrun.planner.plan import TrainingPlan


class JobFiles(Part):
    """Job files: read, check, plan, write from templates."""

    def validate(
        self, job_file: str | Path, *, overrides: Sequence[str] = (), hostfile: str | Path | None = None
    ) -> tuple[ValidStage, ...]:
        """Return the stages of a job file (without stages: its one job) with their hosts. Queries no node.

        Raises InvalidInputError with every problem.
        """
        file, hostfile = Path(job_file), _path(hostfile)
        if self._head.settings.blocks:
            from ascendrun.head.loop.machine.power_agent import load_power

            load_power(self._head.settings)
        return tuple(
            ValidStage(
                stage.stage,
                stage.needs,
                stage.spec,
                read_hosts(stage.spec, file, hostfile=hostfile) if hostfile or stage.spec.hostfile else (),
            )
            for stage in read_sweep(file, self._head.settings, overrides=overrides, is_placed=True, hostfile=hostfile)
        )

    def sample_progress(self, log: str | Path, *, pattern: str | None = None) -> list[dict[str, Any]]:
        """Return the steps that are read from an output, under the names of docs/metrics.md. Raises OSError.

        `pattern`: progress.pattern of a job, None: the output of the usual frameworks is recognised.
        """
        from ascendrun.head.spool.output_progress import read_log

        return read_log(Path(log), pattern=pattern)

    def read(self, job_file: str | Path, *, overrides: Sequence[str] = ()) -> JobSpec:
        """Return the job of a file (of a pipeline its first stage), without its hosts. Raises InvalidInputError."""
        return read_job(Path(job_file), self._head.settings, overrides=overrides)

    def hosts(
        self, job_file: str | Path, *, overrides: Sequence[str] = (), hostfile: str | Path | None = None
    ) -> tuple[Host, ...]:
        """Return the hosts that the job would use, in the order of their ranks. Raises InvalidInputError."""
        return read_hosts(self.read(job_file, overrides=overrides), Path(job_file), hostfile=_path(hostfile))

    def plan(
        self,
        job_file: str | Path,
        *,
        overrides: Sequence[str] = (),
        hostfile: str | Path | None = None,
        hosts: str | None = None,
        exclude: str | None = None,
        engine: str | None = None,
    ) -> tuple[Mapping[str, Any], ...]:
        """Return exactly what `submit` would start now, one plan for each stage. Queries the nodes, starts nothing."""
        choice: dict[str, Any] = {"overrides": overrides, "engine": engine, "only": hosts, "exclude": exclude}
        with self._placed(job_file, hostfile, **choice) as submissions:
            return self._launch_plans(submissions)

    def training_plans(
        self,
        job_file: str | Path,
        *,
        overrides: Sequence[str] = (),
        hostfile: str | Path | None = None,
        engine: str | None = None,
    ) -> tuple[TrainingPlan, ...]:
        """Return the plan of each stage: problems, strategy, memory, time, disk. Queries the nodes, uses no device.

        A start is refused if a plan with the facts of that moment has a fatal problem. Raises InvalidInputError.
        """
        with self._placed(job_file, hostfile, overrides=overrides, engine=engine) as submissions:
            return self._training_plans(submissions)

    def origins(
        self,
        job_file: str | Path,
        *,
        overrides: Sequence[str] = (),
        hostfile: str | Path | None = None,
        engine: str | None = None,
    ) -> tuple[tuple[Origin, ...], ...]:
        """Return, for each stage, which value came from the job file, the engine, the settings or the caller; ()
        without an engine. Queries no node."""
        choice: dict[str, Any] = {"overrides": overrides, "hostfile": _path(hostfile), "engine": engine}
        return tuple(origins_of(one.spec) for one in read_sweep(Path(job_file), self._head.settings, **choice))

    def dry_run(
        self,
        job_file: str | Path,
        *,
        overrides: Sequence[str] = (),
        hostfile: str | Path | None = None,
        hosts: str | None = None,
        exclude: str | None = None,
        engine: str | None = None,
        from_stage: str | None = None,
        until_stage: str | None = None,
        only_stages: Sequence[str] = (),
    ) -> tuple[tuple[Mapping[str, Any], ...], tuple[TrainingPlan, ...]]:
        """Return `plan` and `training_plans` of the same submission, which is made once."""
        from ascendrun.query.submit import choose_stages

        choice: dict[str, Any] = {"overrides": overrides, "engine": engine, "only": hosts, "exclude": exclude}
        with self._placed(job_file, hostfile, **choice) as placed:
            submissions = choose_stages(placed, only=only_stages, first=from_stage, last=until_stage)
            return self._launch_plans(submissions), self._training_plans(submissions)

    @contextmanager
    def _placed(
        self,
        job_file: str | Path,
        hostfile: str | Path | None,
        *,
        overrides: Sequence[str],
        engine: str | None,
        only: str | None = None,
        exclude: str | None = None,
    ) -> Iterator[tuple[Submission, ...]]:
        """Yield the submissions of a job file; an engine lends hosts to those that have none."""
        settings, own_hosts = self._head.settings, None if hostfile is None else str(hostfile)
        request = ReadJob(
            str(job_file),
            "dry-run",
            user=login_name(),
            overrides=tuple(overrides),
            hostfile=own_hosts,
            only=only,
            exclude=exclude,
        )
        submissions = with_packed(read_submissions(settings, request, engine=engine), settings.state_dir)
        submissions = submissions[:1] if submissions[0].spec.sweep else submissions
        lender = next((one.spec.engine for one in submissions if not one.hosts), None)
        if not isinstance(lender, dict):
            yield submissions
            return
        from ascendrun.cluster.borrowing import lent_hosts

        with lent_hosts(settings, lender, nodes=max(one.spec.nodes or 1 for one in submissions)) as (hosts, _):
            yield tuple(replace(one, hosts=hosts[: one.spec.nodes]) for one in submissions)

    def _launch_plans(self, submissions: Sequence[Submission]) -> tuple[Mapping[str, Any], ...]:
        plans = [self._head.request(Plan(one.to_json()), timeout_s=120.0).plan for one in submissions]
        origins = [as_record(origins_of(one.spec)) for one in submissions]
        return tuple(
            {**plan, "engine": one.spec.engine, "origins": of} for plan, one, of in zip(plans, submissions, origins)
        )

    def _training_plans(self, submissions: Sequence[Submission]) -> tuple[TrainingPlan, ...]:
        from ascendrun.head.survey.training_plan import PROBES, RUNS_READ, plan_stage, recorded_runs, training_stages
        from ascendrun.health.survey.check_context import CheckContext

        placed = [replace(one, hosts=choose_hosts(one.spec, one.hosts)) for one in submissions]
        stages, runs_of = training_stages(placed), partial(recorded_runs, (), self._head.state_dir)
        if any(stage.training is not None for stage in stages):
            with self._head.store() as store:
                runs_of = partial(recorded_runs, store.jobs.all()[-RUNS_READ:], self._head.state_dir)
        plans = []
        for stage, one in zip(stages, placed):
            is_planned = stage.training is not None
            world = (
                self._head.survey(one.hosts, one, training=tuple(stage.paths), names=PROBES, is_full=False)
                if is_planned
                else CheckContext({})
            )
            plans.append(plan_stage(stage, world, runs_of))
        return tuple(plans)

    templates = staticmethod(list_templates)
    init = staticmethod(copy_template)
    check_new = staticmethod(check_new_job)
    write_new = staticmethod(write_new_job)
    schema = staticmethod(job_json_schema)

    def describe_key(self, key: str) -> list[str]:
        """Return lines about a key of job files, a bundled program, or PROGRAM.OPTION. Raises NotFoundError."""
        return explain_key(key, load_programs(parse_program_options))


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)
