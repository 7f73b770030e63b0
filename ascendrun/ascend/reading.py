"""Tool output as lines, errors, texts and numbers, and as dataclasses that say which names of it they hold.

No function raises; None replaces a doubtful value.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from functools import lru_cache
from re import Pattern
from typing import Any, Callable, TypeVar

from ascendrun.ascend.tables import load_table
from ascendrun.core.dataclass import dataclass, dataclass_transform
from ascendrun.text import Text

# A last line without its line break may be truncated: no number or free text may end at this mark.
CUT = "\N{REPLACEMENT CHARACTER}"

# Many nodes print the same few numbers, masks and versions; no tool prints a long value.
once = lru_cache(maxsize=4096)
"""For functions of short texts, most of which repeat from device to device and from one sample to the next."""

_INTEGER = re.compile(r"[0-9]{1,18}|-[1-9][0-9]{0,16}")
_DECIMAL = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,9})?")
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,16}")
_IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(?:\.(?!$)|$)){4}")
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]{1,2}")
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f\ufffd]+")


@dataclass(frozen=True)
class Field:
    """One `name : value` line: the line, and both sides without surrounding blanks."""

    line: str
    name: str
    value: str


def lines_of(text: str) -> tuple[str, ...]:
    """Return the lines of a tool's output without line breaks; a last line that had none ends with CUT."""
    lines = [line[:-1] if line.endswith("\r") else line for line in text.split("\n")]
    last = lines.pop()
    if last:
        lines.append(last + CUT)
    return tuple(lines)


def shown(line: str) -> str:
    """Return a line as printed, for reports."""
    return line[:-1] if line.endswith(CUT) else line


def unparsed_of(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the non-blank lines as printed, for reports."""
    return tuple(shown(line) for line in lines if shown(line).strip())


@once
def read_int(text: str, low: int, high: int) -> int | None:
    """Return the complete text as a decimal integer from `low` to `high`; else None."""
    text = text.strip(" \t")
    if not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    return number if low <= number <= high else None


@once
def read_float(text: str, low: float, high: float) -> float | None:
    """Return the complete text as a plain decimal number (no exponent, nan, inf) from `low` to `high`; else None."""
    text = text.strip(" \t")
    if not _DECIMAL.fullmatch(text):
        return None
    number = float(text)
    return number if low <= number <= high else None


def read_hex(text: str) -> int | None:
    """Return the number of a text 0x...; else None."""
    text = text.strip(" \t")
    return int(text, 16) if _HEX.fullmatch(text) else None


@once
def read_text(text: str) -> str | None:
    """Return the text; None if it is empty, NA, truncated or has control characters."""
    text = text.strip(" \t")
    return text if text and text != "NA" and _PRINTABLE.fullmatch(text) else None


@once
def read_ip(text: str) -> str | None:
    """Return an IPv4 or IPv6 address as printed; else None."""
    text = text.strip(" \t")
    if _IPV4.fullmatch(text):
        return text
    return text if _is_ipv6(text) else None


def _is_ipv6(text: str) -> bool:
    if len(text) > 45 or not re.fullmatch(r"[0-9a-fA-F:.]+", text) or ":" not in text:
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def read_bus_id(text: str) -> str | None:
    """Return a PCI address as printed (0000:C1:00.0); else None."""
    text = text.strip(" \t")
    return text if _BUS_ID.fullmatch(text) else None


def read_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the text if it is one of `choices`, else None. The mark CUT is ignored: a choice is complete."""
    text = shown(text).strip(" \t")
    return text if text in choices else None


def field_of(line: str, separator: str = ":") -> Field | None:
    """Split a line into name and value at its first separator; None without separator or name."""
    name, found, value = line.partition(separator)
    name = name.strip(" \t")
    return Field(line, name, value.strip(" \t")) if found and name else None


# ---------------------------------------------------------------- errors instead of a result


@dataclass(frozen=True)
class ToolError:
    """One error, often on stdout: `kind` is stable, `code` the tool's number (None: not printed), `text` the line.

    `hint` is None if only the neighbouring lines show the fix.
    """

    kind: str
    code: int | None
    text: str
    message: Text
    hint: Text | str | None


def _read_row(row: Mapping[str, str]) -> tuple[str, Pattern[str], Text, Text | str | None]:
    key = f"tool-error.{row['name']}"
    hint = Text(f"{key}.hint", row["hint"]) if "hint" in row else row.get("command")
    return row["kind"], re.compile(row["pattern"]), Text(key, row["message"]), hint


_TABLE = tuple(map(_read_row, load_table("tool_errors")["rows"]))
"""(kind, pattern, message, hint), the most specific first. A group named `code` is the tool's number."""

# Few lines are errors: one search instead of one per row. (Group names must be unique in a pattern.)
_ANY = re.compile("|".join(f"(?:{re.sub('[(][?]P<[a-z]+>', '(?:', pattern.pattern)})" for _, pattern, _, _ in _TABLE))


@lru_cache(maxsize=4096)  # many nodes print the same few lines
def read_error(line: str) -> ToolError | None:
    """Return the error on a line; None if it is not a known error."""
    text = shown(line)
    if not _ANY.search(text):
        return None
    for kind, pattern, message, hint in _TABLE:
        found = pattern.search(text)
        if found:
            code = found.groupdict().get("code")
            return ToolError(kind, int(code) if code else None, text.strip(), message, hint)
    return None


def split_errors(lines: Iterable[str]) -> tuple[tuple[ToolError, ...], list[str]]:
    """Return the known errors, and the other lines without usage lines that follow an error."""
    errors: list[ToolError] = []
    rest: list[str] = []
    for line in lines:
        error = read_error(line)
        if error:
            errors.append(error)
        elif not (errors and shown(line).lstrip().startswith("Usage:")):
            rest.append(line)
    return tuple(errors), rest


# ---------------------------------------------------------------- dataclasses of printed values


def printed(*names: str, read: Read = read_text, default: Any = None) -> Any:
    """Return the default of a field that holds the value printed under one of `names`."""
    return field(default=default, metadata={"names": names, "read": read})


@dataclass(frozen=True)
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Answer:
    """What a parser returns: the tool's errors, the lines that were not understood, and more in each kind of answer,
    which is a frozen dataclass.

    A field with `printed` has the value of the first of its names in the output; None: missing or unreadable.
    """

    errors: tuple[ToolError, ...] = ()
    unparsed: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


Read = Callable[[str], Any]


def whole(high: int, low: int = 0) -> Read:
    return lambda text: read_int(text, low, high)


def decimal(high: float) -> Read:
    return lambda text: read_float(text, 0.0, high)


def choice(*choices: str) -> Read:
    return lambda text: read_choice(text, choices)


def switch(yes: str, no: str) -> Read:
    return lambda text: {yes: True, no: False}.get(shown(text).strip(" \t"))


_ABSENT = ("NA", "-", "not supported")
A = TypeVar("A", bound=Answer)


class Block:
    """`name : value` lines. `unread`: lines without a name, and those with a value that was not understood; all, if a
    name is duplicated: the owner of the values is then unknown, and none is read."""

    def __init__(self, lines: Iterable[str | Field]) -> None:
        found: list[Field] = []
        self.unread: list[str] = []
        for line in lines:
            one = field_of(line) if isinstance(line, str) else line
            if one is not None:
                found.append(one)
            elif isinstance(line, str):
                self.unread.append(line)
        self.fields = {one.name: one for one in found}
        if len(self.fields) < len(found):
            self.unread += [one.line for one in found]
            self.fields = {}
        self._lines = {name: one.line for name, one in self.fields.items()}

    def take(self, names: Sequence[str], read: Read = read_text) -> Any:
        """Return the value of the first present name; None: missing, absent or not understood."""
        for name in names:
            if name in self.fields:
                found, value = read(self.fields[name].value), self.fields[name].value
                if self._lines.pop(name, "") and found is None and value not in _ABSENT:
                    self.unread.append(self.fields[name].line)
                return found
        return None

    def fill(self, kind: type[Any], **places: str) -> dict[str, Any]:
        """Return the known values of the printed fields of a dataclass. `places`: for names with {places}."""
        found = {
            one.name: self.take([name.format(**places) for name in one.metadata["names"]], one.metadata["read"])
            for one in fields(kind)
            if "names" in one.metadata
        }
        return {name: value for name, value in found.items() if value is not None}

    def skip(self, names: Iterable[str]) -> None:
        """Count these names as understood."""
        for name in names:
            self._lines.pop(name, None)

    def rest(self) -> list[str]:
        """Return the lines that were not understood, also those that nothing has taken."""
        return [*self.unread, *self._lines.values()]


def read_answer(kind: type[A], text: str, *, skip: Iterable[str] = ()) -> A:
    """Return the answer in one block of lines. `skip`: names that are understood, but not kept."""
    errors, rest = split_errors(lines_of(text))
    block = Block(rest)
    values = block.fill(kind)
    block.skip(skip)
    return kind(errors=errors, unparsed=unparsed_of(block.rest()), **values)
