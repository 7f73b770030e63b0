"""Instructions and chats from JSON and JSON lines, in the common layouts, as conversations."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text

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

SYNTHETIC_LEVELS = ("explain", "reasoning", "topology")
NAMES = ("node", "switch", "router", "host", "rack", "port")


@dataclass(frozen=True)
class Conversation:
    """`turns`: (role, text), at least one by the assistant. `level` None: no difficulty given."""

    turns: tuple[tuple[str, str], ...]
    level: str | None = None


def read_conversations(path: Path, *, system: str) -> list[Conversation]:
    """Read conversations. `system`: system message of samples that lack it, "" for none. Raises InvalidDataError with
    the first problems."""
    check_file(path)
    found: list[Conversation] = []
    problems: list[Text] = []
    for place, row in read_rows(path):
        try:
            found.append(as_conversation(row, system=system))
        except InvalidDataError as error:
            problems.append(Text("program.at", "{path}: {place}: {error}", path=path, place=place, error=error.args[0]))
    if problems:
        raise InvalidDataError.of(problems)
    if not found:
        raise InvalidDataError("program.no-samples", "{path}: no samples", path=path)
    return found


def check_file(path: Path) -> None:
    if not path.is_file():
        raise InvalidDataError(
            "program.file-not-found",
            "{path}: file not found; the data must be at the same path on every node",
            path=path,
        )


def read_rows(path: Path) -> Iterator[tuple[Text, Any]]:
    """Yield (location, sample) of a JSON list, of JSON lines, or of an object with the list under `data`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidDataError(
            "program.not-utf8",
            "{path}: not valid UTF-8 at byte {position:,}\nhint: convert the file: iconv -f ENCODING -t UTF-8",
            path=path,
            position=error.start,
        ) from error
    try:
        whole = json.loads(text)
    except RecursionError:
        raise InvalidDataError(
            "program.too-deep", "{path}: JSON is nested too deeply for a list of samples", path=path
        ) from None
    except ValueError as error:
        if text.lstrip()[:1] == "[" and not is_json(text.lstrip().split("\n", 1)[0]):
            raise InvalidDataError(
                "program.not-json", "{path}: not valid JSON: {error}", path=path, error=error
            ) from None
    else:
        rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
        if not isinstance(rows, list):
            raise InvalidDataError(
                "program.not-a-list",
                "{path}: expected a list of samples, got {found}",
                path=path,
                found=type(rows).__name__,
            )
        yield from (
            (Text("program.row", "row {number}", number=number), row) for number, row in enumerate(rows, start=1)
        )
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield Text("program.line", "line {number}", number=number), sample_of(line)


def sample_of(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return InvalidDataError("program.line-not-json", "not valid JSON")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def as_conversation(row: Any, *, system: str) -> Conversation:
    """Convert one sample. Raises InvalidDataError with its problem."""
    if isinstance(row, InvalidDataError):
        raise row
    if isinstance(row, Mapping) and "instruction" in row:
        turns, level = from_instruction(row), row.get("difficulty")
    elif isinstance(row, Mapping):
        turns, level = from_chat(row.get("messages", row.get("conversations"))), row.get("difficulty")
    else:
        turns, level = from_chat(row), None
    if not any(role == "assistant" and text.strip() for role, text in turns):
        raise InvalidDataError("program.no-reply", "no reply of the assistant, so there is nothing to train on")
    if system and turns[0][0] != "system":
        turns = [("system", system), *turns]
    if level is not None and not isinstance(level, str):
        raise InvalidDataError(
            "program.difficulty-type", "difficulty: expected a string, got {level:quote}", level=level
        )
    return Conversation(tuple(turns), level)


def from_instruction(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    for key in ("instruction", "output"):
        if not isinstance(row.get(key), str):
            raise InvalidDataError("program.key-missing", "{key} is missing or not a string", key=key)
    more = row.get("input") or ""
    question = row["instruction"] + (f"\n{more}" if more else "")
    turns = [("user", question), ("assistant", row["output"])]
    return [("system", row["system"]), *turns] if row.get("system") else turns


def from_chat(messages: Any) -> list[tuple[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidDataError("program.unknown-format", "expected instruction and output, messages, or conversations")
    turns = []
    for number, message in enumerate(messages, start=1):
        fields = message if isinstance(message, Mapping) else {}
        role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
        if role not in ROLES:
            raise InvalidDataError(
                "program.unknown-role",
                "message {number}: unknown role {role:quote}; expected one of {known}",
                number=number,
                role=role,
                known=list(ROLES),
            )
        turns.append((ROLES[role], plain(content, number)))
    return turns


def plain(content: Any, number: int) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        raise InvalidDataError("program.no-text", "message {number} has no text", number=number)
    return content


def digest_of(conversations: Sequence[Conversation]) -> str:
    """Hash the content, in order. Ranks compare it, because training on different data would not be detected."""
    mark = hashlib.sha256()
    for each in conversations:
        mark.update(json.dumps([each.turns, each.level], ensure_ascii=False).encode())
    return mark.hexdigest()


# --- synthetic data ---


def make_conversations(count: int, *, seed: int, system: str) -> list[Conversation]:
    """Make synthetic conversations with verifiable answers: two fifths for each of the easier levels, one fifth for
    the hardest."""
    chance = random.Random(seed)
    makers = {"explain": make_fact, "reasoning": make_sum, "topology": make_path}
    found = []
    for i in range(count):
        level = SYNTHETIC_LEVELS[(0, 1, 0, 1, 2)[i % 5]]
        question, answer = makers[level](chance)
        turns = (("user", question), ("assistant", answer))
        found.append(Conversation((("system", system), *turns) if system else turns, level))
    return found


def make_fact(chance: random.Random) -> tuple[str, str]:
    at = chance.randrange(25)
    return f"Which letter comes after {chr(65 + at)}?", chr(66 + at)


def make_sum(chance: random.Random) -> tuple[str, str]:
    first, second, third = (chance.randrange(1, 10) for _ in range(3))
    half = first + second
    return (
        f"A {chance.choice(NAMES)} has {first} cables, gets {second} and then {third} more. How many are there?",
        f"{first} + {second} = {half}\n{half} + {third} = {half + third}\nThe answer is {half + third}.",
    )


def make_path(chance: random.Random) -> tuple[str, str]:
    """Make a path along a chain of links, which are given in any order."""
    nodes = chance.sample("ABCDEFGH", chance.randrange(4, 7))
    links = [f"{one}-{other}" for one, other in zip(nodes, nodes[1:])]
    shown = chance.sample(links, len(links))
    return (
        f"Links: {', '.join(shown)}. Give the path from {nodes[0]} to {nodes[-1]}.",
        f"{' > '.join(nodes)}\nThat is {len(links)} links.",
    )
