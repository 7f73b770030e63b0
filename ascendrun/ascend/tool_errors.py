"""The errors that npu-smi and hccn_tool print, often on stdout, instead of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from re import Pattern

from ascendrun.ascend.reading import shown
from ascendrun.ascend.tables import load_table
from ascendrun.text import Text


@dataclass(frozen=True)
class ToolError:
    """One error: `kind` is stable, `code` the tool's own number (None where it gives none), `text` the line itself.

    `hint` is None where only the neighbouring lines show what to do.
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

# Most lines are no error: one search instead of one for each row. (A group has its name once in a pattern.)
_ANY = re.compile("|".join(f"(?:{re.sub('[(][?]P<[a-z]+>', '(?:', pattern.pattern)})" for _, pattern, _, _ in _TABLE))


@lru_cache(maxsize=4096)  # a tool has few lines, and many nodes print them
def read_error(line: str) -> ToolError | None:
    """The error that a line is, or None when it is none that we know."""
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
    """The known errors among the lines, and the lines that are none; usage lines that follow an error are dropped."""
    errors: list[ToolError] = []
    rest: list[str] = []
    for line in lines:
        error = read_error(line)
        if error:
            errors.append(error)
        elif not (errors and shown(line).lstrip().startswith("Usage:")):
            rest.append(line)
    return tuple(errors), tuple(rest)
