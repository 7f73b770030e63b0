"""Conversion of tool output to lines, texts and numbers. No function raises; None replaces a doubtful value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from ascendrun.core.dataclass import dataclass

T = TypeVar("T")

# A last line without its line break may be truncated: no number or free text may end at this mark.
CUT = "\N{REPLACEMENT CHARACTER}"

# Many nodes print the same few numbers, masks and versions; no tool prints a long value.
_once = lru_cache(maxsize=4096)

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


@_once
def read_int(text: str, low: int, high: int) -> int | None:
    """Return the complete text as a decimal integer from `low` to `high`; else None."""
    text = text.strip(" \t")
    if not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    return number if low <= number <= high else None


@_once
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


def read_percent(text: str) -> int | None:
    return read_int(text, 0, 100)


@_once
def read_text(text: str) -> str | None:
    """Return the text; None if it is empty, NA, truncated or has control characters."""
    text = text.strip(" \t")
    return text if text and text != "NA" and _PRINTABLE.fullmatch(text) else None


@_once
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


def fields_of(lines: Sequence[str]) -> tuple[list[Field], list[str]]:
    """Return the `name : value` lines as fields, and the other lines."""
    fields, others = [], []
    for line in lines:
        field = field_of(line)
        if field:
            fields.append(field)
        else:
            others.append(line)
    return fields, others


def once_each(fields: Sequence[Field]) -> dict[str, Field] | None:
    """Return the fields by name; None if a name is duplicated: the owner of the values is unknown."""
    by_name = {field.name: field for field in fields}
    return by_name if len(by_name) == len(fields) else None


class Reader:
    """The fields of one block, each read once; unread fields can be reported."""

    def __init__(self, fields: dict[str, Field]) -> None:
        self._fields = fields
        self._unread: dict[str, str] = {name: field.line for name, field in fields.items()}

    def value(self, *names: str) -> str | None:
        """Return the raw value of the first present name and count it as read; None if all are missing."""
        for name in names:
            if name in self._fields:
                self._unread.pop(name, None)
                return self._fields[name].value
        return None

    def integer(self, *names: str, low: int = 0, high: int = 2**31) -> int | None:
        value = self.value(*names)
        return None if value is None else self._keep(names, read_int(value, low, high), value)

    def decimal(self, *names: str, low: float = 0.0, high: float = 1e9) -> float | None:
        value = self.value(*names)
        return None if value is None else self._keep(names, read_float(value, low, high), value)

    def percent(self, *names: str) -> int | None:
        return self.integer(*names, high=100)

    def hexadecimal(self, *names: str) -> int | None:
        value = self.value(*names)
        return None if value is None else self._keep(names, read_hex(value), value)

    def text(self, *names: str) -> str | None:
        value = self.value(*names)
        return None if value is None else self._keep(names, read_text(value), value)

    def choice(self, choices: Sequence[str], *names: str) -> str | None:
        value = self.value(*names)
        return None if value is None else self._keep(names, read_choice(value, choices), value)

    def unread(self) -> list[str]:
        """Return the lines whose name or value was not understood; NA and - count as understood."""
        return list(self._unread.values())

    def _keep(self, names: Sequence[str], read: T | None, value: str) -> T | None:
        if read is None and value not in ("NA", "-"):
            name = next(name for name in names if name in self._fields)
            self._unread[name] = self._fields[name].line
        return read
