"""Answers of several commands in one text, apart again; the marks are those of npu_scripts.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

KILLED = 137
"""`timeout -s KILL` ended it."""

_END = "\n@@= "


class Section(NamedTuple):
    """What one command said. `words`: its label; `code` None: it never ended."""

    words: tuple[str, ...]
    text: str
    code: int | None

    @property
    def hung(self) -> bool:
        return self.code is None or self.code == KILLED


def read_sections(text: str) -> tuple[Section, ...]:
    """In the order asked; what stands before the first mark is nobody's."""
    return tuple(_sections(text))


def _sections(text: str) -> Iterator[Section]:
    pieces = ("\n" + text).split("\n@@ ")[1:]
    for place, piece in enumerate(pieces, start=1):
        label, _, body = (piece + "\n" if place < len(pieces) else piece).partition("\n")
        said, _, code = ("\n" + body.rstrip("\n")).rpartition(_END)
        has_ended = code.isascii() and code.isdigit() and len(code) <= 3
        yield Section(tuple(label.split(" ", 1)), said[1:] if has_ended else body, int(code) if has_ended else None)
