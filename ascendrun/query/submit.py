"""Submissions of a job file with its directories packed, and the choice of stages to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.job import Job, State, newest_stages
from ascendrun.core.jobs.placement import choose_hosts
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.command_place import login_name
from ascendrun.head.survey.job_reading import read_job
from ascendrun.head.survey.submission import Submission
from ascendrun.query.packing import pack_all
from ascendrun.text import Text, suggestion


@dataclass(frozen=True)
class ValidStage:
    """A stage of a valid job file; `stage` None: the job of a file without stages. `needs`: the previous stage, None:
    the first. `hosts`: those that it would use, in rank order; () if the file names no hostfile."""

    stage: str | None
    needs: str | None
    spec: JobSpec
    hosts: tuple[Host, ...]


def make_submission(
    job_file: Path,
    settings: Settings,
    *,
    overrides: Sequence[str],
    key: str,
    hosts: Sequence[Host],
    engine: str | None = None,
) -> Submission:
    """Make everything that the controller needs for a job on some of `hosts`; its directories are copied now.

    Raises InvalidInputError (job file, directories) and StoreUnusableError.
    """
    spec = read_job(job_file, settings, overrides=overrides, engine=engine)
    return Submission(
        key=key,
        spec=spec,
        hosts=choose_hosts(spec, hosts),
        trees=pack_all([spec.model_dump(mode="json")], settings.state_dir)[0],
        file=str(job_file.absolute()),
        user=login_name(),
    )


def with_packed(found: Sequence[Submission], state_dir: Path) -> tuple[Submission, ...]:
    """Return submissions with their directories packed. Raises InvalidInputError, StoreUnusableError."""
    packed = pack_all([one.values["spec"] for one in found], state_dir)
    return tuple(replace(one, trees=trees) for one, trees in zip(found, packed))


def choose_stages(
    submissions: Sequence[Submission], *, only: Sequence[str] = (), first: str | None = None, last: str | None = None
) -> tuple[Submission, ...]:
    """Return the stages `only`, (): all, from `first` to `last` in the order of the file. Each requires the nearest
    chosen one above it. Raises NotFoundError for a stage that the file does not have, or if none remains."""
    names = [one.stage or "" for one in submissions]
    for name in [*only, *filter(None, (first, last))]:
        _expect_stage(name, names)
    span = names[0 if first is None else names.index(first) : None if last is None else names.index(last) + 1]
    chosen = {name for name in span if not only or name in only}
    if not chosen:
        raise NotFoundError(Text("submit.no-stages", "no stage of the file is chosen: {stages}", stages=names))
    needs = {one.stage: one.needs for one in submissions}

    def nearest(name: str | None) -> str | None:
        return name if name is None or name in chosen else nearest(needs[name])

    return tuple(replace(one, needs=nearest(one.needs)) for one in submissions if (one.stage or "") in chosen)


def _expect_stage(name: str, names: Sequence[str]) -> None:
    if name not in names:
        text = Text("submit.no-stage", "{stage}: stage not found in the file", stage=name)
        raise NotFoundError(text, hint=suggestion(name, names))


def stages_to_repeat(
    submissions: Sequence[Submission], before: Sequence[Job], from_stage: str | None, pipeline: str | None
) -> tuple[Submission, ...]:
    """Return the stages of the file that are not done. `before`: the jobs of the pipeline so far. A stage that is named
    runs also where the files of earlier stages are lost.

    Raises InvalidInputError if the file has other stages than the pipeline, NotFoundError if there is no such pipeline
    or stage, ConflictError if it still runs or is complete.
    """
    names = [one.stage or "" for one in submissions]
    if pipeline is not None and not before:
        raise NotFoundError.of(
            "submit.no-pipeline",
            "{pipeline}: pipeline not found",
            "`ascendrun ps -a` lists pipelines; --resume requires the id of one",
            pipeline=pipeline,
        )
    if from_stage is not None:
        _expect_stage(from_stage, names)
    live = [job.id for job in before if not job.is_terminal]
    if live:
        raise ConflictError(
            Text("submit.pipeline-runs", "{pipeline} still runs ({jobs})", pipeline=pipeline, jobs=live),
            hint=f"ascendrun stop {pipeline}",
        )
    done = {str(before[index].stage) for index in newest_stages(before) if before[index].state is State.SUCCEEDED}
    left = [name for name in names if name not in done]
    first = from_stage or (left[0] if left else None)
    if first is None:
        raise ConflictError.of(
            "submit.all-succeeded",
            "every stage of {pipeline} has succeeded",
            "--from-stage {stage} repeats a stage",
            pipeline=pipeline,
            stage=names[-1],
        )
    missing = [
        one.needs
        for one in submissions[names.index(first) :]
        if one.needs and one.needs not in done and names.index(one.needs) < names.index(first)
    ]
    if missing:
        raise ConflictError(
            Text("submit.needed-stage", "required stage {stage} has not succeeded", stage=missing[0]),
            hint=f"--from-stage {missing[0]}",
        )
    return tuple(replace(one, may_lack_files=one.stage == from_stage) for one in submissions[names.index(first) :])
