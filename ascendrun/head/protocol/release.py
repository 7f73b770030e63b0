"""Release of the package on disk: changes when a file changes, so that a controller notices that it was replaced."""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
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


def release_on_disk() -> str:
    """Return 12 hex digits of the names, sizes and times of the package's files. Takes about 4 ms."""
    digest = hashlib.sha256()
    for part in PARTS:
        for folder, folders, files in os.walk(PACKAGE / part):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                try:
                    found = os.stat(os.path.join(folder, name))
                except FileNotFoundError:  # replaced at this moment
                    continue
                digest.update(f"{folder}/{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


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
