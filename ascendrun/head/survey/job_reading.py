"""Reading of a job file into submissions: completely validated, with the hosts that each job may use."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import ConflictError, InvalidInputError, NotFoundError, Problem
from ascendrun.core.events import SEPARATE
from ascendrun.core.hosts import Host, queue_of, select_hosts
from ascendrun.core.jobfile import spec as specs
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobfile.pipeline import StageJob
from ascendrun.core.jobfile.sweep import clashes
from ascendrun.core.jobfile.tree import LocalFiles
from ascendrun.core.jobs.placement import Fault, choose_hosts, placement_faults, pool_of
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.command_place import reading_place
from ascendrun.head.protocol.control_messages import JobRead, ReadJob
from ascendrun.head.state.user_files import read_hostfile, read_source
from ascendrun.head.survey.submission import Submission
from ascendrun.options import ProgramOptions
from ascendrun.planner.training import load_programs
from ascendrun.text import Text


def read_job(
    job_file: Path, settings: Settings | None = None, *, overrides: Sequence[str] = (), engine: str | None = None
) -> JobSpec:
    """Return the job of a file (of a pipeline its first stage), with its paths made absolute.

    Raises InvalidInputError with every problem.
    """
    return read_stages(job_file, settings, overrides=overrides, engine=engine)[0].spec


def read_stages(
    job_file: Path,
    settings: Settings | None = None,
    *,
    overrides: Sequence[str] = (),
    is_placed: bool = False,
    hostfile: Path | None = None,
    engine: str | None = None,
    number: int = 1,
) -> tuple[StageJob, ...]:
    """Return every stage of a pipeline, as `read_job`; of any other file its one job.

    `is_placed`: also report what the hosts lack: those of `hostfile`, of `engine`, or of the job's own. `settings`:
    with the engines, None: an engine stays as it is written. `number`: which job of a sweep, from 1.
    """

    def on_engine(spec: JobSpec) -> JobSpec:
        if settings is None:
            return spec
        return specs.on_engine(spec, settings, name=engine, hostfile=hostfile, file=str(job_file))

    directory = job_file.absolute().parent
    text = read_source(job_file)
    programs = load_programs(specs.parse_program_options, _own_programs(text, directory))
    stages = specs.parse_stages(
        text,
        str(job_file),
        overrides=overrides,
        programs=programs,
        check_names=_check_names,
        files=LocalFiles(
            is_directory=lambda path: (directory / path).is_dir(),
            is_readable=lambda path: os.access(directory / path, os.R_OK),
        ),
        placement=partial(_placement_faults, on_engine, directory=directory, hostfile=hostfile) if is_placed else None,
        number=number,
    )
    return tuple(
        replace(stage, spec=on_engine(specs.resolve_paths(stage.spec, str(directory), programs))) for stage in stages
    )


def read_sweep(job_file: Path, settings: Settings, **choice: Any) -> tuple[StageJob, ...]:
    """Return the jobs of a sweep in their order; of another file the same as `read_stages`, as `choice`.

    Raises InvalidInputError with every problem of all jobs.
    """
    count = specs.count_jobs(read_source(job_file), str(job_file), choice.get("overrides", ()))
    jobs: list[StageJob] = []
    problems: list[Problem] = []
    for number in range(1, count + 1):
        try:
            jobs += read_stages(job_file, settings, **choice, number=number)
        except InvalidInputError as error:
            problems += error.problems
    problems += clashes(jobs) if jobs and jobs[0].spec.sweep is not None else ()
    if problems:
        raise InvalidInputError(list(dict.fromkeys(problems)))
    return tuple(jobs)


def _check_names() -> tuple[str, ...]:
    from ascendrun.health.checks import NAMES  # not for a job without `checks`

    return (*NAMES, SEPARATE)


def _own_programs(text: bytes, directory: Path) -> dict[str, ProgramOptions]:
    """Return the option tables of the programs in the job file's text that are files of the user: FILE.json of each.

    Raises InvalidInputError with the faults of a table.
    """
    words = text.decode("utf-8", "replace")
    names = {name for name in re.findall(r"\./[\w./-]+\.py", words) if (directory / name).is_file()}
    tables = {name: (directory / name).with_suffix(".json") for name in sorted(names)}
    return {
        name: specs.parse_program_options(name, table.read_text(encoding="utf-8"), str(table))
        for name, table in tables.items()
        if table.is_file()
    }


def read_hosts(spec: JobSpec, job_file: Path, *, hostfile: Path | None = None) -> tuple[Host, ...]:
    """Return the hosts that the job would use if all were free, in rank order; `hostfile` overrides the job's own.

    Raises InvalidInputError.
    """
    return choose_hosts(spec, read_hostfile(hostfile or Path(specs.require_hostfile(spec, str(job_file)))))


def read_pool(
    spec: JobSpec, job_file: Path, *, hostfile: Path | None, only: str | None = None, exclude: str | None = None
) -> tuple[Host, ...]:
    """Return the hosts that the job may use, in the order of the file. `only`, `exclude`: use these (None: all), or not
    these, as in `npu[01-03],@group`. (): its engine grants them.

    Raises InvalidInputError; NotFoundError for a name or group that is not listed."""
    if queue_of({"engine": spec.engine}) is not None:
        return ()
    hosts = read_hostfile(hostfile or Path(specs.require_hostfile(spec, str(job_file))))
    chosen = select_hosts(hosts, only) if only else tuple(hosts)
    gone = select_hosts(hosts, exclude) if exclude else ()
    return pool_of(spec, tuple(host for host in chosen if host not in gone))


def _placement_faults(
    on_engine: Callable[[JobSpec], JobSpec], spec: JobSpec, *, directory: Path, hostfile: Path | None
) -> Sequence[Fault]:
    """Return what the hosts lack for the job; () without a hostfile, or with one that `read_hosts` will reject."""
    try:
        spec = on_engine(spec)
        path = hostfile or (directory / spec.hostfile if spec.hostfile else None)
        return () if path is None else tuple(placement_faults(spec, read_hostfile(path)))
    except (InvalidInputError, NotFoundError):
        return ()


def read_submissions(settings: Settings, request: ReadJob, *, engine: str | None = None) -> tuple[Submission, ...]:
    """Make one submission for each stage of a pipeline, or for each job of a sweep; each key is followed by the name
    of its stage, or by the number of its job. Nothing is packed: their `trees` are ().

    Any other file gives the one submission of its job, without a stage. Raises InvalidInputError with every problem.
    """
    job_file, hostfile = Path(request.file), None if request.hostfile is None else Path(request.hostfile)
    choice: dict[str, Any] = {"overrides": request.overrides, "hostfile": hostfile, "engine": engine}
    stages = read_sweep(job_file, settings, is_placed=True, **choice)
    key = request.key
    sweep_id = {"id": f"s-{hashlib.sha256(key.encode()).hexdigest()[:8]}"}
    places = [one.spec.sweep and one.spec.sweep.model_copy(update=sweep_id) for one in stages]
    _refuse_flags(stages, {"--hosts": request.only, "--exclude": request.exclude, "--priority": request.priority})
    chosen: dict[str, Any] = {"hostfile": hostfile, "only": request.only, "exclude": request.exclude}
    hosts = [read_pool(stage.spec, job_file, **chosen) for stage in stages]
    return tuple(
        Submission(
            key=f"{key}.{place.index}" if place else key if one.stage is None else f"{key}.{one.stage}",
            spec=one.spec.model_copy(update={"sweep": place}) if place else one.spec,
            hosts=pool,
            trees=(),
            file=str(job_file.absolute()),
            stage=one.stage,
            needs=one.needs,
            priority=request.priority,
            user=request.user,
        )
        for one, place, pool in zip(stages, places, hosts)
    )


def _refuse_flags(stages: Sequence[StageJob], flags: Mapping[str, object]) -> None:
    """Raise InvalidInputError for a flag with a value that the engine of a stage does not support."""
    for kind in {queue_of({"engine": stage.spec.engine}) for stage in stages} - {None}:
        for flag in [flag for flag, value in flags.items() if value]:
            text = Text("engine.flags", "engine type {type} does not support {flag}", type=kind, flag=flag)
            hint = Text("engine.flags.hint", "set options of the engine: docs/engines.md")
            raise InvalidInputError([Problem(flag, None, None, text, hint)])


def needs_stack(submissions: Sequence[Submission]) -> bool:
    """Return whether a bundled program runs on this machine, in the Python of ascendrun."""
    return any(
        host.is_local
        for one in submissions
        if one.spec.program is not None and one.spec.python is None
        for host in one.hosts
    )


def read_for_command(request: ReadJob, state_dir: Path) -> JobRead:
    """Read a job file for the `submit` of another process. Raises InvalidInputError, and ConflictError where that
    process may read another job than this one."""
    if request.place != reading_place() or any(map(_is_of_process, (request.file, request.hostfile))):
        raise _not_here()
    if specs.count_jobs(read_source(Path(request.file)), request.file, request.overrides) > 1:
        raise _not_here()
    found = read_submissions(Settings(state_dir), request)
    if any(one.spec.engine is not None for one in found):
        raise _not_here()
    return JobRead(tuple(one.to_json() for one in found), needs_stack(found))


def _is_of_process(path: str | None) -> bool:
    """Return whether a path names another file in each process, as /dev/fd/63 of a shell's `<(command)`: here it may
    be the end of a connection, whose bytes would be lost."""
    return path is not None and Path(path).parts[1:2] in (("dev",), ("proc",))


def _not_here() -> ConflictError:
    return ConflictError(Text("submit.not-here", "the command reads this job file itself"))
