"""Tree of a file to a pydantic model: each error of pydantic as a problem at its place, with a hint from the model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union

from pydantic import BaseModel, ValidationError

from ascendrun.core.errors import Problem
from ascendrun.core.reader.strict import NAME_HINT, model_below, sections_of
from ascendrun.core.reader.yaml_source import ListNode, MappingNode, Node, Source, find, key_place, place_of
from ascendrun.options import LIST, MAPPING, TYPE_NAMES
from ascendrun.text import Text, closest, did_you_mean, suggestion, write
from ascendrun.text.format import quote

Path = tuple[Union[str, int], ...]
IsReported = Callable[[Path, Mapping[str, Any]], bool]
M = TypeVar("M", bound=BaseModel)
HIDDEN = Text("value.hidden", "a hidden value")


FLOOD, SHOWN_OF_FLOOD = 20, 5
"""More unknown keys than the former are reported by the latter number of them."""


def read_model(
    model: type[M],
    data: Mapping[str, Any],
    root: MappingNode,
    source: Source,
    problems: list[Problem],
    *,
    is_reported: IsReported = lambda path, error: False,
) -> M | None:
    """Return the data of a tree as a model; None when it has problems, which are added to `problems`.

    `is_reported`: whether a rule reports this error of pydantic.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        unknown = [each for each in found if each["type"] == "extra_forbidden"]
        if len(unknown) > FLOOD:  # the wrong file, rather than misspelled keys
            rest = Text("jobfile.unknown-keys", "and {count} more unknown keys", count=len(unknown) - SHOWN_OF_FLOOD)
            problems.append(key_place(root, tuple(unknown[SHOWN_OF_FLOOD]["loc"])).problem(rest))
            known = [each for each in found if each["type"] != "extra_forbidden"]
            found = [*unknown[:SHOWN_OF_FLOOD], *known]
        for each in found:
            path = tuple(each["loc"])
            node = find(root, path)
            if not (source.is_invalid(node) or _is_repeated(each, node) or is_reported(path, each)):
                problems.append(_translate(each, path, root, model))
        if not problems and not source.problems:
            raise
        return None


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


def _is_repeated(error: Mapping[str, Any], node: Node | None) -> bool:
    """Return whether the value itself has a problem already: pydantic counts only the valid items of a list."""
    if error["type"] == "missing":
        return node is not None
    if error["type"] != "too_short" or not isinstance(node, ListNode):
        return False
    return len(node.items) > int(error["ctx"]["actual_length"])


def _translate(error: Mapping[str, Any], path: Path, root: MappingNode, model: type[BaseModel]) -> Problem:
    name = _name(path)
    if error["type"] == "missing":
        text = Text("jobfile.required", "{key} is required", key=name)
        # the key of its section; at the top, the start of the file
        place = key_place(root, path[:-1]) if len(path) > 1 else root.place
        return place.problem(text, _example(model, path))
    if error["type"] == "extra_forbidden":
        text = Text("jobfile.unknown-key", "unknown key {key:quote}", key=str(path[-1]))
        return key_place(root, path).problem(text, _key_hint(model, path))
    field = _field(model, path)
    value = HIDDEN if field is not None and not field.repr else error.get("input")
    message, hint = _explain(error["type"], error.get("ctx") or {}, value)
    text = Text("jobfile.value", "{key}: {fault}", key=name, fault=message)
    return place_of(root, path).problem(text, hint or _example(model, path))


def _name(path: Path) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text if text.isprintable() and len(text) <= 80 else quote(text)


def _owner(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Return the model that has the last key of `path` as a field; None: no model has it."""
    owner: type[BaseModel] | None = model
    for step in [step for step in path if isinstance(step, str)][:-1]:
        field = owner.model_fields.get(step) if owner is not None else None
        owner = model_below(field) if field is not None else None
    return owner


def _field(model: type[BaseModel], path: Path) -> Any:
    owner = _owner(model, path)
    names = [step for step in path if isinstance(step, str)]
    return owner.model_fields.get(names[-1]) if owner is not None and names else None


def _key_hint(model: type[BaseModel], path: Path) -> Text | None:
    """Return a similar key of the same section, else of another one."""
    key, owner = str(path[-1]), _owner(model, path)
    own = list(owner.model_fields) if owner is not None else []
    elsewhere = {
        name: f"{section}.{name}"
        for section, other in list(sections_of(model).items())[::-1]  # the first section wins
        if other is not owner
        for name in other.model_fields
    }
    near = closest(key, {*elsewhere, *own})
    return suggestion(key, own) if near is None or near in own else did_you_mean(elsewhere[near])


def _example(model: type[BaseModel], path: Path) -> Text | None:
    """Return the example of a key as a hint; None for an item of a list, and for a key without an example."""
    field = _field(model, path)
    if field is None or not field.examples or (path and isinstance(path[-1], int)):
        return None
    return write(f"{[step for step in path if isinstance(step, str)][-1]}: {flow(field.examples[0])}")


def _explain(kind: str, context: Mapping[str, Any], value: Any) -> tuple[Text, Text | None]:
    if kind == "literal_error":
        return _explain_choice(str(context.get("expected", "")), value)
    if kind in _EXPECTED:
        is_number = kind == "string_type" and type(value) in (int, float)
        hint = Text("jobfile.quote", 'write "{value}" for the string', value=value) if is_number else None
        return expected(_EXPECTED[kind], value), hint
    for limit, template in _LIMITS.items():
        if limit in context:
            return expected(Text(template.key, template.english, limit=f"{context[limit]:g}"), value), None
    if kind == "string_pattern_mismatch":
        return Text("jobfile.invalid-name", "invalid name {value}", value=_shown(value)), NAME_HINT
    if kind == "too_short" and context["min_length"] > 1:
        return Text("jobfile.too-few", "expected {count} or more", count=context["min_length"]), None
    if kind in ("too_short", "string_too_short"):
        return Text("jobfile.too-short", "must not be empty"), None
    return Text("jobfile.other", "invalid value ({reason})", reason=kind.replace("_", " ")), None


def _explain_choice(choices: str, value: Any) -> tuple[Text, Text | None]:
    names = choices.replace(" or ", ", ").replace("'", "").split(", ")
    word = str(value).upper().replace("SIG", "") if choices.isupper() else str(value).lower()
    near = _SLIPS.get(word)
    near = near if near in names else closest(word, names)
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
    if isinstance(value, Text):
        return value
    if isinstance(value, (dict, BaseModel)):
        return MAPPING
    if isinstance(value, tuple):
        return LIST
    if isinstance(value, bool):
        return str(value).lower()
    return quote(value) if isinstance(value, str) else str(value)


_EXPECTED = {
    "int_type": TYPE_NAMES["int"],
    "int_from_float": TYPE_NAMES["int"],
    "float_type": TYPE_NAMES["float"],
    "float_parsing": TYPE_NAMES["float"],
    "string_type": TYPE_NAMES["str"],
    "bool_type": TYPE_NAMES["bool"],
    "tuple_type": LIST,
    "dict_type": MAPPING,
    "mapping_type": MAPPING,
    "model_type": MAPPING,
    "finite_number": Text("type.finite", "a finite number"),
}
_SLIPS = {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu", "910b": "npu", "none": "cpu"}
_LIMITS = {
    "ge": Text("limit.ge", "at least {limit}", limit=None),
    "gt": Text("limit.gt", "more than {limit}", limit=None),
    "le": Text("limit.le", "at most {limit}", limit=None),
    "lt": Text("limit.lt", "less than {limit}", limit=None),
}
