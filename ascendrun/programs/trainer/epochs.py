"""Epochs of a checkpoint directory: a replaced attempt changes nothing that its successor saves (docs/epochs.md).

Each start of a training claims the next number in `.epochs/` of the directory; all names that it writes carry it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.programs.errors import ProgramError

DIRECTORY = ".epochs"
FILE = re.compile(r"^(\d{6,})\.json$")

Starts = Mapping[int, "int | None"]
"""By epoch: the step that it resumed from, 0: from the beginning; None: it has saved nothing."""


class SupersededError(ProgramError):
    """A later attempt of this training writes to the checkpoint directory: this one must save and remove nothing."""

    exit_code = 75

    def __init__(self, parent: Path) -> None:
        super().__init__(
            "program.superseded",
            "superseded: a later attempt of this training writes to {directory}; this attempt ends",
            directory=parent,
        )


@dataclass(frozen=True)
class Claim:
    """An epoch of one directory. `token`: drawn by this start; `tag`: of the attempt, NAME.NUMBER, "" without one."""

    parent: Path
    number: int
    token: str
    tag: str = ""

    def take(self) -> bool:
        """Claim the number; False: it is taken. Raises OSError."""
        directory = self.parent / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            with open(file_of(self.parent, self.number), "x", encoding="utf-8") as file:
                self._write(file, from_step=None, from_save="")
            sync(directory)
            return True
        return False

    def begin(self, from_step: int, from_save: str) -> None:
        """Declare what this epoch resumed from, before its first checkpoint gets its name. Raises OSError."""
        path = file_of(self.parent, self.number)
        fresh = path.with_name(f".{path.name}.{self.token}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(fresh, "w", encoding="utf-8") as file:
                self._write(file, from_step=from_step, from_save=from_save)
            os.replace(fresh, path)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        sync(path.parent)

    def check(self) -> None:
        """Raise SupersededError if another start claimed this number, or a higher one."""
        own = read_file(file_of(self.parent, self.number)).get("token", self.token)
        if max(starts(self.parent), default=0) > self.number or own != self.token:
            raise SupersededError(self.parent)

    def is_late(self) -> bool:
        """Return whether a later attempt of the same run claimed an epoch here."""
        run, _, attempt = self.tag.rpartition(".")
        for number in starts(self.parent) if run and attempt.isdigit() else ():
            theirs, _, later = str(read_file(file_of(self.parent, number)).get("tag", "")).rpartition(".")
            if theirs == run and later.isdigit() and int(later) > int(attempt):
                return True
        return False

    def _write(self, file: Any, **values: Any) -> None:
        json.dump({"tag": self.tag, "token": self.token, **values}, file)
        file.flush()
        os.fsync(file.fileno())


def file_of(parent: Path, number: int) -> Path:
    return parent / DIRECTORY / f"{number:06d}.json"


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of an epoch's file; {}: it cannot be read, or its writer was interrupted."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def starts(parent: Path) -> dict[int, int | None]:
    """Return all epochs of a directory, and where each started."""
    try:
        names = os.listdir(parent / DIRECTORY)
    except OSError:
        return {}
    numbers = [int(match[1]) for match in map(FILE.match, names) if match]
    found = {number: read_file(file_of(parent, number)).get("from_step") for number in numbers}
    return {number: step if isinstance(step, int) else None for number, step in found.items()}


def is_on_line(epoch: int, step: int, starts: Starts) -> bool:
    """Return whether what an epoch saved at a step led to what later epochs saved."""
    return all(start is None or step <= start for number, start in starts.items() if number > epoch)


def sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
