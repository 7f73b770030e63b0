"""Conversion of the text of a job file to a JobSpec, or to a list of all its problems."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Callable, Optional, Union

from pydantic import BaseModel, ValidationError

from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.jobfile import model
from ascendrun.core.jobfile.model import JobSpec, job_json_schema
from ascendrun.core.jobfile.pipeline import NAME_HINT, StageJob, StageRoot, parallel_conflicts, split_stages
from ascendrun.core.jobfile.rules import Draft, LocalFiles, broken_rules, typed_args
from ascendrun.core.jobfile.source_text import INIT_HINT, in_order
from ascendrun.core.jobfile.tree import apply_overrides, job_data, key_place, place_of
from ascendrun.core.jobfile.yaml_source import KEY_VALUE, ListNode, MappingNode, Node, Place, find, read_yaml
from ascendrun.option_tables import InvalidTableError, read_table
from ascendrun.options import ProgramOptions
from ascendrun.text import Text, closest, did_you_mean, suggestion, write
from ascendrun.text.format import quote

__all__ = [
    "JobSpec",
    "LocalFiles",
    "ProgramOptions",
    "StageJob",
    "job_json_schema",
    "load_programs",
    "parse_program_options",
    "parse_stages",
    "require_hostfile",
    "resolve_paths",
]

Path = tuple[Union[str, int], ...]


def parse_program_options(name: str, json_text: str, file: str = "") -> ProgramOptions:
    """Return the option table of a program (`options.json`). Raises InvalidInputError with all its faults."""
    try:
        return read_table(name, json_text)
    except InvalidTableError as error:
        file = file or f"{name}/options.json"
        raise InvalidInputError([Problem(file, error.line, error.column, fault) for fault in error.faults]) from error


def load_programs() -> Mapping[str, ProgramOptions]:
    """Return the option tables of the bundled programs by name. Raises InvalidInputError."""
    from importlib import resources

    programs: dict[str, ProgramOptions] = {}
    for directory in sorted(resources.files("ascendrun").joinpath("programs").iterdir(), key=lambda each: each.name):
        table = directory.joinpath("options.json")
        if directory.is_dir() and table.is_file():
            programs[directory.name] = parse_program_options(directory.name, table.read_text(encoding="utf-8"))
    return programs


def parse_stages(
    text: Union[str, bytes],
    file: str,
    *,
    overrides: Sequence[str] = (),
    programs: Mapping[str, ProgramOptions],
    check_names: Optional[Callable[[], Collection[str]]] = None,
    files: Optional[LocalFiles] = None,
    placement: Optional[Callable[[JobSpec], Iterable[tuple[tuple[str, ...], Text, Text]]]] = None,
) -> tuple[StageJob, ...]:
    """Return the jobs that the file and the overrides ("nodes=2") describe: one for each stage of a pipeline, in order,
    with the keys of the file and its own; a single job for any other file. Paths stay relative (see `resolve_paths`).

    Raises InvalidInputError with every problem; one of an override has "--set …" as its file and no line. Invalid YAML
    ends the search for problems. `check_names` returns the names of the checks, `files` reads the disk. `placement`
    returns the requirements of a job that the hosts do not meet: (key, message, hint); it also gets the name, nodes,
    devices, launcher and hostfile of a job whose other keys have problems. None: not checked.
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
    roots = split_stages(root, source, programs)
    problems: list[Problem] = []
    jobs: list[StageJob] = []
    for stage in [StageRoot("", None, root)] if roots is None else roots:
        draft = Draft(stage.root, job_data(stage.root, source), source, programs, check_names, files)
        spec = _read_spec(draft, problems)
        placed = spec or _placement_part(draft)
        if placement is not None and placed is not None:
            for key, message, hint in placement(placed):
                problems.append(place_of(stage.root, key).problem(message, hint))
        if spec is not None:
            jobs.append(StageJob(None if roots is None else stage.name, stage.needs, spec, stage.root))
    problems.extend(parallel_conflicts(jobs, roots or ()))
    problems = list(dict.fromkeys(problems + source.problems))
    if problems or not jobs:
        raise InvalidInputError(in_order(problems))
    return tuple(jobs)


def _read_spec(draft: Draft, problems: list[Problem]) -> Optional[JobSpec]:
    """Return the job of a tree; None when it has problems."""
    problems.extend(broken_rules(draft))
    data = {**draft.data, "args": typed_args(draft)} if isinstance(draft.data.get("args"), dict) else draft.data
    return _validate(data, draft, problems)


def _placement_part(draft: Draft) -> Optional[JobSpec]:
    """Return a job with the keys that decide its placement; None when one of them has a problem."""
    name = draft.data.get("name")
    keys = {key: draft.data[key] for key in ("nodes", "devices", "launcher", "hostfile") if key in draft.data}
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
    if spec.workdir is not None:
        changes["workdir"] = spec.workdir.model_copy(update={"path": _absolute(spec.workdir.path, folder)})
    known = programs.get(spec.program or "")
    if known is not None:
        changes["args"] = {
            name: _absolute(str(value), folder) if _is_path(known, name, value) else value
            for name, value in spec.args.items()
        }
    return spec.model_copy(update=changes)


def require_hostfile(spec: JobSpec, file: str) -> str:
    """Return the hostfile. Raises InvalidInputError when it has none: a job never runs locally by default."""
    if spec.hostfile is None:
        text = Text("jobfile.required", "{key} is required", key="hostfile")
        hint = Text("jobfile.hostfile-hint", "write hostfile: cluster.hosts, or give -H FILE")
        raise InvalidInputError([Problem(file, 1, 1, text, hint)])
    return spec.hostfile


def _is_path(known: ProgramOptions, name: str, value: object) -> bool:
    option = known.find(name)
    return option is not None and option.is_path(value)


def _absolute(path: str, folder: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _validate(data: Mapping[str, Any], draft: Draft, problems: list[Problem]) -> Optional[JobSpec]:
    """Return the job of the data; None when it has problems."""
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            problem = _translate(each, draft)
            problems.extend([problem] if problem else [])
        if not problems and not draft.source.problems:
            raise
        return None


def _translate(error: Mapping[str, Any], draft: Draft) -> Optional[Problem]:
    """Return a pydantic error as a problem at its place; None when a rule has reported it."""
    root, path = draft.root, tuple(error["loc"])
    kind, context = error["type"], error.get("ctx") or {}
    node = find(root, path)
    if draft.source.is_invalid(node) or _reported_by_a_rule(path, error, node):
        return None
    name = _name(path)
    if kind == "missing":
        text = Text("jobfile.required", "{key} is required", key=name)
        return _around(root, path).problem(text, _example(path))
    if kind == "extra_forbidden":
        return _unknown_key(draft, path)
    message, hint = _explain(path, kind, context, error.get("input"))
    text = Text("jobfile.value", "{key}: {fault}", key=name, fault=message)
    return place_of(root, path).problem(text, hint or _example(path))


def _reported_by_a_rule(path: Path, error: Mapping[str, Any], node: Optional[Node]) -> bool:
    if error["type"] == "missing" and node is not None:
        return True
    if error["type"] == "too_short" and isinstance(node, ListNode) and node.items:
        return True  # its items are invalid, and pydantic counts only the valid items
    if path[0] == "command" and len(path) == 1 and isinstance(error.get("input"), str):
        return True
    if path == ("devices", "type") and error.get("input") == "auto":
        return True
    if path == ("nodes",) and isinstance(node, MappingNode) and {"min", "max"} & set(node.entries):
        return True
    return path[0] == "args" and len(path) > 1


def _around(root: MappingNode, path: Path) -> Place:
    """Return the place for a missing key: the key of its section; at the top, the start of the file."""
    return key_place(root, path[:-1]) if len(path) > 1 else root.place


def _name(path: Path) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text if text.isprintable() and len(text) <= 80 else quote(text)


def _unknown_key(draft: Draft, path: Path) -> Optional[Problem]:
    """Return a problem with a similar key; None: a rule has reported it."""
    plain = tuple(step for step in path if isinstance(step, str))
    if ".".join(plain) in model.UNSUPPORTED or plain[0] in model.UNSUPPORTED:
        return None
    text = Text("jobfile.unknown-key", "unknown key {key:quote}", key=str(path[-1]))
    return key_place(draft.root, path).problem(text, _key_hint(path))


def flow(value: Any) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_PLAIN = re.compile(r"[A-Za-z0-9_./$-][^,\[\]{}#:*&!|>'\"%@`\n]*")
"""Strings that need no quotes inside a list of YAML."""


def _key_hint(path: Path) -> Optional[Text]:
    key = str(path[-1])
    inside = [step for step in path[:-1] if isinstance(step, str)]
    if inside[:1] == ["stages"]:
        inside = inside[1:] or ["stages"]
    sections: Mapping[str, type[BaseModel]] = {**model.SECTIONS, "stages": model.PipelineStage}
    chosen = sections.get(inside[0]) if inside else JobSpec
    own = list(chosen.model_fields) if chosen else []
    elsewhere = {
        name: f"{section}.{name}"
        for section, other in list(model.SECTIONS.items())[::-1]  # the first section wins
        if [section] != inside
        for name in other.model_fields
    }
    near = closest(key, {*elsewhere, *own})
    return suggestion(key, own) if near is None or near in own else did_you_mean(elsewhere[near])


def _explain(path: Path, kind: str, context: Mapping[str, Any], value: Any) -> tuple[Text, Optional[Text]]:
    if kind == "literal_error":
        return _explain_choice(path, str(context.get("expected", "")), value)
    if kind in _EXPECTED:
        is_number = kind == "string_type" and type(value) in (int, float)
        hint = Text("jobfile.quote", 'write "{value}" for the string', value=value) if is_number else None
        return expected(_EXPECTED[kind], value), hint
    for limit, template in _LIMITS.items():
        if limit in context:
            return expected(Text(template.key, template.english, limit=f"{context[limit]:g}"), value), None
    if kind == "string_pattern_mismatch":
        return Text("jobfile.invalid-name", "invalid name {value}", value=_shown(value)), NAME_HINT
    if kind in ("too_short", "string_too_short"):
        return Text("jobfile.too-short", "must not be empty"), None
    return Text("jobfile.other", "invalid value ({reason})", reason=kind.replace("_", " ")), None


def _explain_choice(path: Path, choices: str, value: Any) -> tuple[Text, Optional[Text]]:
    names = choices.replace(" or ", ", ").replace("'", "").split(", ")
    word = str(value).upper().replace("SIG", "") if choices.isupper() else str(value).lower()
    near = _SLIPS.get(word) if path[-1] == "type" else None
    near = near or closest(word, names)
    text = Text("jobfile.choice", "expected {choices}, got {value}", choices=one_of(names), value=_shown(value))
    return text, did_you_mean(near) if near else None


def one_of(names: Sequence[str]) -> Text | str:
    """`a, b or c`."""
    if len(names) < 2:
        return "".join(names)
    return Text("jobfile.or", "{names} or {last}", names=list(names[:-1]), last=names[-1])


def expected(what: Text, value: Any) -> Text:
    return Text("options.expected", "expected {expected}, got {found}", expected=what, found=_shown(value))


def _shown(value: Any) -> Text | str:
    if isinstance(value, (dict, BaseModel)):
        return Text("type.mapping", "a mapping")
    if isinstance(value, tuple):
        return Text("type.list", "a list")
    if isinstance(value, bool):
        return str(value).lower()
    return quote(value) if isinstance(value, str) else str(value)


def _example(path: Path) -> Optional[Text]:
    """Return the example of a key as a hint; None for a key without an example."""
    kind: Optional[type[BaseModel]] = JobSpec
    plain = [step for step in path if isinstance(step, str)]
    if plain[:1] == ["stages"]:
        kind, plain = model.PipelineStage, plain[1:]
    for step in plain[:-1]:
        kind = model.SECTIONS.get(step) if kind is not None else None
    field = kind.model_fields.get(plain[-1]) if kind is not None and plain else None
    if field is None or not field.examples or (path and isinstance(path[-1], int)):
        return None
    return write(f"{plain[-1]}: {flow(field.examples[0])}")


_EXPECTED = {
    "int_type": Text("type.integer", "an integer"),
    "int_from_float": Text("type.integer", "an integer"),
    "float_type": Text("type.number", "a number"),
    "string_type": Text("type.string", "a string"),
    "bool_type": Text("type.boolean", "true or false"),
    "tuple_type": Text("type.list", "a list"),
    "dict_type": Text("type.mapping", "a mapping"),
    "mapping_type": Text("type.mapping", "a mapping"),
    "model_type": Text("type.mapping", "a mapping"),
    "finite_number": Text("type.finite", "a finite number"),
}
_SLIPS = {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu", "910b": "npu", "none": "cpu"}
_LIMITS = {
    "ge": Text("limit.ge", "at least {limit}", limit=None),
    "gt": Text("limit.gt", "more than {limit}", limit=None),
    "le": Text("limit.le", "at most {limit}", limit=None),
    "lt": Text("limit.lt", "less than {limit}", limit=None),
}
