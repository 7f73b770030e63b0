"""Tree of a job file: `--set` overrides applied to it, and the tree as input data of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.core.errors import Problem
from ascendrun.core.reader.yaml_source import (
    ListNode,
    MappingNode,
    Node,
    Place,
    ScalarNode,
    Source,
    read_value,
    scalar_value,
    to_plain,
)
from ascendrun.text import Text, write
from ascendrun.text.format import is_hidden

if TYPE_CHECKING:
    from ascendrun.options import ProgramOptions

DATA_SECTIONS = ("args", "env")
"""Sections with free keys, in which a null is a value."""


def apply_overrides(
    source: Source, overrides: Sequence[str], programs: Mapping[str, ProgramOptions] | None = None
) -> None:
    """Apply `args.lr=1e-4` texts to the tree, the last overrides earlier texts; problems go to the source.

    `programs`: for the aliases of options, as `lr` replaces `learning_rate` of the file.
    """
    for text in overrides:
        place = Place(_label(text))
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            source.problems.append(place.problem(Text("override.form", "expected KEY=VALUE"), write("--set nodes=2")))
            continue
        read = read_value(value, place)
        source.problems.extend(read.problems)
        source.invalid.update(read.invalid)
        if read.root is not None and read.is_complete:
            problem = _put(source, path, read.root, place)
            source.problems.extend([problem] if problem else [])
            if problem is None and len(path) > 1 and path[-2] == "args":
                _remove_other_names(source.root, path, programs or {})


def job_data(root: MappingNode, source: Source) -> dict[str, Any]:
    """Return the input of the model. A null means "not given"; values of `env` and `command` are the file's text."""
    data: dict[str, Any] = {}
    for key, node in root.entries.items():
        if key == "env" and isinstance(node, MappingNode):
            data[key] = {name: _text(value, f"env.{name}", source) for name, value in node.entries.items()}
        elif key == "command" and isinstance(node, ListNode):
            data[key] = tuple(_text(item, f"command[{index}]", source) for index, item in enumerate(node.items))
        elif key == "stages" and isinstance(node, ListNode):
            data[key] = tuple(
                job_data(item, source) if isinstance(item, MappingNode) else to_plain(item) for item in node.items
            )
        elif not _is_null(node):
            data[key] = to_plain(node) if key in DATA_SECTIONS else _without_nulls(to_plain(node))
    return data


def _put(source: Source, path: Sequence[str], value: Node, place: Place) -> Problem | None:
    if source.root is None:
        source.root = MappingNode(place)
    node: Node = source.root
    for depth, step in enumerate(path):
        if path[0] == "stages" and isinstance(node, ListNode):
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
        if not isinstance(node, MappingNode):
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
            below = node.entries[step] = MappingNode(place)
            node.keys[step] = place
        node = below
    return None


def _remove_other_names(root: Node | None, path: Sequence[str], programs: Mapping[str, ProgramOptions]) -> None:
    """Remove other names of the option that `path` sets: they are overridden."""
    sections = [root] if isinstance(root, MappingNode) else []
    stages = sections[0].entries.get("stages") if sections else None
    if len(path) == 4 and path[0] == "stages" and isinstance(stages, ListNode):
        stage = _stage(stages, path[1])
        sections = [*sections, stage] if isinstance(stage, MappingNode) else sections
    names = [node.text for each in sections if isinstance(node := each.entries.get("program"), ScalarNode)]
    table = programs.get(names[-1]) if names else None
    args = sections[-1].entries.get("args") if sections else None
    if table is None or not isinstance(args, MappingNode):
        return
    aliases, key = table.names_by_alias, path[-1]
    for name in list(args.entries):
        if name != key and aliases.get(name, name) == aliases.get(key, key):
            del args.entries[name], args.keys[name]


def _stage(stages: ListNode, name: str) -> Node | None:
    for item in stages.items:
        own = item.entries.get("name") if isinstance(item, MappingNode) else None
        if isinstance(own, ScalarNode) and own.text == name:
            return item
    return None


def _text(node: Node, name: str, source: Source) -> Any:
    """Return the text of a value as written; true and false in lower case."""
    if not isinstance(node, ScalarNode):
        return to_plain(node)
    if source.is_invalid(node):
        return node.text
    value = scalar_value(node)
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


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and scalar_value(node) is None


def _kind(node: Node) -> Text:
    return Text("type.list", "a list") if isinstance(node, ListNode) else Text("type.scalar", "a single value")


def _label(text: str) -> str:
    safe = "".join("?" if is_hidden(character) else character for character in text[:60])
    return f"--set {safe}" + ("…" if len(text) > 60 else "")
