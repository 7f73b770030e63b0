"""The job file's tree: `--set` laid over it, and the tree as the data that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile.yaml_source import (
    ListNode,
    MappingNode,
    Node,
    Place,
    ScalarNode,
    Source,
    find,
    read_value,
    scalar_value,
    to_plain,
)
from ascendrun.core.message_format import is_hidden

DATA_SECTIONS = ("args", "env")
"""Their keys are the user's own, so a null in them is no "not given"."""


def apply_overrides(source: Source, overrides: Sequence[str]) -> None:
    """Lays `args.lr=1e-4` texts over the tree, the last one winning; what is wrong with them goes to the source."""
    for text in overrides:
        place = Place(_label(text))
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            source.problems.append(place.problem("is no KEY=VALUE", "--set args.lr=1e-4"))
            continue
        read = read_value(value, place)
        source.problems.extend(read.problems)
        source.spoilt.update(read.spoilt)
        if read.root is not None and read.is_whole:
            problem = _put(source, path, read.root, place)
            source.problems.extend([problem] if problem else [])


def job_data(root: MappingNode, source: Source) -> dict[str, Any]:
    """What the model reads. A null means "not given"; in `env` and `command` a value is the very text of the file."""
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
                message = f"the file has no stage {step}" if stage is None else f"replaces the whole stage {step}"
                return place.problem(message, "--set stages.NAME.args.lr=1e-4")
            node = stage
            continue
        if not isinstance(node, MappingNode):
            above = ".".join(path[:depth])
            return place.problem(
                f"{above or 'the file'} is {_kind(node)}, so it has no {step}",
                f"set {above} as a whole" if above else None,
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


def _stage(stages: ListNode, name: str) -> Node | None:
    for item in stages.items:
        own = item.entries.get("name") if isinstance(item, MappingNode) else None
        if isinstance(own, ScalarNode) and own.text == name:
            return item
    return None


def _text(node: Node, name: str, source: Source) -> Any:
    """The value's text as written; true and false in small letters."""
    if not isinstance(node, ScalarNode):
        return to_plain(node)
    if source.is_spoilt(node):
        return node.text
    value = scalar_value(node)
    if value is None:
        source.spoil(node, node.place.problem(f"{name} has no value", 'write "" for an empty text'))
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


def _kind(node: Node) -> str:
    return "a list" if isinstance(node, ListNode) else "a single value"


def _label(text: str) -> str:
    safe = "".join("?" if is_hidden(character) else character for character in text[:60])
    return f"--set {safe}" + ("…" if len(text) > 60 else "")


def place_of(root: Node, path: Sequence[Any]) -> Place:
    """Where the value at `path` stands; for a value that is missing, the nearest piece around it."""
    steps: list[Any] = list(path)
    while steps:
        node = find(root, tuple(steps))
        if node is not None:
            return node.place
        steps.pop()
    return root.place


def key_place(root: Node, path: Sequence[Any]) -> Place:
    """Where the key of `path` stands; where the value stands when it is an item of a list."""
    parent = find(root, tuple(path[:-1]))
    if isinstance(parent, MappingNode) and path and path[-1] in parent.keys:
        return parent.keys[path[-1]]
    return place_of(root, path)
