"""Answers of several commands in one text, apart again; the marks are those of npu_scripts.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterator, Optional, Tuple

KILLED = 137
"""`timeout -s KILL` ended it."""

_END = re.compile(r"\n@@= ([0-9]{1,3})\Z")


@dataclass(frozen=True)
class Section:
    """What one command said. `words`: its label; `code` None: it never ended."""

    words: Tuple[str, ...]
    text: str
    code: Optional[int]

    @property
    def hung(self) -> bool:
        return self.code is None or self.code == KILLED


def read_sections(text: str) -> Tuple[Section, ...]:
    """In the order asked; what stands before the first mark is nobody's."""
    return tuple(_sections(text))


def _sections(text: str) -> Iterator[Section]:
    for piece in re.split(r"(?m)^@@ ", text)[1:]:
        label, _, body = piece.partition("\n")
        found = _END.search(body.rstrip("\n")) or _END.search("\n" + body.rstrip("\n"))
        said = body if found is None else body.rstrip("\n")[:-len(found[0])]
        yield Section(tuple(label.split(" ", 1)), said, None if found is None else int(found[1]))
