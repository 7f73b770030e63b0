"""Rows of JSON files: a list, an object with it under `data`, or one value a line."""

from __future__ import annotations

import json
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Fault(NamedTuple):
    """What makes a row unusable. `place`: its number, counted from 1 by lines or by rows of a list; 0: the file.
    `number`: of the message in it, 0: of the whole row."""

    place: int
    code: str
    value: str = ""
    number: int = 0


class Rows(NamedTuple):
    """`rows`: (number, row). `are_lines`: the numbers are those of lines."""

    rows: list[tuple[int, Any]]
    faults: list[Fault]
    are_lines: bool


def parse_rows(text: str, *, is_whole: bool = True) -> Rows:
    """Return the rows of a file. `is_whole` False: the text is its start, and a row that is cut is left out."""
    stripped = text.lstrip()
    if is_whole:
        try:
            whole = json.loads(text)
        except RecursionError:
            return Rows([], [Fault(0, "too-deep")], False)
        except ValueError as error:
            if stripped[:1] == "[" and not _is_json(stripped.split("\n", 1)[0]):
                return Rows([], [Fault(0, "not-json", str(error))], False)
        else:
            rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
            if not isinstance(rows, list):
                return Rows([], [Fault(0, "not-a-list", type(rows).__name__)], False)
            return Rows(list(enumerate(rows, start=1)), [], False)
    elif not _is_json(stripped.split("\n", 1)[0]):  # one JSON value that goes on
        return Rows(_parse_start(stripped) if stripped[:1] == "[" else [], [], False)
    return _parse_lines(text)


def _parse_lines(text: str) -> Rows:
    found = Rows([], [], True)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                found.rows.append((number, json.loads(line)))
            except (ValueError, RecursionError):
                found.faults.append(Fault(number, "line-not-json"))
    return found


def _parse_start(text: str) -> list[tuple[int, Any]]:
    """Return the complete rows at the start of a JSON list."""
    decoder, at = json.JSONDecoder(), 1
    found: list[tuple[int, Any]] = []
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found
        found.append((len(found) + 1, row))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
