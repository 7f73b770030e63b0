"""The files from which a store is rebuilt, as a standby copies them: listed by group, read, and written.

A group is the directory of a job, or a single file. Logs, samples, plans and outputs are not copied.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ascendrun.head.ssh.host_keys import OWN_FILE
from ascendrun.head.state.job_files import COPY_FILE, JOB_ID, RECORD_FILE, folders_of_jobs
from ascendrun.head.state.state_dir import SPOOL_COMPLETE
from ascendrun.head.state.store import MACHINES_FOLDER
from ascendrun.head.state.store_file import HEAD_FILE
from ascendrun.node.files import make_private_dir, replace_file, sync_dir, write_all

SINGLE = (HEAD_FILE, OWN_FILE)
OF_JOB = (COPY_FILE, RECORD_FILE)
_COPIED = re.compile(
    rf"{'|'.join(map(re.escape, SINGLE))}|{MACHINES_FOLDER}/[^/]+|trees/[0-9a-f]{{64}}\.tar"
    rf"|jobs/{JOB_ID.pattern}/(?:{'|'.join(map(re.escape, OF_JOB))}|attempt-[0-9]+/{SPOOL_COMPLETE})"
)
PART_BYTES = 1 << 20
"""Most bytes of a part of a file: records wait for no more than some of them."""


def list_groups(root: Path) -> dict[str, str]:
    """Return a hash of names and contents by group; trees are listed by `list_trees`. Raises OSError."""
    machines = [f"{MACHINES_FOLDER}/{path.name}" for path in (root / MACHINES_FOLDER).glob("*")]
    found = {}
    for group in (*SINGLE, *machines, *(f"jobs/{name}" for name in folders_of_jobs(root))):
        digest = hashlib.sha256()
        for name in files_of(root, group):
            with suppress(FileNotFoundError):
                digest.update(b"%s\0%s" % (name.encode(), hashlib.sha256((root / name).read_bytes()).digest()))
                found[group] = digest.hexdigest()[:16]
    return found


def files_of(root: Path, group: str) -> list[str]:
    """Return the copied files of a group, in the order in which they are written: job.json first."""
    if not group.startswith("jobs/"):
        return [group] if (root / group).exists() else []
    folder = root / group
    names = [name for name in OF_JOB if (folder / name).exists()]
    complete = sorted(str(path.relative_to(folder)) for path in folder.glob(f"attempt-*/{SPOOL_COMPLETE}"))
    return [f"{group}/{name}" for name in (*names, *complete)]


def list_trees(root: Path) -> list[str]:
    """Return the hashes of the packed directories that are complete."""
    return sorted(path.stem for path in (root / "trees").glob("*.tar"))


def read_parts(root: Path, path: str) -> Iterator[tuple[bytes, bool]]:
    """Yield a file in parts, each with whether more follow. Raises OSError."""
    with open(root / path, "rb") as file:
        part = file.read(PART_BYTES)
        while True:
            following = file.read(PART_BYTES) if len(part) == PART_BYTES else b""
            yield part, bool(following)
            if not following:
                return
            part = following


class CopyWriter:
    """Writes what the head sends; every file is on disk when a call returns. Raises OSError, ValueError: a name that is
    not copied."""

    def __init__(self, root: Path) -> None:
        """Files that an earlier stream has not completed are removed."""
        self.root = root
        for part in root.rglob(".*.part"):
            part.unlink()

    def take(self, files: Sequence[tuple[str, int, bool]], gone: Sequence[str], body: bytes) -> None:
        """Apply one message: files as path, bytes of the body, and whether more of the file follows."""
        at = 0
        for path in gone:
            self.remove(path)
        for path, size, has_more in files:
            self.write(path, body[at : at + size], has_more=has_more)
            at += size

    def write(self, path: str, data: bytes, *, has_more: bool) -> None:
        """Write a file, or append a part of it: it replaces the file when the last has arrived."""
        target, part = self._target(path), self._target(path).with_name(f".{os.path.basename(path)}.part")
        if not has_more and not part.exists():
            replace_file(str(target), data)
            return
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, data)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if not has_more:
            os.replace(part, target)
            sync_dir(str(target.parent))

    def remove(self, path: str) -> None:
        """Remove a file, or a group with all that is in it."""
        if path.startswith("jobs/") and JOB_ID.fullmatch(path[len("jobs/") :]):
            shutil.rmtree(self.root / path, ignore_errors=True)
        else:
            self._target(path).unlink(missing_ok=True)

    def _target(self, path: str) -> Path:
        if not _COPIED.fullmatch(path):
            raise ValueError(f"not copied: {path!r}")
        target = self.root / path
        if not target.parent.is_dir():
            make_private_dir(str(target.parent))
            sync_dir(str(target.parent.parent))
        return target


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the groups to send, and those that only the other side has; head.json is sent last."""
    send = [group for group in mine if mine[group] != theirs.get(group)]
    return sorted(send, key=lambda group: group == HEAD_FILE), sorted(theirs.keys() - mine.keys())


def is_copied(path: str) -> bool:
    """Return whether a standby has a file of this name."""
    return _COPIED.fullmatch(path) is not None
