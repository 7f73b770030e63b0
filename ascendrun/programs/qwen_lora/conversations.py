"""Instructions and chats from JSON and JSON lines, in the common layouts, as conversations."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from ascendrun.facts.rows import Conversation, Rows, UnusableRowError, parse_rows, read_conversation
from ascendrun.planner.rules import row_problem
from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text

SYNTHETIC_LEVELS = ("explain", "reasoning", "topology")
NAMES = ("node", "switch", "router", "host", "rack", "port")


def read_conversations(path: Path, *, system: str) -> list[Conversation]:
    """Read conversations. `system`: system message of samples that lack it, "" for none. Raises InvalidDataError with
    the first problems."""
    check_file(path)
    found: list[Conversation] = []
    rows = read_rows(path)
    problems = {fault.place: row_problem(fault.code) for fault in rows.faults}
    for number, row in rows.rows:
        try:
            found.append(read_conversation(row, system=system))
        except UnusableRowError as error:
            problems[number] = row_problem(error.code, error.value, error.number)
    if problems:
        raise InvalidDataError.of(
            [
                Text(
                    "program.at",
                    "{path}: {place}: {error}",
                    path=path,
                    place=Text("program.line", "line {number}", number=number)
                    if rows.are_lines
                    else Text("program.row", "row {number}", number=number),
                    error=problems[number],
                )
                for number in sorted(problems)
            ]
        )
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


def read_rows(path: Path) -> Rows:
    """Return the rows of a file and the faults of its lines. Raises InvalidDataError if it has no rows at all."""
    try:
        rows = parse_rows(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidDataError(
            "program.not-utf8",
            "{path}: not valid UTF-8 at byte {position:,}\nhint: convert the file: iconv -f ENCODING -t UTF-8",
            path=path,
            position=error.start,
        ) from error
    for fault in rows.faults:
        if fault.code == "too-deep":
            raise InvalidDataError(
                "program.too-deep", "{path}: JSON is nested too deeply for a list of samples", path=path
            )
        if fault.code == "not-json":
            raise InvalidDataError("program.not-json", "{path}: not valid JSON: {error}", path=path, error=fault.value)
        if fault.code == "not-a-list":
            raise InvalidDataError(
                "program.not-a-list", "{path}: expected a list of samples, got {found}", path=path, found=fault.value
            )
    return rows


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
