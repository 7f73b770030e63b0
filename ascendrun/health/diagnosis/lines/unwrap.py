"""Lines as they were before a logger put them into one line of JSON or Python's repr, or a terminal coloured them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ascendrun.health.diagnosis.evidence import Line

_HEAD = "Traceback (most recent call last):"
_FOLDED = re.compile(r"Traceback \(most recent call last\):(?:\\r)?\\n")
_JSON_END = re.compile(r'(?<!\\)(?:\\\\)*"')
_REPR_END = re.compile(r"(?:\\n)*['\"]?[\])},\s]*$")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "", '\\"': '"', "\\'": "'", "\\\\": "\\", "\\/": "/"}
_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}|\\.")

_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")


def without_colours(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(line._replace(text=_COLOUR.sub("", line.text)) if "\x1b" in line.text else line for line in lines)


def unfold(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Every piece keeps the place and the time of its line."""
    if not any(_HEAD in line.text and _FOLDED.search(line.text) for line in lines):
        return tuple(lines)
    found: list[Line] = []
    for line in lines:
        folded = _FOLDED.search(line.text) if _HEAD in line.text else None
        if folded is None:
            found.append(line)
            continue
        before, inside = line.text[: folded.start()], line.text[folded.start() :]
        found.append(line._replace(text=before))
        found.extend(line._replace(text=piece) for piece in _plain(inside).split("\n") if piece.strip())
    return tuple(found)


def _plain(text: str) -> str:
    """What was written, up to the end of the string that holds it."""
    is_json = '\\"' in text or 'File "' not in text
    end = (_JSON_END if is_json else _REPR_END).search(text)
    whole = text if end is None else text[: end.end() - 1 if is_json else end.start()]
    return _ESCAPE.sub(lambda found: _unescaped(found.group()), whole)


def _unescaped(escape: str) -> str:
    return chr(int(escape[2:], 16)) if escape[1] == "u" and len(escape) == 6 else _ESCAPES.get(escape, escape)
