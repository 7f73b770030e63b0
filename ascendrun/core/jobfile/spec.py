"""From the text of a job file to a JobSpec, or to every problem of the file at once."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Union

from pydantic import BaseModel, ValidationError

from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.jobfile import model
from ascendrun.core.jobfile.model import JobSpec, job_json_schema
from ascendrun.core.jobfile.pipeline import StageJob, StageRoot, side_by_side, split_stages
from ascendrun.core.jobfile.rules import Draft, broken_rules, typed_args
from ascendrun.core.jobfile.tree import apply_overrides, job_data, key_place, place_of
from ascendrun.core.jobfile.yaml_source import ListNode, MappingNode, Node, Place, Source, find, read_yaml
from ascendrun.core.message_format import closest, in_order, shown, suggestion
from ascendrun.options import InvalidTableError, ProgramOptions, read_table

__all__ = [
    "JobSpec",
    "ProgramOptions",
    "job_json_schema",
    "parse_job",
    "parse_program_options",
    "parse_stages",
    "require_hostfile",
    "resolve_paths",
]

_SECTIONS: Mapping[str, type[BaseModel]] = {
    "nodes": model.NodeRange,
    "devices": model.Devices,
    "env_from": model.EnvFile,
    "stage": model.Stage,
    "container": model.Container,
    "checkpoint": model.Checkpoint,
    "restart": model.Restart,
    "timeouts": model.Timeouts,
    "checks": model.Checks,
}

Path = tuple[Union[str, int], ...]


def parse_program_options(name: str, json_text: str) -> ProgramOptions:
    """The table of one program (`options.json`). Raises InvalidInputError with all faults of the table."""
    try:
        return read_table(name, json_text)
    except InvalidTableError as error:
        file = f"{name}/options.json"
        raise InvalidInputError(
            [Problem(file, error.line, error.column, str(fault)) for fault in error.faults]
        ) from error


def parse_job(
    text: Union[str, bytes],
    file: str,
    *,
    overrides: Sequence[str] = (),
    programs: Mapping[str, ProgramOptions],
    check_names: Optional[Callable[[], Sequence[str]]] = None,
) -> JobSpec:
    """The job that the file and the overrides ("args.lr=1e-4") describe; paths stay as written (see `resolve_paths`).
    Of a pipeline its first stage.

    Raises InvalidInputError with every problem; one of an override has "--set …" as its file and no line. A file that
    is no YAML from some line on is told up to there. `check_names` tells the names of all checks, None: let any pass.
    """
    stages = parse_stages(text, file, overrides=overrides, programs=programs, check_names=check_names)
    return stages[0].spec


def parse_stages(
    text: Union[str, bytes],
    file: str,
    *,
    overrides: Sequence[str] = (),
    programs: Mapping[str, ProgramOptions],
    check_names: Optional[Callable[[], Sequence[str]]] = None,
) -> tuple[StageJob, ...]:
    """As `parse_job`, for a file that may be a pipeline: one job for each of its stages, in order, each with the
    common part of the file and its own; a single job for any other file."""
    source = read_yaml(text, file)
    if not source.is_whole:
        raise InvalidInputError(in_order(source.problems))
    apply_overrides(source, overrides)
    root = source.root
    if root is None:
        source.problems.append(Problem(file, 1, 1, "is empty", "`ascendrun init NAME` writes a job to start from"))
    elif not isinstance(root, MappingNode):
        source.problems.append(root.place.problem("is no mapping", "write key: value lines, such as name: my-job"))
    if not isinstance(root, MappingNode):
        raise InvalidInputError(in_order(source.problems))
    roots = split_stages(root, source)
    problems: list[Problem] = []
    jobs: list[StageJob] = []
    for stage in [StageRoot("", None, root)] if roots is None else roots:
        draft = Draft(stage.root, job_data(stage.root, source), source, programs, check_names)
        spec = _judge(draft, problems)
        if spec is not None:
            jobs.append(StageJob(None if roots is None else stage.name, stage.needs, spec))
    problems.extend(side_by_side(jobs, roots or ()))
    problems = list(dict.fromkeys(problems + source.problems))
    if problems or not jobs:
        raise InvalidInputError(in_order(problems))
    return tuple(jobs)


def _judge(draft: Draft, problems: list[Problem]) -> Optional[JobSpec]:
    """The job of a tree; None with the problems told."""
    problems.extend(broken_rules(draft))
    data = {**draft.data, "args": typed_args(draft)} if isinstance(draft.data.get("args"), dict) else draft.data
    return _validate(data, draft, problems)


def resolve_paths(spec: JobSpec, folder: str, programs: Mapping[str, ProgramOptions]) -> JobSpec:
    """The same job with hostfile, stage.dir, env_from and the program's path options made absolute.

    `folder`: where the job file lies, absolute. `checkpoint.dir` and `python` belong to the nodes and stay.
    """
    changes: dict[str, Any] = {
        "env_from": tuple(one.model_copy(update={"file": _absolute(one.file, folder)}) for one in spec.env_from)
    }
    if spec.hostfile is not None:
        changes["hostfile"] = _absolute(spec.hostfile, folder)
    if spec.stage is not None:
        changes["stage"] = spec.stage.model_copy(update={"dir": _absolute(spec.stage.dir, folder)})
    known = programs.get(spec.program or "")
    if known is not None:
        changes["args"] = {
            name: _absolute(value, folder) if value and isinstance(value, str) and _is_path(known, name) else value
            for name, value in spec.args.items()
        }
    return spec.model_copy(update=changes)


def require_hostfile(spec: JobSpec, file: str) -> str:
    """The job's hostfile. Raises InvalidInputError when it names none: never a silent local run."""
    if spec.hostfile is None:
        raise InvalidInputError(
            [
                Problem(
                    file,
                    1,
                    1,
                    "names no hostfile",
                    "hostfile: my.hosts; a line `here addr=local` in it is this machine",
                )
            ]
        )
    return spec.hostfile


def _is_path(known: ProgramOptions, name: str) -> bool:
    option = known.find(name)
    return option is not None and option.type == "path"


def _absolute(path: str, folder: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _validate(data: Mapping[str, Any], draft: Draft, problems: list[Problem]) -> Optional[JobSpec]:
    """The model's judgement; None with the problems told."""
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            problem = _translate(each, draft.root, draft.source)
            problems.extend([problem] if problem else [])
        if not problems and not draft.source.problems:
            raise
        return None


def _translate(error: Mapping[str, Any], root: MappingNode, source: Source) -> Optional[Problem]:
    """One finding of pydantic in our words at its place; None when it was told already."""
    path = _path(error["loc"])
    kind, context = error["type"], error.get("ctx") or {}
    node = find(root, path)
    if source.is_spoilt(node) or _told_by_a_rule(path, error, node):
        return None
    name = _name(path)
    if kind == "missing":
        return _around(root, path).problem(f"{name} is missing", _HINTS.get(name))
    if kind == "extra_forbidden":
        return key_place(root, path).problem(f"unknown key {shown(str(path[-1]))}", _key_hint(path))
    message, hint = _explain(kind, context, error.get("input"))
    return place_of(root, path).problem(f"{name} {message}", hint or _HINTS.get(name))


def _path(loc: Sequence[Union[str, int]]) -> Path:
    """pydantic's location without the names of a union's branches."""
    return tuple(
        step
        for index, step in enumerate(loc)
        if not (index > 0 and loc[index - 1] == "nodes" and step in ("count", "range"))
    )


def _told_by_a_rule(path: Path, error: Mapping[str, Any], node: Optional[Node]) -> bool:
    if error["type"] == "missing" and node is not None:
        return True
    if error["type"] == "too_short" and isinstance(node, ListNode) and node.items:
        return True  # its items are wrong, and pydantic counts the right ones only
    if path[0] == "command" and len(path) == 1 and isinstance(error.get("input"), str):
        return True
    return path[0] == "args" and len(path) > 1


def _around(root: MappingNode, path: Path) -> Place:
    """A missing key is told where its section's key stands; at the top, where the file starts."""
    return key_place(root, path[:-1]) if len(path) > 1 else root.place


def _name(path: Path) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text if text.isprintable() and len(text) <= 80 else shown(text)


def _key_hint(path: Path) -> Optional[str]:
    key = str(path[-1])
    inside = [step for step in path[:-1] if isinstance(step, str)]
    if inside[:1] == ["stages"]:
        inside = inside[1:] or ["stages"]
    sections: Mapping[str, type[BaseModel]] = {**_SECTIONS, "stages": model.PipelineStage}
    chosen = sections.get(inside[0]) if inside else JobSpec
    own = list(chosen.model_fields) if chosen else []
    elsewhere = [
        (section, closest(key, other.model_fields)) for section, other in _SECTIONS.items() if [section] != inside
    ]
    for section, near in elsewhere:
        if near is not None and (near == key or closest(key, own) is None):
            return f"did you mean {section}.{near}?"
    return suggestion(key, own)


def _explain(kind: str, context: Mapping[str, Any], value: Any) -> tuple[str, Optional[str]]:
    if kind == "literal_error":
        choices = str(context.get("expected", "")).replace(" or ", ", ").replace("'", "")
        word = str(value).upper().replace("SIG", "") if choices.isupper() else str(value).lower()
        near = _SLIPS.get(word) or closest(word, choices.split(", "))
        return f"wants one of {choices}, not {_told(value)}", f"did you mean {near}?" if near else None
    if kind in _WANTS:
        hint = f'put it in quotes: "{value}"' if kind == "string_type" and type(value) in (int, float) else None
        return f"wants {_WANTS[kind]}, not {_told(value)}", hint
    for limit, words in _LIMITS.items():
        if limit in context:
            return f"wants {words} {context[limit]:g}, not {_told(value)}", None
    if kind == "string_pattern_mismatch":
        return f"{_told(value)} is no name", "letters, digits, '.', '_', '-'; a letter or digit first; at most 63"
    return _OTHERS.get(kind, "is not right: " + kind.replace("_", " ")), None


def _told(value: Any) -> str:
    if isinstance(value, (dict, BaseModel)):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return shown(value) if isinstance(value, str) else str(value)


_WANTS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
}
_SLIPS = {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu", "910b": "npu", "none": "cpu"}
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_OTHERS = {"too_short": "must not be empty", "string_too_short": "must not be empty", "too_long": "has too many items"}
_HINTS = {
    "name": "name: my-job",
    "command": "command: [python, train.py]",
    "args": "args: {lr: 1e-4}",
    "env": "env: {NAME: value}",
    "env_from": "env_from: [{file: secrets.env}]",
    "stage": "stage: {dir: .}",
    "devices": "devices: {family: npu, per_node: 8}",
    "nodes": "nodes: 2",
    "timeouts": "timeouts: {max_s: 3600}",
    "checkpoint": "checkpoint: {dir: /data/ckpt, grace_s: 300}",
    "stage.exclude": "exclude: [data/, .git/]",
    "devices.ids": "ids: [0, 1, 2, 3]",
}
