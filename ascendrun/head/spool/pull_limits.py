"""Pause of the copying of a job's files: it occupies its share of this machine's disk, or the disk is nearly full."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from ascendrun.core.retention import Retention

LOOK_S = 15.0
SMALL_DISK = 20
"""No more than this part of the disk is kept free, one twentieth."""
PAUSED_KINDS = ("out", "err", "times", "metrics", "error", "samples")
"""All kinds of followed files but events, which tell how the job ends."""


class Pause(str, Enum):
    """JOB: the job's files reached its limit; what is not here stays on the nodes. DISK: until there is space."""

    JOB = "job-limit"
    DISK = "disk-space"


class PullLimits:
    """The limits of one job, whose files are in `folder`."""

    def __init__(self, folder: Path, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self._due_mono = 0.0
        self.pause: Pause | None = None

    def look(self) -> bool:
        """Look at the disk when it is time; return whether the pause changed. A limit of the job stays."""
        if time.monotonic() < self._due_mono or self.pause is Pause.JOB:
            return False
        self._due_mono = time.monotonic() + LOOK_S
        before = self.pause
        if allocated_bytes(self._folder) >= self._retention.pull_job_bytes:
            self.pause = Pause.JOB
        else:
            least = self._retention.min_free_bytes
            self.pause = Pause.DISK if free_bytes_beyond(self._folder, least, times=2 if before else 1) < 0 else None
        return self.pause is not before

    def of_files(self) -> Mapping[str, int]:
        """Return the limits that nodes must keep, by kind of file."""
        limits = dict(self._retention.file_limits())
        return limits if self.pause is None else {**limits, **dict.fromkeys(PAUSED_KINDS, 0)}

    def expected(self, sizes: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
        """Return the sizes of a node's files without those that stay on the node for good."""
        return {file: of for file, of in sizes.items() if file == "events"} if self.pause is Pause.JOB else sizes


def allocated_bytes(folder: Path) -> int:
    """Return the bytes that a directory's files occupy; a file that goes away meanwhile counts as none."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
            except OSError:
                continue
    return total


def free_bytes_beyond(folder: Path, least: int, *, times: int = 1) -> int:
    """Return the bytes that may be written to a directory, which may not exist yet, while `least` stay free.

    Negative: less is free. Of a small disk a part is kept free, `times` that.
    """
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    least = min(least, found.f_blocks * found.f_frsize // SMALL_DISK)
    return found.f_bavail * found.f_frsize - least * times
