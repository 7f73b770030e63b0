"""Tree of a job file: `--set` overrides applied to it, the tree as input data of the model, and both for the rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import Problem
from ascendrun.core.reader import yaml_source
from ascendrun.options import LIST, ProgramOptions
from ascendrun.text import Text, write
from ascendrun.text.format import is_hidden

DATA_SECTIONS = ("args", "env", "labels")
"""Sections with free keys, in which a null is a value."""


@dataclass(frozen=True)
class LocalFiles:
    """Access of the job file to the disk of this machine; paths are relative to the job file."""

    is_directory: Callable[[str], bool]
    is_readable: Callable[[str], bool]


@dataclass(frozen=True)
class Draft:
    """A job file before validation as a JobSpec. `data`: unchecked input of the model; `args` go through `typed_args`.
    `check_names` returns the names of the checks; `files`: the disk. None: not checked.
    `is_later_stage`: it finds the files that an earlier stage left."""

    root: yaml_source.MappingNode
    data: dict[str, Any]
    source: yaml_source.Source
    programs: Mapping[str, ProgramOptions]
    check_names: Callable[[], Collection[str]] | None = None
    files: LocalFiles | None = None
    is_later_stage: bool = False

    def has(self, name: str) -> bool:
        return name in self.data

    def section(self, name: str) -> Mapping[str, Any]:
        value = self.data.get(name)
        return value if isinstance(value, dict) else {}

    def key(self, *path: Any) -> yaml_source.Place:
        return yaml_source.key_place(self.root, path)

    def value(self, *path: Any) -> yaml_source.Place:
        return yaml_source.place_of(self.root, path)

    def is_invalid(self, *path: Any) -> bool:
        return self.source.is_invalid(yaml_source.find(self.root, path))

    def at(self, path: Sequence[Any]) -> Any:
        """Return the value at `path`; None: not set."""
        value: Any = self.data
        for step in path:
            inside = isinstance(value, dict) and step in value or isinstance(value, tuple) and isinstance(step, int)
            value = value[step] if inside else None
        return value

    @property
    def table(self) -> ProgramOptions | None:
        """Options of the job's program; None: no such program."""
        name = self.data.get("program")
        return self.programs.get(name) if isinstance(name, str) else None


def home_problem(draft: Draft, *path: Any) -> Problem:
    return draft.value(*path).problem(
        Text("jobfile.home", "{key}: ~ is not supported", key=".".join(map(str, path))),
        Text("jobfile.home-hint", "write the absolute path"),
    )


def apply_overrides(
    source: yaml_source.Source, overrides: Sequence[str], programs: Mapping[str, ProgramOptions] | None = None
) -> None:
    """Apply `args.lr=1e-4` texts to the tree, the last overrides earlier texts; problems go to the source.

    `programs`: for the aliases of options, as `lr` replaces `learning_rate` of the file.
    """
    for text in overrides:
        place = yaml_source.Place(_label(text))
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            source.problems.append(place.problem(Text("override.form", "expected KEY=VALUE"), write("--set nodes=2")))
            continue
        read = yaml_source.read_value(value, place)
        source.problems.extend(read.problems)
        source.invalid.update(read.invalid)
        if read.root is not None and read.is_complete:
            set_value(source, path, read.root, place, programs or {})


def set_value(
    source: yaml_source.Source,
    path: Sequence[str],
    value: yaml_source.Node,
    place: yaml_source.Place,
    programs: Mapping[str, ProgramOptions],
) -> None:
    """Set one key of the tree; a problem goes to the source."""
    problem = _put(source, path, value, place)
    source.problems.extend([problem] if problem else [])
    if problem is None and len(path) > 1 and path[-2] == "args":
        _remove_other_names(source.root, path, programs)


def job_data(root: yaml_source.MappingNode, source: yaml_source.Source) -> dict[str, Any]:
    """Return the input of the model. A null means "not given"; values of `env`, `labels` and `command` are the text of
    the file."""
    data: dict[str, Any] = {}
    for key, node in root.entries.items():
        if key in ("env", "labels") and isinstance(node, yaml_source.MappingNode):
            data[key] = {name: _text(value, f"{key}.{name}", source) for name, value in node.entries.items()}
        elif key == "command" and isinstance(node, yaml_source.ListNode):
            data[key] = tuple(_text(item, f"command[{index}]", source) for index, item in enumerate(node.items))
        elif key in ("stages", "roles") and isinstance(node, yaml_source.ListNode):
            data[key] = tuple(
                job_data(item, source) if isinstance(item, yaml_source.MappingNode) else yaml_source.to_plain(item)
                for item in node.items
            )
        elif not _is_null(node):
            data[key] = (
                yaml_source.to_plain(node) if key in DATA_SECTIONS else _without_nulls(yaml_source.to_plain(node))
            )
    return data


def _put(
    source: yaml_source.Source, path: Sequence[str], value: yaml_source.Node, place: yaml_source.Place
) -> Problem | None:
    if source.root is None:
        source.root = yaml_source.MappingNode(place)
    node: yaml_source.Node = source.root
    for depth, step in enumerate(path):
        if path[0] == "stages" and isinstance(node, yaml_source.ListNode):
            stage = _stage(node, step)
            if stage is None or depth == len(path) - 1:
                message = (
                    Text("override.stage", "unknown stage {stage}", stage=step)
                    if stage is None
                    else Text("override.whole-stage", "cannot replace a whole stage")
                )
                return place.problem(message, write("--set stages.NAME.nodes=2"))
            node = stage
            continue
        if not isinstance(node, yaml_source.MappingNode):
            above = ".".join(path[:depth])
            return place.problem(
                Text(
                    "override.no-mapping", "{key}: expected a mapping, got {kind}", key=above or "-", kind=_kind(node)
                ),
                write(f"--set {above}=VALUE") if above else None,
            )
        if depth == len(path) - 1:
            node.entries[step] = value
            node.keys[step] = place
            return None
        below = node.entries.get(step)
        if below is None or _is_null(below):
            below = node.entries[step] = yaml_source.MappingNode(place)
            node.keys[step] = place
        node = below
    return None


def _remove_other_names(
    root: yaml_source.Node | None, path: Sequence[str], programs: Mapping[str, ProgramOptions]
) -> None:
    """Remove other names of the option that `path` sets: they are overridden."""
    sections = [root] if isinstance(root, yaml_source.MappingNode) else []
    stages = sections[0].entries.get("stages") if sections else None
    if len(path) == 4 and path[0] == "stages" and isinstance(stages, yaml_source.ListNode):
        stage = _stage(stages, path[1])
        sections = [*sections, stage] if isinstance(stage, yaml_source.MappingNode) else sections
    names = [node.text for each in sections if isinstance(node := each.entries.get("program"), yaml_source.ScalarNode)]
    table = programs.get(names[-1]) if names else None
    args = sections[-1].entries.get("args") if sections else None
    if table is None or not isinstance(args, yaml_source.MappingNode):
        return
    aliases, key = table.names_by_alias, path[-1]
    for name in list(args.entries):
        if name != key and aliases.get(name, name) == aliases.get(key, key):
            del args.entries[name], args.keys[name]


def _stage(stages: yaml_source.ListNode, name: str) -> yaml_source.Node | None:
    for item in stages.items:
        own = item.entries.get("name") if isinstance(item, yaml_source.MappingNode) else None
        if isinstance(own, yaml_source.ScalarNode) and own.text == name:
            return item
    return None


def _text(node: yaml_source.Node, name: str, source: yaml_source.Source) -> Any:
    """Return the text of a value as written; true and false in lower case."""
    if not isinstance(node, yaml_source.ScalarNode):
        return yaml_source.to_plain(node)
    if source.is_invalid(node):
        return node.text
    value = yaml_source.scalar_value(node)
    if value is None:
        source.mark_invalid(
            node,
            node.place.problem(
                Text("jobfile.no-value", "{key}: value missing", key=name),
                Text("jobfile.empty-string", 'write "" for an empty string'),
            ),
        )
        return ""
    return node.text.lower() if isinstance(value, bool) else node.text


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(below) for key, below in value.items() if below is not None}
    if isinstance(value, tuple):
        return tuple(_without_nulls(item) for item in value)
    return value


def _is_null(node: yaml_source.Node) -> bool:
    return isinstance(node, yaml_source.ScalarNode) and yaml_source.scalar_value(node) is None


def _kind(node: yaml_source.Node) -> Text:
    return LIST if isinstance(node, yaml_source.ListNode) else Text("type.scalar", "a single value")


def _label(text: str) -> str:
    safe = "".join("?" if is_hidden(character) else character for character in text[:60])
    return f"--set {safe}" + ("…" if len(text) > 60 else "")
