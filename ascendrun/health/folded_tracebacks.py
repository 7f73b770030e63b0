"""A traceback inside of one line, as loggers of JSON and representations of strings have it.

pieces_of('{"exc": "Traceback (most recent call last):\\\\n  File ..."}')    ['{"exc": "', 'Traceback (most ...', ...]
"""

from __future__ import annotations

import re

TRACEBACK_HEAD = "Traceback (most recent call last)"
_FOLDED = re.compile(r"Traceback \(most recent call last\):(?:\\r)?\\n")
_JSON_END = re.compile(r'(?<!\\)(?:\\\\)*"')
_REPR_END = re.compile(r"(?:\\n)*['\"]?[\])},\s]*$")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "", '\\"': '"', "\\'": "'", "\\\\": "\\", "\\/": "/"}
_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}|\\.")


def pieces_of(text: str) -> tuple[str, ...]:
    """Return the lines that a line contains: itself, or what is before a traceback and the lines of that."""
    folded = _FOLDED.search(text) if TRACEBACK_HEAD in text else None
    if folded is None:
        return (text,)
    inside = _plain(text[folded.start() :]).split("\n")
    return (text[: folded.start()], *(piece for piece in inside if piece.strip()))


def _plain(text: str) -> str:
    """Return the original text, up to the end of the string that contains it."""
    is_json = '\\"' in text or 'File "' not in text
    end = (_JSON_END if is_json else _REPR_END).search(text)
    whole = text if end is None else text[: end.end() - 1 if is_json else end.start()]
    return _ESCAPE.sub(
        lambda found: chr(int(found[0][2:], 16)) if len(found[0]) == 6 else _ESCAPES.get(found[0], found[0]), whole
    )
