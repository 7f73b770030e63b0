"""Transfer of a run's files from one node to a directory: in blocks, resumable, verified by hash.

A file is incomplete as `.ascendrun-part-…` next to its place, under a name that its path, size and time decide; so a
later transfer continues it only if the file on the node is the same.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Protocol

from ascendrun.core.dataclass import dataclass
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.messages import R, Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.node.agent.outputs import BLOCK_BYTES
from ascendrun.node.files import sync_dir, write_all
from ascendrun.text import Text

LIST_S = 120.0
BLOCK_S = 60.0
HASH_BYTES_PER_S = 20 << 20
"""Slowest disk for which a hash is awaited."""
TRIES = 3
LOST = ("connection-lost", "deadline")
"""Errors after which the same transfer may succeed later."""
PART = ".ascendrun-part-"


class TransferError(Exception):
    """Why a transfer ended early."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.message))
        self.failure = failure

    @property
    def is_lost(self) -> bool:
        """Return whether only the connection failed."""
        return self.failure.code in LOST


class Ask(Protocol):
    """Sends a request to the node and waits for its reply, which may be an error."""

    def __call__(self, request: Request[R], *, deadline_s: float, body: bytes = b"") -> Reply[R]: ...


@dataclass(frozen=True)
class Progress:
    """What has arrived. `missing`: patterns without a file."""

    files: int = 0
    total_files: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    path: str
    size: int
    mtime_ns: int
    target: Path

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{_part_prefix(self.path)}{_short(f'{self.size} {self.mtime_ns}')}")

    @property
    def is_here(self) -> bool:
        """Return whether it was fetched and verified: only then the target gets the time of the file."""
        try:
            facts = os.lstat(self.target)
        except OSError:
            return False
        return (facts.st_size, facts.st_mtime_ns) == (self.size, self.mtime_ns)

    @property
    def missing_bytes(self) -> int:
        if self.is_here:
            return 0
        try:
            return max(0, self.size - os.lstat(self.part).st_size)
        except OSError:
            return self.size


def transfer(
    ask: Ask,
    run: str | None,
    patterns: Sequence[str],
    into: Path,
    *,
    strip: str = "",
    admit: Callable[[int, int], None] = lambda total, missing: None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Fetch the files of a run that match into a directory. Raises TransferError; another call continues.

    `strip`: start of the paths that is omitted in the directory.
    `admit(total bytes, bytes that are not here)` raises TransferError if that is too much.
    """
    listing = _message(ask(agent.Outputs(run, tuple(patterns)), deadline_s=LIST_S))
    files = [
        _File(path, size, mtime_ns, _target(into, path[len(strip) :] if path.startswith(strip) else path))
        for path, size, mtime_ns in listing.files
    ]
    total = sum(file.size for file in files)
    progress = Progress(0, len(files), 0, total, listing.missing)
    try:
        admit(total, sum(file.missing_bytes for file in files))
        report(progress)
        for file in files:
            if not file.is_here:
                _fetch(ask, run, file, partial(_report_more, report, progress))
            progress = replace(progress, files=progress.files + 1, done_bytes=progress.done_bytes + file.size)
            report(progress)
    except OSError as error:
        raise TransferError(_not_written(error, into)) from error
    return progress


def _report_more(report: Callable[[Progress], None], before: Progress, done_bytes: int) -> None:
    report(replace(before, done_bytes=before.done_bytes + done_bytes))


def _fetch(ask: Ask, run: str | None, file: _File, arrived: Callable[[int], None]) -> None:
    """Fetch one file; if it changes meanwhile, as it is then. Raises TransferError, OSError."""
    make_folder(file.target.parent)
    for _ in range(TRIES):
        _drop_other_parts(file)
        now, sha256 = _fetch_blocks(ask, run, file, arrived)
        if now == file:
            seconds = BLOCK_S + file.size / HASH_BYTES_PER_S
            if _message(ask(agent.HashOutput(run, file.path), deadline_s=seconds)).sha256 == sha256:
                os.utime(file.part, ns=(file.mtime_ns, file.mtime_ns))
                os.replace(file.part, file.target)
                sync_dir(str(file.target.parent))
                return
            file.part.unlink()
        file = now
    what = Text("outputs.changing", "{path} changes while it is fetched", path=file.path)
    raise TransferError(Failure("output-changed", what, Text("outputs.again", "fetch it when the program has ended")))


def _fetch_blocks(ask: Ask, run: str | None, file: _File, arrived: Callable[[int], None]) -> tuple[_File, str]:
    """Complete the part; return the file as the node has it now, and the hash of the part."""
    digest = hashlib.sha256()
    fd = os.open(file.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        whole = min(os.fstat(fd).st_size, file.size) // BLOCK_BYTES * BLOCK_BYTES
        while at < whole:
            block = os.pread(fd, BLOCK_BYTES, at)
            digest.update(block)
            at += len(block)
        os.ftruncate(fd, at)
        os.lseek(fd, at, os.SEEK_SET)
        while at < file.size:
            reply = ask(agent.ReadOutput(run, file.path, at), deadline_s=BLOCK_S)
            facts = _message(reply)
            if (facts.size_bytes, facts.mtime_ns) != (file.size, file.mtime_ns) or not reply.body:
                return replace(file, size=facts.size_bytes, mtime_ns=facts.mtime_ns), ""
            write_all(fd, reply.body)
            digest.update(reply.body)
            at += len(reply.body)
            arrived(at)
        os.fsync(fd)
    finally:
        os.close(fd)
    return file, digest.hexdigest()


def make_folder(folder: Path) -> None:
    """Make a directory and its parents, private. Raises OSError."""
    for level in (*reversed(folder.parents), folder):
        if not level.is_dir():
            level.mkdir(mode=0o700, exist_ok=True)


def _message(reply: Reply[Any]) -> Any:
    if reply.error is not None:
        raise TransferError(reply.error)
    return reply.message


def _target(into: Path, path: str) -> Path:
    """Return the place of a file below a directory, whatever a node sends."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        reason = Text("outputs.invalid-path", "invalid path {path:quote}", path=path)
        raise TransferError(Failure("invalid-reply", reason))
    return into.joinpath(*parts)


def _drop_other_parts(file: _File) -> None:
    """Remove parts of earlier contents of the same file."""
    for other in file.target.parent.glob(f"{_part_prefix(file.path)}*"):
        if other != file.part:
            other.unlink(missing_ok=True)


def _part_prefix(path: str) -> str:
    return f"{PART}{_short(path)}-"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _not_written(error: OSError, into: Path) -> Failure:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(into)
    path = error.filename or str(into)
    return Failure("io-error", Text("outputs.io-error", "{path}: {error}", path=path, error=error.strerror))


def disk_full(into: Path) -> Failure:
    """Return the failure for a full disk of this machine."""
    what = Text("outputs.disk-full", "not enough disk space for {path} on the head node", path=str(into))
    hint = Text("outputs.disk-full.hint", "free disk space, or fetch to another directory: ascendrun fetch JOB -O DIR")
    return Failure("disk-full", what, hint)
