"""Conversion of the text of a job file to a JobSpec, or to a list of all its problems."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Callable

from pydantic import BaseModel, ValidationError

from ascendrun.core.engines import engine_types, find_engine, in_folder, read_engine
from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.hosts import queue_of
from ascendrun.core.jobfile.model import UNSUPPORTED, Container, JobSpec
from ascendrun.core.jobfile.pipeline import StageJob, StageRoot, parallel_conflicts, split_stages
from ascendrun.core.jobfile.roles import with_role_defaults
from ascendrun.core.jobfile.rules import broken_rules, typed_args
from ascendrun.core.jobfile.sweep import enter, points_of
from ascendrun.core.jobfile.tree import Draft, LocalFiles, apply_overrides, job_data
from ascendrun.core.reader.model_reader import IsReported, Path, read_model
from ascendrun.core.reader.source_text import INIT_HINT, REMOVE, in_order
from ascendrun.core.reader.yaml_source import KEY_VALUE, MappingNode, find, place_of, read_yaml
from ascendrun.core.settings import Settings
from ascendrun.option_tables import InvalidTableError, read_table
from ascendrun.options import ProgramOptions
from ascendrun.text import Text


def parse_program_options(name: str, json_text: str, file: str = "") -> ProgramOptions:
    """Return the option table of a program (`options.json`). Raises InvalidInputError with all its faults."""
    try:
        return read_table(name, json_text)
    except InvalidTableError as error:
        file = file or f"{name}/options.json"
        raise InvalidInputError([Problem(file, error.line, error.column, fault) for fault in error.faults]) from error


def parse_stages(
    text: str | bytes,
    file: str,
    *,
    overrides: Sequence[str] = (),
    programs: Mapping[str, ProgramOptions],
    check_names: Callable[[], Collection[str]] | None = None,
    files: LocalFiles | None = None,
    placement: Callable[[JobSpec], Iterable[tuple[tuple[str | int, ...], Text, Text]]] | None = None,
    number: int = 1,
) -> tuple[StageJob, ...]:
    """Return the jobs that the file and the overrides ("nodes=2") describe: one for each stage of a pipeline, in order,
    with the keys of the file and its own; a single job for any other file. Paths stay relative (see `resolve_paths`).

    Raises InvalidInputError with every problem; one of an override has "--set …" as its file and no line. Invalid YAML
    ends the search for problems. `check_names` returns the names of the checks, `files` reads the disk. `placement`
    returns the requirements of a job that the hosts do not meet: (key, message, hint); it also gets the name, nodes,
    devices, launcher and hostfile of a job whose other keys have problems. None: not checked. `number`: which job of a
    sweep, from 1.
    """
    source = read_yaml(text, file)
    if not source.is_complete:
        raise InvalidInputError(in_order(source.problems))
    apply_overrides(source, overrides, programs)
    root = source.root
    if root is None:
        source.problems.append(Problem(file, 1, 1, Text("jobfile.empty", "empty file"), INIT_HINT))
    elif not isinstance(root, MappingNode):
        source.problems.append(root.place.problem(Text("jobfile.no-mapping", "expected a mapping"), KEY_VALUE))
    if not isinstance(root, MappingNode):
        raise InvalidInputError(in_order(source.problems))
    sweep = enter(root, source, number, programs)
    roots = split_stages(root, source, programs)
    problems: list[Problem] = []
    jobs: list[StageJob] = []
    for stage in [StageRoot("", None, root)] if roots is None else roots:
        data, is_later = job_data(stage.root, source), stage.needs is not None
        draft = Draft(stage.root, data, source, programs, check_names, files, is_later)
        spec = _read_spec(draft, problems)
        placed = spec or _placement_part(draft)
        if placement is not None and placed is not None:
            for key, message, hint in placement(placed):
                problems.append(place_of(stage.root, key).problem(message, hint))
        if spec is not None:
            spec = spec if sweep is None else spec.model_copy(update={"sweep": sweep})
            jobs.append(StageJob(None if roots is None else stage.name, stage.needs, spec, stage.root))
    problems.extend(parallel_conflicts(jobs, roots or ()))
    problems = list(dict.fromkeys(problems + source.problems))
    if problems or not jobs:
        raise InvalidInputError(in_order(problems))
    return tuple(jobs)


def count_jobs(text: str | bytes, file: str, overrides: Sequence[str] = ()) -> int:
    """Return the number of jobs of a sweep; 1: the file is none, or has problems that `parse_stages` reports."""
    source = read_yaml(text, file)
    if source.is_complete:
        apply_overrides(source, overrides)
    return max(1, len(points_of(source.root, source))) if isinstance(source.root, MappingNode) else 1


def _read_spec(draft: Draft, problems: list[Problem]) -> JobSpec | None:
    """Return the job of a tree; None when it has problems."""
    problems.extend(broken_rules(draft))
    data = {**draft.data, "args": typed_args(draft)} if isinstance(draft.data.get("args"), dict) else draft.data
    data = dict(with_role_defaults(data))
    node = draft.root.entries.get("engine")
    if isinstance(node, MappingNode):
        data = {**data, "engine": read_engine(node, draft.source, problems)}
    return read_model(JobSpec, data, draft.root, draft.source, problems, is_reported=_reported_by_a_rule(draft))


def _placement_part(draft: Draft) -> JobSpec | None:
    """Return a job with the keys that decide its placement; None when one of them has a problem."""
    name = draft.data.get("name")
    decisive = ("nodes", "devices", "launcher", "hostfile", "engine", "roles")
    keys = {key: value for key, value in with_role_defaults(draft.data).items() if key in decisive}
    try:
        return JobSpec.model_validate({**keys, "name": name if isinstance(name, str) else "job", "command": ("true",)})
    except ValidationError:
        return None


def resolve_paths(spec: JobSpec, folder: str, programs: Mapping[str, ProgramOptions]) -> JobSpec:
    """Return the job with absolute hostfile, workdir.path, env_file and path options of the program.

    `folder`: the absolute directory of the job file. `checkpoint.dir` and `python` are paths on the nodes and stay.
    """
    changes: dict[str, Any] = {"env_file": tuple(_absolute(file, folder) for file in spec.env_file)}
    if spec.hostfile is not None:
        changes["hostfile"] = _absolute(spec.hostfile, folder)
    if isinstance(spec.engine, dict):
        changes["engine"] = in_folder(spec.engine, folder)
    if spec.workdir is not None:
        changes["workdir"] = spec.workdir.model_copy(update={"path": _absolute(spec.workdir.path, folder)})
    known = programs.get(spec.program) if spec.program else None
    if known is not None:
        changes["args"] = {
            name: _absolute(str(value), folder) if (option := known.find(name)) and option.is_path(value) else value
            for name, value in spec.args.items()
        }
    return spec.model_copy(update=changes)


def on_engine(spec: JobSpec, settings: Settings, *, name: str | None, hostfile: object, file: str) -> JobSpec:
    """Return the job with its engine in full, and with what the site adds: values of the job win. `name`: an engine
    that replaces the job's own engine and hostfile; `hostfile`: one that replaces the job's, None: neither was given.

    Without any of them it is the settings' default; a job without an engine is unchanged. Raises NotFoundError,
    InvalidInputError.
    """
    given = name or spec.engine
    if given is not None and (hostfile is not None or (name is None and spec.hostfile is not None)):
        text = Text("engine.and-hostfile", "engine cannot be combined with a hostfile")
        raise InvalidInputError(
            [Problem(file, None, None, text, Text("engine.and-hostfile.hint", "remove one of them"))]
        )
    chosen = given or (settings.default_engine if hostfile is None and spec.hostfile is None else None)
    if chosen is None:
        return spec
    engine = find_engine(settings, chosen) if isinstance(chosen, str) else chosen
    chosen_by = "command" if name else "job" if spec.engine is not None else "settings"
    if queue_of({"engine": engine}) is not None:
        _refuse_of_hosts(spec, engine, file)
    site: dict[str, Any] = {
        key: engine[key] for key in ("setup", "python") if key in engine and getattr(spec, key) is None
    }
    env = {key: value for key, value in engine.get("env", {}).items() if key not in spec.env}
    applied = [*site, *(f"env.{key}" for key in env)]
    container, added = _with_site(spec.container, engine)
    if engine_types()[engine["type"]].runs_images:
        engine, container = {**engine, "container": container and given_values(container)}, None
    roles = [
        role.model_copy(update={"container": role.container and _with_site(role.container, engine)[0]})
        for role in spec.roles
    ]
    changes: dict[str, Any] = {
        **site,
        "roles": tuple(roles),
        "container": container,
        "hostfile": engine.get("hostfile"),
        "env": {**env, **spec.env},
    }
    return spec.model_copy(update={**changes, "engine": {**engine, "applied": applied + added, "chosen_by": chosen_by}})


def _with_site(container: Container | None, engine: Mapping[str, Any]) -> tuple[Container | None, list[str]]:
    """Return the container with what the site adds, and the keys of that; None: neither names an image."""
    given = {} if container is None else given_values(container)
    site = {key: engine[key] for key in ("image", "runtime") if key in engine and key not in given}
    if "image" not in {**site, **given}:
        return None, []
    own = tuple(given.get("mounts", ()))
    targets = {_target(mount) for mount in own}
    mounts = tuple(mount for mount in engine.get("mounts", ()) if _target(mount) not in targets)
    keys = [f"container.{key}" for key in (*site, *(["mounts"] if mounts else []))]
    return Container.model_validate({**given, **site, "mounts": mounts + own}), keys


def given_values(model: BaseModel) -> dict[str, Any]:
    """Return the values that were given, without defaults."""
    return model.model_dump(include=model.model_fields_set)


def _target(mount: str) -> str:
    """Return the TARGET of SOURCE:TARGET[:ro]."""
    return mount[mount.index(":/") :].removesuffix(":ro").removesuffix(":rw")


def _refuse_of_hosts(spec: JobSpec, options: Mapping[str, Any], file: str) -> None:
    """Raise InvalidInputError for keys that an engine cannot honour whose hosts are known when it grants them."""
    engine, runs_images = options["type"], engine_types()[options["type"]].runs_images
    own = frozenset() if spec.container is None else spec.container.model_fields_set
    refused = {
        "min_nodes": spec.min_nodes is not None,
        "preemptible_after_s": spec.preemptible_after_s is not None,
        "roles[].groups": any(role.groups for role in spec.roles),
        "roles[].container": runs_images and any(role.container for role in spec.roles),
        **{f"container.{key}": runs_images and key in own for key in ("options", "runtime")},
    }
    hints = {key: REMOVE for key, is_given in refused.items() if is_given}
    for devices in (spec.devices, *(role.devices for role in spec.roles if role.devices)):
        if devices.ids:
            hints["devices.ids"] = Text("engine.ids.hint", "write devices.per_node: {count}", count=len(devices.ids))
    faults = [
        (Text("engine.key", "{key} is not supported by engine type {type}", key=key, type=engine), hint)
        for key, hint in hints.items()
    ]
    if spec.nodes is None:
        text = Text("engine.nodes", "engine type {type} requires nodes", type=engine)
        faults.append((text, Text("engine.nodes.hint", "write nodes: 2")))
    if runs_images and spec.container is None and "image" not in options:
        text = Text("engine.image", "engine type {type} requires an image", type=engine)
        faults.append((text, Text("engine.image.hint", "set image of the engine, or container.image of the job")))
    if faults:
        raise InvalidInputError([Problem(file, None, None, *fault) for fault in faults])


def require_hostfile(spec: JobSpec, file: str) -> str:
    """Return the hostfile. Raises InvalidInputError when it has none: a job never runs locally by default."""
    if spec.hostfile is None:
        text = Text("jobfile.required", "{key} is required", key="hostfile")
        hint = Text("jobfile.hostfile-hint", "write hostfile: cluster.hosts, or give -H FILE")
        raise InvalidInputError([Problem(file, 1, 1, text, hint)])
    return spec.hostfile


def _absolute(path: str, folder: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _reported_by_a_rule(draft: Draft) -> IsReported:
    def is_reported(path: Path, error: Mapping[str, Any]) -> bool:
        node = find(draft.root, path)
        plain = [step for step in path if isinstance(step, str)]
        return (
            (error["type"] == "extra_forbidden" and (".".join(plain) in UNSUPPORTED or plain[0] in UNSUPPORTED))
            or (path[-1] == "command" and isinstance(error.get("input"), str))
            or (path == ("devices", "type") and error.get("input") == "auto")
            or (path == ("nodes",) and isinstance(node, MappingNode) and bool({"min", "max"} & set(node.entries)))
            or (path[0] == "args" and len(path) > 1)
        )

    return is_reported
