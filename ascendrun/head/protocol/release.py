"""Release of the package on disk: changes when a file changes, so that a controller notices that it was replaced."""

from __future__ import annotations

import importlib
import os
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
PARTS = ("ascend", "backends", "core", "head", "health", "node", "text")
"""Packages that the controller runs, or sends to nodes."""
PRELOADED = (
    "backends",
    "core",
    "head",
    "health/checks",
    "health/deep",
    "health/samples",
    "health/stragglers",
    "health/survey",
)
"""Packages whose modules the controller may import after its start."""
PRELOAD_PAUSE_S = 0.05


def release_on_disk(parts: Sequence[str] = PARTS) -> str:
    """Return 8 hex digits of the names, sizes and times of the package's files. Each command does this: 2 ms."""
    lines, folders = [], [str(PACKAGE / part) for part in parts]
    for folder in folders:
        for entry in _entries(folder):
            with suppress(FileNotFoundError):  # replaced at this moment
                if entry.is_file():
                    lines.append(f"{entry.path} {entry.stat().st_size} {entry.stat().st_mtime_ns}\n")
                elif entry.name != "__pycache__":
                    folders.append(entry.path)
    return f"{zlib.crc32(''.join(lines).encode()):08x}"  # hashlib would take 3 ms to import


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


@cache
def own_release() -> str:
    """Return the release at the first call: early in a process, that of the code that it runs."""
    return release_on_disk()


def import_everything(after_s: float, has_ended: threading.Event) -> None:
    """Import all modules that the controller may need, slowly: later its files may be of another release.

    The first after `after_s`. Returns soon after `has_ended` is set: no process ends before its threads.
    """
    has_ended.wait(after_s)
    for part in PRELOADED:
        for path in sorted((PACKAGE / part).rglob("*.py")):
            if has_ended.is_set():
                return
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            has_ended.wait(PRELOAD_PAUSE_S)
