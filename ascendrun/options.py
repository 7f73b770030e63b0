"""Options of programs, checked the same way in job files and on command lines. `option_tables` reads their tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from ascendrun.text import Text, closest, did_you_mean, suggestion, write

GENERATED = "generated"
"""The data_path of programs that make their own data; without a path they refuse to start."""

Scalar = Union[None, bool, int, float, str]
Argument = Union[Scalar, tuple[Union[Scalar, Mapping[str, Scalar]], ...]]


@dataclass(frozen=True)
class Option:
    """One option. Empty `choices`: any value. `low`, `high`: inclusive bounds; None: unbounded. `is_shared`: several
    programs have its help."""

    name: str
    type: str
    default: Argument
    help: str
    choices: tuple[Scalar, ...] = ()
    low: float | None = None
    high: float | None = None
    required: bool = False
    aliases: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    value_aliases: Mapping[str, Scalar] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    is_shared: bool = False

    def is_path(self, value: object) -> bool:
        return self.type == "path" and isinstance(value, str) and bool(value) and value not in self.words


@dataclass(frozen=True)
class ProgramOptions:
    """All options of one program by name, in table order, with its refused names."""

    program: str
    options: Mapping[str, Option]
    refused: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Option | None:
        """Return the option with this name or alias; None if not found."""
        return self.options.get(self.names_by_alias.get(name, name))

    @property
    def names_by_alias(self) -> Mapping[str, str]:
        """The option name of every alias."""
        return {alias: option.name for option in self.options.values() for alias in option.aliases}

    def help(self, option: Option) -> Text:
        owner = "trainer" if option.is_shared else self.program
        return Text(f"option.{owner}.{option.name}", option.help.replace("{", "{{").replace("}", "}}"))


@dataclass(frozen=True)
class Notation:
    """The notation of options in their source: `args.lr` and `lr: 1` in a job file, `--lr` and `--lr=1`."""

    prefix: str
    pair: str

    def name(self, name: str) -> str:
        return self.prefix + name

    def write(self, name: str, value: Argument) -> str:
        return self.pair.format(name=name, value=_render(value))


JOB_FILE = Notation("args.", "{name}: {value}")
COMMAND_LINE = Notation("--", "--{name}={value}")


@dataclass(frozen=True)
class OptionProblem:
    """A problem with one option. `name`: as given; None: a required option is missing. `is_name`: the name is
    invalid, not the value."""

    name: str | None
    message: Text
    hint: Text | None = None
    is_name: bool = False


class InvalidValueError(ValueError):
    """A value is invalid for its option. `message`: the expected and actual value, without the option's name."""

    def __init__(self, message: Text, hint: Text | None = None) -> None:
        super().__init__(str(message))
        self.message, self.hint = message, hint


def with_defaults(table: ProgramOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option by name; null selects the default. A given option disables the default of those that it
    excludes, which are None then."""
    values = {table.names_by_alias.get(name, name): value for name, value in given.items() if value is not None}
    defaults = {name: option.default for name, option in table.options.items()}
    for option in table.options.values():
        for other in option.excludes:
            if option.name in values or other in values:
                defaults[other if option.name in values else option.name] = None
    return {**defaults, **values}


def check_arguments(
    table: ProgramOptions,
    given: Mapping[str, Any],
    notation: Notation,
    *,
    texts: Mapping[str, str] | None = None,
    unchecked: Collection[str] = (),
) -> tuple[dict[str, Any], list[OptionProblem]]:
    """Return the given values by option name, and all problems.

    Aliases are resolved and values converted to the option's type; an invalid value is unchanged. A null counts as not
    given. `texts`: the original spelling of values, used by text options for numbers. `unchecked`: names not to check.
    """
    label = notation.name
    values: dict[str, Any] = {}
    problems: list[OptionProblem] = []
    names: dict[str, str] = {}
    for name, value in given.items():
        option = table.find(name)
        if option is None:
            problems.append(_unknown_name(table, name, notation))
            values[name] = value
            continue
        if option.name in names:
            problems.append(_given_twice(name, names[option.name], notation))
            continue
        names[option.name] = name
        values[option.name] = value
        if value is None or name in unchecked:
            continue
        try:
            values[option.name] = check_value(option, value, (texts or {}).get(name))
        except InvalidValueError as error:
            text = Text("options.value", "{option}: {fault}", option=label(name), fault=error.message)
            problems.append(OptionProblem(name, text, error.hint))
    problems.extend(_conflicts(table, values, names, notation))
    for option in table.options.values():
        if option.required and values.get(option.name) is None and names.get(option.name) not in unchecked:
            text = Text(
                "options.required", "{option} is required: {help}", option=label(option.name), help=table.help(option)
            )
            problems.append(OptionProblem(None, text))
    return values, problems


def check_value(option: Option, value: Any, text: str | None = None) -> Argument:
    """Convert `value` to the option's type. `text`: the original spelling of a number, which a text option uses.

    Raises InvalidValueError.
    """
    written = value if isinstance(value, str) else text
    if written is not None and written in option.value_aliases:
        value = option.value_aliases[written]
    if isinstance(value, Mapping):
        raise InvalidValueError(_expected(option, value))
    if option.type == "list":
        return _check_list(option, value)
    if option.type == "maps":
        return _check_maps(option, value)
    typed = _check_scalar(option, value, text)
    _check_choice(option, typed)
    if isinstance(typed, (int, float)) and not isinstance(typed, bool):
        if option.low is not None and typed < option.low:
            raise InvalidValueError(
                Text("options.low", "expected at least {limit}, got {value}", limit=f"{option.low:g}", value=typed)
            )
        if option.high is not None and typed > option.high:
            raise InvalidValueError(
                Text("options.high", "expected at most {limit}, got {value}", limit=f"{option.high:g}", value=typed)
            )
    return typed


def _check_choice(option: Option, value: object) -> None:
    if option.choices and value not in option.choices:
        choices = [str(choice) for choice in option.choices]
        near = closest(str(value), choices)
        raise InvalidValueError(
            Text("options.choice", "expected one of {choices}, got {value:quote}", choices=choices, value=str(value)),
            did_you_mean(near) if near else None,
        )


def read_text(option: Option, text: str) -> Any:
    """Convert a command-line value to its job-file form; an invalid value stays text, for `check_value` to report."""
    if option.type == "list":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if option.type == "maps":
        try:
            return tuple(json.loads(text))
        except (ValueError, TypeError):
            return text
    if option.type == "bool":
        return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}.get(text.lower(), text)
    if option.type in ("int", "float"):
        try:
            number = int(text) if option.type == "int" else float(text)
        except ValueError:
            return text
        return number if math.isfinite(number) else text
    return text


def make_arguments(args: Mapping[str, Argument]) -> tuple[str, ...]:
    """Return `--option=value` for every given option, in the given order; null selects the program's default."""
    return tuple(COMMAND_LINE.write(name, value) for name, value in args.items() if value is not None)


def _unknown_name(table: ProgramOptions, name: str, notation: Notation) -> OptionProblem:
    """Report an unknown name, with what to write in its place."""
    label = notation.name
    if name in table.refused:
        message = Text(
            "options.refused", "{option} is not an option of {program}", option=label(name), program=table.program
        )
        instead = Text(f"option.{table.program}.{name}.refused", table.refused[name])
        return OptionProblem(name, message, instead, is_name=True)
    message = Text("options.unknown", "unknown option {option} of {program}", option=label(name), program=table.program)
    names = [*table.options, *(alias for option in table.options.values() for alias in option.aliases)]
    near = closest(name, names)
    hint = did_you_mean(label(near)) if near else suggestion("", sorted(label(each) for each in names))
    return OptionProblem(name, message, hint, is_name=True)


def _given_twice(name: str, earlier: str, notation: Notation) -> OptionProblem:
    label = notation.name
    message = Text("options.same", "{name} and {earlier} are the same option", name=label(name), earlier=label(earlier))
    return OptionProblem(name, message, Text("options.remove", "remove {name}", name=label(name)), is_name=True)


def _conflicts(
    table: ProgramOptions, values: Mapping[str, Any], names: Mapping[str, str], notation: Notation
) -> list[OptionProblem]:
    label = notation.name
    problems = []
    for name, given in names.items():
        for other in table.options[name].excludes:
            if values.get(name) is not None and values.get(other) is not None:
                both = {"name": label(given), "other": label(names[other])}
                message = Text("options.excludes", "{name} cannot be combined with {other}", **both)
                problems.append(OptionProblem(given, message, is_name=True))
    return problems


def _render(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        if any(isinstance(item, Mapping) for item in value):
            return json.dumps([dict(item) if isinstance(item, Mapping) else item for item in value], ensure_ascii=False)
        return ",".join(_render(item) for item in value)
    return repr(value) if isinstance(value, (int, float)) else str(value)


def _check_scalar(option: Option, value: Argument, text: str | None) -> Scalar:
    if isinstance(value, tuple):
        raise InvalidValueError(_expected(option, value))
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
    is_quoted = isinstance(value, str) and text is not None and _UNQUOTED[option.type].fullmatch(value)
    hint = Text("options.unquote", "remove the quotes") if is_quoted else None
    raise InvalidValueError(_expected(option, value), hint)


def _check_list(option: Option, value: Argument) -> Argument:
    if not isinstance(value, tuple):
        raise InvalidValueError(_expected(option, value), write("[a, b]"))
    bad = [repr(str(item)) for item in value if not _is_item(item)]
    if bad:
        raise InvalidValueError(
            Text("options.items", "invalid list items: {items}", items=bad),
            Text("options.items-hint", "an item must not be empty, contain a comma, or start or end with a space"),
        )
    for item in value:
        _check_choice(option, item)
    return value


def _check_maps(option: Option, value: Argument) -> Argument:
    maps = [item for item in value if isinstance(item, Mapping)] if isinstance(value, tuple) else []
    if not isinstance(value, tuple) or len(maps) < len(value):
        row = ", ".join(f"{key}: …" for key in option.keys)
        raise InvalidValueError(_expected(option, value), write(f"- {{{row}}}"))
    unknown = sorted({str(key) for item in maps for key in item} - set(option.keys))
    if unknown:
        message = Text("options.map-keys", "unknown keys {unknown}; expected {keys}", unknown=unknown, keys=option.keys)
        raise InvalidValueError(message)
    wrong = [str(key) for item in maps for key, one in item.items() if isinstance(one, (Mapping, tuple, list))]
    if wrong:
        raise InvalidValueError(Text("options.map-values", "{keys}: expected a text or a number", keys=wrong))
    return tuple(maps)


def _is_item(item: object) -> bool:
    """Return whether the program can recover the item from the comma-separated text of all items."""
    if isinstance(item, str):
        return bool(item) and item == item.strip() and "," not in item
    return isinstance(item, (bool, int, float))


def _expected(option: Option, value: Argument | Mapping[str, Any]) -> Text:
    found: Text | str = repr(value) if isinstance(value, str) else _render(value)
    if isinstance(value, Mapping):
        found = MAPPING
    elif isinstance(value, tuple) and option.type != "maps":
        found = LIST
    return Text("options.expected", "expected {expected}, got {found}", expected=TYPE_NAMES[option.type], found=found)


MAPPING, LIST = Text("type.mapping", "a mapping"), Text("type.list", "a list")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NEVER = re.compile(r"(?!)")
_NUMBER = re.compile(r"[-+]?[0-9][0-9.]*(?:[eE][-+]?[0-9]+)?")
_UNQUOTED = {"int": _NUMBER, "float": _NUMBER, "bool": re.compile("true|false"), "str": _NEVER, "path": _NEVER}
TYPE_NAMES = {
    "int": Text("type.integer", "an integer"),
    "float": Text("type.number", "a number"),
    "str": Text("type.string", "a string"),
    "bool": Text("type.boolean", "true or false"),
    "path": Text("type.path", "a path"),
    "list": LIST,
    "maps": Text("type.maps", "a list of mappings"),
}
