"""Rows of JSON files (a list, an object with it under `data`, or one value a line), and conversations of rows in the
common layouts: instruction and output, messages, conversations, a list of messages.
"""

from __future__ import annotations

import json
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


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


ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}


class Conversation(NamedTuple):
    """`turns`: (role, text), at least one by the assistant. `level` None: no difficulty given."""

    turns: tuple[tuple[str, str], ...]
    level: str | None = None


class UnusableRowError(ValueError):
    """`code`: key-missing, unknown-format, unknown-role, no-text, no-reply or difficulty-type. `value`: what is wrong.
    `number`: of the message, 0: of the whole row."""

    def __init__(self, code: str, value: str = "", number: int = 0) -> None:
        super().__init__(code, value, number)
        self.code, self.value, self.number = code, value, number


def read_conversation(row: Any, *, system: str = "") -> Conversation:
    """Convert a row. `system`: system message of rows that lack it, "" for none. Raises UnusableRowError."""
    fields = row if isinstance(row, dict) else {}
    if "instruction" in fields:
        turns = _of_instruction(fields)
    else:
        turns = _of_messages(fields.get("messages", fields.get("conversations")) if row is fields else row)
    if not any(role == "assistant" and text.strip() for role, text in turns):
        raise UnusableRowError("no-reply")
    level = fields.get("difficulty")
    if level is not None and not isinstance(level, str):
        raise UnusableRowError("difficulty-type", str(level))
    if system and turns[0][0] != "system":
        turns = [("system", system), *turns]
    return Conversation(tuple(turns), level)


def _of_instruction(row: dict[str, Any]) -> list[tuple[str, str]]:
    for key in ("instruction", "output"):
        if not isinstance(row.get(key), str):
            raise UnusableRowError("key-missing", key)
    more, system = str(row.get("input") or ""), str(row.get("system") or "")
    turns = [("user", row["instruction"] + (f"\n{more}" if more else "")), ("assistant", row["output"])]
    return [("system", system), *turns] if system else turns


def _of_messages(messages: Any) -> list[tuple[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise UnusableRowError("unknown-format")
    turns = []
    for number, message in enumerate(messages, start=1):
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
        if not isinstance(role, str) or role not in ROLES:
            raise UnusableRowError("unknown-role", str(role), number)
        if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
        if not isinstance(content, str):
            raise UnusableRowError("no-text", number=number)
        turns.append((ROLES[role], content))
    return turns


# --- tasks of the program nanochat ---


def _is_messages(row: Any) -> bool:
    """Return whether user and assistant take turns, after a system message or none."""
    messages = row.get("messages") if isinstance(row, dict) else row
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return False
    roles = [each.get("role") for each in messages]
    roles = roles[1:] if roles[:1] == ["system"] else roles
    return len(roles) > 1 and all(role == ("user", "assistant")[at % 2] for at, role in enumerate(roles))


def _has(row: Any, *keys: str) -> bool:
    return isinstance(row, dict) and set(keys) <= set(row)


FILE_KINDS: dict[str, Callable[[Any], bool]] = {
    "messages": _is_messages,
    "choices": lambda row: _has(row, "question", "choices") and ("answer" in row or "answerKey" in row),
    "gsm8k": lambda row: _has(row, "question") and "####" in str(row.get("answer")),
    "code": lambda row: _has(row, "prompt", "test", "entry_point"),
}
"""Kinds of tasks that are read from a file, and whether a row is of one."""
ROW_KINDS: dict[str, Callable[[Any], bool]] = {
    **FILE_KINDS,
    "text": lambda row: _has(row, "text") and isinstance(row["text"], str),
}
