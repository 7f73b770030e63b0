"""Places of a node's files below a directory of this machine: whatever a node sends, they are below it."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ESCAPED = re.compile(r"[\\\x00-\x1f\x7f-\x9f]")


def target_of(into: Path, path: str) -> Path:
    """Return the place of a file. Raises ValueError."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        raise ValueError(path)
    return into.joinpath(*map(_printable, parts))


def link_text(into: Path, place: Path, text: str) -> str:
    """Return the text of a link at a place. Raises ValueError."""
    folder = place.parent.relative_to(into)
    found = os.path.normpath(os.path.join(folder, *map(_printable, text.split("/"))))
    if not text or text.startswith("/") or found.split("/")[0] in (".", ".."):
        raise ValueError(text)
    return os.path.relpath(found, folder)


def clear_way(into: Path, target: Path) -> None:
    """Remove links of an earlier transfer where a directory is now: nothing is written through them. Raises OSError."""
    for level in reversed(target.parents):
        if into in level.parents and level.is_symlink() and into.resolve() in level.resolve().parents:
            level.unlink()


def _printable(name: str) -> str:
    """Return a file name with its control characters as `\\x1b`, harmless in a terminal; each backslash is doubled."""
    return _ESCAPED.sub(lambda found: "\\\\" if found[0] == "\\" else f"\\x{ord(found[0]):02x}", name)
