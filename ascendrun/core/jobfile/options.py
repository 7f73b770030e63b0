"""The options of a bundled program: read from its table, held against a job's `args`, turned into its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

from ascendrun.core.errors import InvalidInput, Problem
from ascendrun.core.message_format import closest, shown

TYPES = ("int", "float", "str", "bool", "path", "list")
_NAME = re.compile(r"[a-z][a-z0-9_]*")

Scalar = Union[None, bool, int, float, str]
Argument = Union[Scalar, tuple[Scalar, ...]]


@dataclass(frozen=True)
class Option:
    """One option. `choices` empty: any value; `low`, `high`: inclusive bounds, None: none."""

    name: str
    type: str
    default: Argument
    help: str
    choices: tuple[Scalar, ...] = ()
    low: float | None = None
    high: float | None = None
    required: bool = False


@dataclass(frozen=True)
class ProgramOptions:
    """All options of one program, by name, in the order of its table."""

    program: str
    options: Mapping[str, Option]


class WrongValue(ValueError):
    """An option's value does not fit: what it wants, and the way out."""

    def __init__(self, wants: str, hint: str | None = None) -> None:
        super().__init__(wants)
        self.hint = hint


def parse_program_options(name: str, json_text: str) -> ProgramOptions:
    """The table of one program (`options.json`). Raises InvalidInput with all faults of the table."""
    file = f"{name}/options.json"
    try:
        table = json.loads(json_text)
    except ValueError as error:
        raise InvalidInput(
            [Problem(file, getattr(error, "lineno", None), getattr(error, "colno", None), f"is not JSON: {error}")]
        ) from error
    if not isinstance(table, dict):
        raise InvalidInput([Problem(file, 1, 1, "is no table of options")])
    problems = [
        Problem(file, None, None, f"{option}: {fault}")
        for option, row in table.items()
        for fault in _table_faults(option, row)
    ]
    if problems:
        raise InvalidInput(problems)
    return ProgramOptions(name, {option: _make_option(option, row) for option, row in table.items()})


def check_value(option: Option, value: Argument, text: str | None = None) -> Argument:
    """`value` as the option's type. `text`: how a number was written, which is what a text option gets.

    Raises WrongValue.
    """
    if option.type == "list":
        return _check_list(value)
    typed = _check_scalar(option, value, text)
    if option.choices and typed not in option.choices:
        near = closest(str(typed), [str(choice) for choice in option.choices])
        raise WrongValue(
            "wants one of " + ", ".join(str(choice) for choice in option.choices),
            f"did you mean {near}?" if near else None,
        )
    if isinstance(typed, (int, float)) and not isinstance(typed, bool):
        if option.low is not None and typed < option.low:
            raise WrongValue(f"wants at least {option.low:g}")
        if option.high is not None and typed > option.high:
            raise WrongValue(f"wants at most {option.high:g}")
    return typed


def make_arguments(args: Mapping[str, Argument]) -> tuple[str, ...]:
    """`--option=value` for every option given, in the order given; null means that the program's default holds."""
    return tuple(f"--{name}={_render(value)}" for name, value in args.items() if value is not None)


def _render(value: Argument) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(_render(item) for item in value)
    return repr(value) if isinstance(value, (int, float)) else str(value)


def _check_scalar(option: Option, value: Argument, text: str | None) -> Scalar:
    if isinstance(value, tuple):
        raise WrongValue(f"wants {_WANTS[option.type]}, not a list")
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if option.type == "bool" and isinstance(value, bool):
        return value
    if option.type == "float" and number is not None:
        return float(number)
    if option.type == "int" and number is not None and float(number) == int(number):
        return int(number)
    if option.type in ("str", "path"):
        if isinstance(value, str) and (value or option.type == "str" or option.default == ""):
            return value
        if number is not None and text is not None:
            return text
    told = shown(value) if isinstance(value, str) else str(value).lower()
    is_quoted = isinstance(value, str) and _UNQUOTED[option.type].fullmatch(value)
    raise WrongValue(f"wants {_WANTS[option.type]}, not {told}", "without the quotes" if is_quoted else None)


def _check_list(value: Argument) -> tuple[Scalar, ...]:
    if not isinstance(value, tuple):
        raise WrongValue("wants a list", "write [a, b]")
    bad = [shown(str(item)) for item in value if not _is_item(item)]
    if bad:
        raise WrongValue(
            f"cannot pass the item{'s' if len(bad) > 1 else ''} {', '.join(bad)}",
            "items are joined by commas: no commas, no spaces at the ends, none empty",
        )
    return value


def _is_item(item: object) -> bool:
    """Whether the program gets the item back from the text in which commas join all items."""
    if isinstance(item, str):
        return bool(item) and item == item.strip() and "," not in item
    return isinstance(item, (bool, int, float))


_NEVER = re.compile(r"(?!)")
_NUMBER = re.compile(r"[-+]?[0-9][0-9.]*(?:[eE][-+]?[0-9]+)?")
_UNQUOTED = {"int": _NUMBER, "float": _NUMBER, "bool": re.compile("true|false"), "str": _NEVER, "path": _NEVER}
_WANTS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "path": "a path",
    "list": "a list",
}


def _table_faults(option: str, row: Any) -> list[str]:
    if not _NAME.fullmatch(option):
        return ["is no option name (a-z, 0-9, _)"]
    if not isinstance(row, dict):
        return ["wants a table"]
    faults = [
        f"unknown key {shown(key)}"
        for key in row
        if key not in ("type", "default", "help", "choices", "min", "max", "required")
    ]
    if row.get("type") not in TYPES:
        faults.append("type is none of " + ", ".join(TYPES))
    if not isinstance(row.get("help"), str):
        faults.append("help is missing")
    if not isinstance(row.get("choices", []), list):
        faults.append("choices is no list")
    return faults


def _make_option(name: str, row: Mapping[str, Any]) -> Option:
    default = row.get("default")
    return Option(
        name=name,
        type=row["type"],
        default=tuple(default) if isinstance(default, list) else default,
        help=row["help"],
        choices=tuple(row.get("choices") or ()),
        low=row.get("min"),
        high=row.get("max"),
        required=bool(row.get("required", False)),
    )
