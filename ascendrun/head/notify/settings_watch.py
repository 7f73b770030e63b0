"""The settings of notices as the files have them now, read beside the loop: a home that hangs stops no controller."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.logs.redaction import redact_text

if TYPE_CHECKING:
    from ascendrun.core.notice_settings import NoticeSettings

LOOK_S = 2.0
"""How often the files are looked at."""
PATIENCE_S = 0.3
"""Who begins a look waits so long for it: files on a disk that lives are read by then."""
FIRST_PATIENCE_S = 10.0
"""For the first one: before it nobody knows who is to be told."""

ReadSettings = Callable[[], "NoticeSettings | None"]


class SettingsWatch:
    """`read` may raise InvalidInputError: what was valid before stays then. `files`: read again when one has
    changed; none:
    at every look. Use from any thread."""

    def __init__(self, read: ReadSettings, files: Sequence[Path], *, log: Callable[[str], None]) -> None:
        self._read, self._files, self._log = read, tuple(files), log
        self._lock = threading.Lock()
        self._settings: NoticeSettings | None = None
        self._seen: tuple[object, ...] = ()
        self._is_looking = self._has_looked = False
        self._due_mono = float("-inf")

    def get(self) -> NoticeSettings | None:
        """None: nobody is to be told of anything. While the files do not answer: as they were."""
        with self._lock:
            is_due = not self._is_looking and time.monotonic() >= self._due_mono
            self._is_looking = self._is_looking or is_due
        if is_due:
            done = threading.Event()
            threading.Thread(target=self._look, args=(done,), name="notice-settings", daemon=True).start()
            done.wait(PATIENCE_S if self._has_looked else FIRST_PATIENCE_S)
            self._has_looked = True
        return self._settings

    def _look(self, done: threading.Event) -> None:
        try:
            seen = tuple(_stamp(file) for file in self._files) or (object(),)
            if seen != self._seen:
                self._settings = self._reread()
                self._seen = seen
        except Exception:  # a fault of ours: what was known stays, and the next look may go better
            self._log(redact_text(traceback.format_exc()))
        finally:
            with self._lock:
                self._is_looking = False
                self._due_mono = time.monotonic() + LOOK_S
            done.set()

    def _reread(self) -> NoticeSettings | None:
        try:
            settings = self._read()
        except AscendrunError as error:
            problems = getattr(error, "problems", None) or [error.message]
            self._log("notices: the settings stay as they were: " + "; ".join(str(problem) for problem in problems))
            return self._settings
        return settings if settings is not None and settings.everyone else None


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
