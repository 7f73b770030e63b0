"""The errors that npu-smi and hccn_tool print, often on stdout, instead of a result."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from re import Pattern

from ascendrun.ascend.reading import shown
from ascendrun.ascend.tables import load_table
from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text


@dataclass(frozen=True)
class ToolError:
    """One error: `kind` is stable, `code` the tool's number (None: not printed), `text` the line itself.

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


def split_errors(lines: Iterable[str]) -> tuple[tuple[ToolError, ...], tuple[str, ...]]:
    """Return the known errors, and the other lines without usage lines that follow an error."""
    errors: list[ToolError] = []
    rest: list[str] = []
    for line in lines:
        error = read_error(line)
        if error:
            errors.append(error)
        elif not (errors and shown(line).lstrip().startswith("Usage:")):
            rest.append(line)
    return tuple(errors), tuple(rest)
