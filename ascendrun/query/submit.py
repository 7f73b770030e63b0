"""From a job file on disk to a submission: read, completely validated, hosts selected, directories packed."""

from __future__ import annotations

import errno
import getpass
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable

import ascendrun
from ascendrun.core.errors import ConflictError, InvalidInputError, NotFoundError, Problem
from ascendrun.core.events import SEPARATE
from ascendrun.core.hosts import Host, queue_of, select_hosts
from ascendrun.core.jobfile import spec as specs
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobfile.pipeline import StageJob
from ascendrun.core.jobfile.sweep import clashes
from ascendrun.core.jobfile.tree import LocalFiles
from ascendrun.core.jobs.job import Job, State, newest_stages
from ascendrun.core.jobs.placement import Fault, choose_hosts, placement_faults, pool_of
from ascendrun.core.jobs.plan import CODE_TREE, LIBRARY_TREE, PROGRAMS_TREE, Tree
from ascendrun.core.node_messages import node_hint, node_text
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.release import release_on_disk
from ascendrun.head.state.state_dir import StoreUnusableError, make_state_dir, tree_file
from ascendrun.head.state.user_files import read_hostfile, read_source
from ascendrun.head.survey.submission import Submission
from ascendrun.node import tree_hash
from ascendrun.node.files import read_json, write_json
from ascendrun.options import ProgramOptions
from ascendrun.output_file import write_output
from ascendrun.planner.training import find_programs, load_programs
from ascendrun.query.library import copy_library
from ascendrun.text import Text, suggestion

_CACHE = "__pycache__"


@dataclass(frozen=True)
class ValidStage:
    """A stage of a valid job file; `stage` None: the job of a file without stages. `needs`: the previous stage, None:
    the first. `hosts`: those that it would use, in rank order; () if the file names no hostfile."""

    stage: str | None
    needs: str | None
    spec: JobSpec
    hosts: tuple[Host, ...]


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
        trees=pack_trees(spec, settings.state_dir),
        file=str(job_file.absolute()),
        user=_user(),
    )


def _user() -> str | None:
    """Return the login name of this process; None: it has none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None


def make_submissions(
    job_file: Path,
    settings: Settings,
    *,
    overrides: Sequence[str],
    hostfile: Path | None,
    key: str,
    engine: str | None = None,
    only: str | None = None,
    exclude: str | None = None,
    priority: int = 0,
) -> tuple[Submission, ...]:
    """Make one submission for each stage of a pipeline, or for each job of a sweep; each key is followed by the name
    of its stage, or by the number of its job.

    Any other file gives the one submission of its job, without a stage.
    """
    choice: dict[str, Any] = {"overrides": overrides, "is_placed": True, "hostfile": hostfile, "engine": engine}
    stages = read_sweep(job_file, settings, **choice)
    sweep_id = {"id": f"s-{hashlib.sha256(key.encode()).hexdigest()[:8]}"}
    places = [one.spec.sweep and one.spec.sweep.model_copy(update=sweep_id) for one in stages]
    flags = {"--hosts": only, "--exclude": exclude, "--priority": priority}
    for kind in {queue_of({"engine": stage.spec.engine}) for stage in stages} - {None}:
        for flag in [flag for flag, value in flags.items() if value]:
            text = Text("engine.flags", "engine type {type} does not support {flag}", type=kind, flag=flag)
            hint = Text("engine.flags.hint", "set options of the engine: docs/engines.md")
            raise InvalidInputError([Problem(flag, None, None, text, hint)])
    hosts = [read_pool(stage.spec, job_file, hostfile=hostfile, only=only, exclude=exclude) for stage in stages]
    packed: dict[str, tuple[Tree, ...]] = {}  # stages usually have the same directories
    keys = [f"{stage.spec.program} {stage.spec.workdir!r}" for stage in stages]
    for stage, tree_key in zip(stages, keys):
        if tree_key not in packed:
            packed[tree_key] = pack_trees(stage.spec, settings.state_dir)
    return tuple(
        Submission(
            key=f"{key}.{place.index}" if place else key if one.stage is None else f"{key}.{one.stage}",
            spec=one.spec.model_copy(update={"sweep": place}) if place else one.spec,
            hosts=pool,
            trees=packed[tree_key],
            file=str(job_file.absolute()),
            stage=one.stage,
            needs=one.needs,
            priority=priority,
            user=_user(),
        )
        for one, place, pool, tree_key in zip(stages, places, hosts, keys)
    )


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


def pack_trees(spec: JobSpec, state_dir: Path) -> tuple[Tree, ...]:
    """Pack the user's directory, and the programs for a bundled one, else what the user's script may import, each into
    one file named by its hash."""
    make_state_dir(state_dir)
    trees: list[Tree] = []
    if spec.workdir is not None:
        exclude = (*spec.workdir.exclude, *_inside(state_dir, spec.workdir.path))
        trees.append(_pack(CODE_TREE, spec.workdir.path, exclude, state_dir))
    try:
        trees.append(_pack_package(spec.program, state_dir))
    except OSError as error:
        raise _unwritable(state_dir, error) from error
    return tuple(trees)


def _pack_package(program: str | None, state_dir: Path) -> Tree:
    """Pack the programs, or the library: again only when a file of this package has changed."""
    is_own = program is not None and (own := find_programs().get(program)) is not None and not own.is_bundled
    name = LIBRARY_TREE if program is None else PROGRAMS_TREE
    memory, release = str(tree_file(state_dir, name).with_suffix(".json")), release_on_disk([""])
    with suppress(OSError, ValueError, KeyError, TypeError):
        known: Any = read_json(memory)
        tree = Tree(**known["tree"])
        if not is_own and known["release"] == release and tree_file(state_dir, tree.sha256).exists():
            return tree
    with tempfile.TemporaryDirectory(prefix="packing-", dir=state_dir) as folder:  # not in /tmp, if it is killed
        if program is None:
            copy_library(Path(folder))
        else:
            _copy_programs(program, Path(folder))
        tree = _pack(name, folder, (), state_dir)
    if not is_own:
        write_json(memory, {"release": release, "tree": asdict(tree)}, durable=False)
    return tree


def _unwritable(state_dir: Path, error: OSError) -> StoreUnusableError:
    from ascendrun.head.state.database import unwritable

    if isinstance(error, shutil.Error):  # of each file that was not copied
        return unwritable(state_dir / "trees", error.args[0][0][2])
    return unwritable(state_dir / "trees", error)


def _inside(state_dir: Path, folder: str) -> tuple[str, ...]:
    """Return the pattern that excludes ascendrun's state from a staged directory; () if the state is elsewhere."""
    below = os.path.relpath(os.path.realpath(state_dir), os.path.realpath(folder))
    return () if below.startswith("..") else (f"/{below}",)


def _copy_programs(program: str, folder: Path) -> None:
    """Copy the package as ranks need it: its programs, their options, rules and messages, nothing of the head. Of
    installed programs only the one that runs."""
    ignored = shutil.ignore_patterns(_CACHE)
    own = find_programs().get(program)
    if own is not None and not own.is_bundled:
        shutil.copytree(own.folder, folder.joinpath(*own.package.split(".")), ignore=ignored)
    package = Path(ascendrun.__file__).resolve().parent
    for name in ("programs", "lightning", "planner", "facts", "text"):
        shutil.copytree(package / name, folder / "ascendrun" / name, ignore=ignored)
    for name in ("__init__.py", "client.py", "option_tables.py", "options.py"):
        shutil.copy(package / name, folder / "ascendrun")


def _pack(name: str, folder: str, exclude: Sequence[str], state_dir: Path) -> Tree:
    exclude = (*exclude, f"{_CACHE}/")
    try:
        entries = tree_hash.list_tree(folder, exclude)
        sha256 = tree_hash.hash_listing(entries)
        path = tree_file(state_dir, sha256)
        if not path.exists():
            path.parent.mkdir(exist_ok=True, mode=0o700)
            write_output(path, lambda file: tree_hash.write_tar(folder, entries, file), mode=0o600)
    except (OSError, tree_hash.InvalidTreeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _unwritable(state_dir, error) from error
        raise not_staged(folder, error) from error
    return Tree(name=name, sha256=sha256, size_bytes=path.stat().st_size, files=len(entries))


def not_staged(path: str, error: OSError | tree_hash.InvalidTreeError) -> InvalidInputError:
    """Return why a file or directory is not sent to another machine."""
    rule = error.message if isinstance(error, tree_hash.InvalidTreeError) else None
    reason, hint = (str(error), None) if rule is None else (node_text(rule), node_hint(rule))
    message = Text("staging.not-possible", "cannot stage the directory: {reason}", reason=reason)
    return InvalidInputError([Problem(path, None, None, message, hint)])
