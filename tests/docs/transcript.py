"""Transcripts in documents: commands after `$ `, below each what it prints.

`...` stands for anything left out, a number for any number (losses differ from machine to machine), a duration for any
duration, a run of blanks for any run of blanks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Callable

NUMBER = r"\d[\d.,]*(?:e[+-]?\d+)?"
DURATION = r"(?:\d+[dhm])*\d+(?:\.\d+)?s"
"""26s on one machine is 1m07s on a slower one."""


def read_transcript(markdown: str) -> list[tuple[str, list[str]]]:
    """The commands of the first fenced `console` block, each with the lines expected of it."""
    block = re.search(r"^```console\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)
    steps: list[tuple[str, list[str]]] = []
    for line in block.group(1).splitlines() if block else ():
        if line.startswith("$ "):
            steps.append((line[2:], []))
        else:
            steps[-1][1].append(line)
    return steps


def read_block(markdown: str) -> list[str]:
    """The lines of the first fenced `text` block."""
    block = re.search(r"^```text\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)
    return block.group(1).splitlines() if block else []


def find_mismatch(expected: Sequence[str], output: Sequence[str]) -> str | None:
    """The first expected line that did not come, in words; None when all came, in order. A line `...` is any lines,
    `...` within a line is any text."""
    at = 0
    may_skip = False
    last = "the start"
    for wanted in expected:
        if wanted.strip() == "...":
            may_skip = True
            continue
        found = next((n for n in range(at, len(output)) if _is_like(wanted, output[n])), None)
        if found is None or (found > at and not may_skip):
            there = "nothing more" if may_skip or at == len(output) else repr(output[at])
            return f"{wanted!r} did not come; there was {there}"
        at, may_skip, last = found + 1, False, repr(wanted)
    if at < len(output) and not may_skip:
        return f"after {last} there is more: {output[at]!r}"
    return None


def _is_like(wanted: str, line: str) -> bool:
    pattern = ".*".join(_pattern(piece) for piece in wanted.split("..."))
    return re.fullmatch(pattern, line.rstrip()) is not None


def _pattern(text: str) -> str:
    """The text as a regular expression, its numbers and blanks made loose."""
    pieces = re.split(rf"(\b{DURATION}\b|{NUMBER}|\s+)", text)
    loose: dict[int, Callable[[str], str]] = {0: re.escape, 1: _loose}
    return "".join(loose[n % 2](piece) for n, piece in enumerate(pieces))


def _loose(piece: str) -> str:
    if piece.isspace():
        return r"\s+"
    return DURATION if re.fullmatch(DURATION, piece) else NUMBER
