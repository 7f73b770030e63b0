"""Settings that are read again when their files change."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Callable, Generic, TypeVar

from ascendrun.core.errors import AscendrunError
from ascendrun.head.waiting import in_background

LOOK_S = 2.0
"""Interval at which the settings files are checked for changes."""
STALE_S = 10.0
"""Age of the last check from which a caller waits for the next one: the settings that it has may be hours old."""
PATIENCE_S = 0.3
"""Seconds that such a caller waits: files on a working disk are read by then."""
FIRST_PATIENCE_S = 10.0
"""The same for the first check: nothing is known before it."""

S = TypeVar("S")


def redacted_traceback() -> str:
    from ascendrun.core.logs.redaction import redact_text  # its patterns take 5 ms of a controller's start

    return redact_text(traceback.format_exc())


class SettingsWatch(Generic[S]):
    """Watcher of settings. `read` may raise InvalidInputError: the last valid settings remain. `files`: read again if
    one has changed; no files: at every check. Use from any thread."""

    def __init__(self, read: Callable[[], S | None], files: Sequence[Path], *, log: Callable[[str], None]) -> None:
        self._read, self._files, self._log = read, tuple(files), log
        self._lock = threading.Lock()
        self._settings: S | None = None
        self._seen: tuple[object, ...] = ()
        self._is_looking = self._has_looked = False
        self._looked_mono = float("-inf")

    def get(self) -> S | None:
        """Return the settings, None: there are none. While the files are checked, or cannot be read: the last
        settings."""
        with self._lock:
            age_s = time.monotonic() - self._looked_mono
            is_due = not self._is_looking and age_s >= LOOK_S
            self._is_looking = self._is_looking or is_due
        if is_due:
            done = threading.Event()
            in_background(partial(self._refresh_settings, done), "settings")
            if age_s >= STALE_S:
                done.wait(PATIENCE_S if self._has_looked else FIRST_PATIENCE_S)
            self._has_looked = True
        return self._settings

    def _refresh_settings(self, done: threading.Event) -> None:
        try:
            seen = tuple(_stamp(file) for file in self._files) or (object(),)
            if seen != self._seen:
                self._settings = self._reread()
                self._seen = seen
        except Exception:  # an internal error: the last settings remain, and the next check may succeed
            self._log(redacted_traceback())
        finally:
            with self._lock:
                self._is_looking = False
                self._looked_mono = time.monotonic()
            done.set()

    def _reread(self) -> S | None:
        try:
            return self._read()
        except AscendrunError as error:
            problems = getattr(error, "problems", None) or [error.message]
            self._log("the settings stay as they were: " + "; ".join(str(problem) for problem in problems))
            return self._settings


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
