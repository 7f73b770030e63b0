"""head.json: the id of this head and the numbers of its jobs, apart from state.db, so that no id is given twice."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, replace
from pathlib import Path

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.head.state.job_files import folders_of_jobs
from ascendrun.node.files import read_json, write_json

HEAD_FILE = "head.json"
BLOCK = 100
"""Numbers that are reserved with one write."""
_HEAD_ID = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class HeadFile:
    """`head_id`: eight hex digits. `next_number`: every number below it may have been given to a job. `session`: the
    lease of the last controller; a state.db with another lease is not the one that it wrote. `schema`: the version of
    state.db. `closed`: the stamp of state.db when that controller ended; None: it did not end in order."""

    head_id: str
    next_number: int
    session: str = ""
    schema: int = 0
    closed: list[int] | None = None

    @classmethod
    def load(cls, state_dir: Path) -> HeadFile | None:
        """Return the file's content; None: missing or damaged."""
        try:
            found = load_dataclass(cls, read_json(str(state_dir / HEAD_FILE)) or {})
        except (TypeError, OSError):
            return None
        is_valid = isinstance(found.head_id, str) and _HEAD_ID.fullmatch(found.head_id)
        return found if is_valid and type(found.next_number) is int and found.next_number > 0 else None

    def write(self, state_dir: Path) -> None:
        """Replace the file; on return it is on disk. Raises OSError."""
        write_json(str(state_dir / HEAD_FILE), asdict(self))


class JobNumbers:
    """Numbers for new jobs; each is covered by a reservation on disk before it is given."""

    def __init__(self, state_dir: Path, head: HeadFile, *, next_number: int) -> None:
        self._state_dir, self._head, self._next = state_dir, head, next_number

    @property
    def head_id(self) -> str:
        return self._head.head_id

    def close(self, stamp: list[int]) -> None:
        """Record that state.db was closed in order. Raises OSError."""
        replace(self._head, closed=stamp).write(self._state_dir)

    def take(self) -> int:
        """Return the next number; it is never returned again, whatever the caller does with it. Raises OSError."""
        if self._next >= self._head.next_number:
            reserved = replace(self._head, next_number=self._next + BLOCK)
            reserved.write(self._state_dir)
            self._head = reserved
        number, self._next = self._next, self._next + 1
        return number


def stamp_of(path: Path) -> list[int]:
    """Return what changes whenever a database file or its log is written or replaced; [] for a missing file."""
    stamp: list[int] = []
    for name in (path.name, f"{path.name}-wal"):
        try:
            found = os.stat(path.with_name(name))
        except OSError:
            continue
        stamp += [found.st_ino, found.st_size, found.st_mtime_ns] if found.st_size else []
    return stamp


def folder_numbers(state_dir: Path) -> list[int]:
    """Return the numbers of jobs and pipelines with a directory in the state directory."""
    return [int(name.split("-")[1]) for name in folders_of_jobs(state_dir)]
