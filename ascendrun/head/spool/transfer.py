"""Files between this machine and a node: in blocks from an offset, resumable, verified by their hash.

The contract is in node/agent/transfer.py. `fetch_files` fetches those of a run that match patterns, `send_files` sends
files and directories of a command. staging.py sends the directories of a job.

A file from a node is incomplete as `.ascendrun-part-…` next to its place, under a name that its path, size and time
decide; so a later transfer continues it only if the file on the node is the same.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Protocol, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import Outputs, PutFile, PutFileReply, PutTree, ReadOutput
from ascendrun.head.protocol.messages import R, Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.places import clear_way, link_text, target_of
from ascendrun.node.agent.transfer import files_below, is_complete, make_link, sort_entries
from ascendrun.node.files import BLOCK_BYTES, HOLE_BYTES, hash_start, hole_at, sync_dir, write_all
from ascendrun.text import Text

LIST_S = 120.0
BLOCK_S = 60.0
FINISH_BYTES_PER_S = 2 << 20
"""Slowest disk for which the reply about a whole file is awaited: it is written out, or read again, while other hosts
may use the same disk."""
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


Put = Union[PutFile, PutTree]
Steps = Generator[tuple[Put, bytes, float], Reply[PutFileReply], None]
"""Yields (request, body, seconds for its reply), is sent the reply, and raises TransferError or OSError."""


@dataclass(frozen=True)
class Progress:
    """What has arrived. `missing`: patterns without a file. `refused`: links that are not copied."""

    files: int = 0
    total_files: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    missing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


Report = Callable[[Progress], None]
Move = Callable[[Callable[[int], None]], None]
"""Moves a file; calls its argument with the bytes of it that have arrived."""


def _move_all(moves: Sequence[tuple[int, Move]], progress: Progress, report: Report) -> Progress:
    """Move files, (bytes, how) each, one after the other."""
    report(progress)
    for size, move in moves:

        def arrived(have: int, before: Progress = progress) -> None:
            report(replace(before, done_bytes=before.done_bytes + have))

        move(arrived)
        progress = replace(progress, files=progress.files + 1, done_bytes=progress.done_bytes + size)
        report(progress)
    return progress


# From a node


def fetch_files(
    ask: Ask,
    run: str | None,
    patterns: Sequence[str],
    into: Path,
    *,
    strip: str = "",
    admit: Callable[[int, int], None] = lambda total, missing: None,
    report: Report = lambda progress: None,
) -> Progress:
    """Fetch the files of a run that match into a directory. Raises TransferError; another call continues.

    `strip`: start of the paths that is omitted in the directory.
    `admit(total bytes, bytes that are not here)` raises TransferError if that is too much.
    """
    listing = message_of(ask(Outputs(run, tuple(patterns)), deadline_s=LIST_S))

    def target(path: str) -> Path:
        return target_of(into, path[len(strip) :] if path.startswith(strip) else path)

    try:
        files = [RemoteFile(path, size, mtime_ns, target(path)) for path, size, mtime_ns, _ in listing.files]
        links = [(target(path), link_text(into, target(path), text)) for path, text in listing.links]
    except ValueError as error:
        reason = Text("outputs.invalid-path", "invalid path {path:quote}", path=str(error))
        raise TransferError(Failure("invalid-reply", reason)) from error
    missing = sum(min(file.missing_bytes, row[3]) for file, row in zip(files, listing.files))
    start = Progress(0, len(files), 0, sum(file.size for file in files), listing.missing, listing.refused)
    try:
        admit(sum(stored for _, _, _, stored in listing.files), missing)
        for file in files:
            clear_way(into, file.target)
        moves = [(file.size, partial(_fetch_file, ask, run, file)) for file in files]
        progress = _move_all(moves, start, report)
        for place, text in links:
            clear_way(into, place)
            make_folder(place.parent)
            make_link(str(place), text)
        return progress
    except OSError as error:
        raise TransferError(not_written(error, into)) from error


@dataclass(frozen=True)
class RemoteFile:
    """A file of a node, and its place here."""

    path: str
    size: int
    mtime_ns: int
    target: Path

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{self.part_prefix}{_short(f'{self.size} {self.mtime_ns}')}")

    @property
    def part_prefix(self) -> str:
        return f"{PART}{_short(self.path)}-"

    @property
    def is_here(self) -> bool:
        return is_complete(str(self.target), self.size, self.mtime_ns)

    @property
    def missing_bytes(self) -> int:
        if self.is_here:
            return 0
        try:
            return max(0, self.size - os.lstat(self.part).st_size)
        except OSError:
            return self.size


def _fetch_file(ask: Ask, run: str | None, file: RemoteFile, arrived: Callable[[int], None]) -> None:
    """Fetch one file that is not here; if it changes meanwhile, as it is then. Raises TransferError, OSError."""
    if file.is_here:
        return
    make_folder(file.target.parent)
    for _ in range(TRIES):
        for other in file.target.parent.glob(f"{file.part_prefix}*"):
            if other != file.part:  # of earlier contents of the same file
                other.unlink(missing_ok=True)
        now, sha256 = _fetch_blocks(ask, run, file, arrived)
        if now == file:
            if message_of(ask(ReadOutput(run, file.path), deadline_s=finish_s(file.size))).sha256 == sha256:
                os.utime(file.part, ns=(file.mtime_ns, file.mtime_ns))
                os.replace(file.part, file.target)
                sync_dir(str(file.target.parent))
                return
            file.part.unlink()
        file = now
    what = Text("outputs.changing", "{path} changes while it is fetched", path=file.path)
    raise TransferError(Failure("output-changed", what, Text("outputs.again", "fetch it when the program has ended")))


def _fetch_blocks(
    ask: Ask, run: str | None, file: RemoteFile, arrived: Callable[[int], None]
) -> tuple[RemoteFile, str]:
    """Complete the part; return the file as the node has it now, and the hash of the part."""
    fd = os.open(file.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        at = min(os.fstat(fd).st_size, file.size) // BLOCK_BYTES * BLOCK_BYTES
        digest = hash_start(fd, at)
        os.ftruncate(fd, at)
        os.lseek(fd, at, os.SEEK_SET)
        while at < file.size:
            reply = ask(ReadOutput(run, file.path, at), deadline_s=BLOCK_S)
            facts = message_of(reply)
            is_same = (facts.size_bytes, facts.mtime_ns) == (file.size, file.mtime_ns)
            is_more = 0 < facts.hole_bytes + len(reply.body) <= file.size - at
            if not (is_same and is_more and 0 <= facts.hole_bytes <= HOLE_BYTES):
                return replace(file, size=facts.size_bytes, mtime_ns=facts.mtime_ns), ""
            _hash_hole(digest, facts.hole_bytes)
            digest.update(reply.body)
            os.ftruncate(fd, at + facts.hole_bytes)
            os.lseek(fd, 0, os.SEEK_END)
            write_all(fd, reply.body)
            at += facts.hole_bytes + len(reply.body)
            arrived(at)
        os.fsync(fd)
    finally:
        os.close(fd)
    return file, digest.hexdigest()


def _hash_hole(digest: hashlib._Hash, length: int) -> None:
    zeros = bytes(min(length, BLOCK_BYTES))
    for at in range(0, length, BLOCK_BYTES):
        digest.update(zeros[: length - at])


# To a node


def send_files(
    ask: Ask,
    run: str | None,
    files: Sequence[Path],
    folder: str,
    *,
    send: Callable[[Ask, Path, Put, Callable[[int], None]], None],
    report: Report = lambda progress: None,
) -> Progress:
    """Send files, and directories with all files below them, to a directory of a node. Raises TransferError; another
    call continues. `run`: as for PutFile. Links below a directory as in node/agent/transfer.py. `send`: sends one file,
    as send_one."""
    try:
        moves: list[tuple[int, Move]] = []
        links: list[PutFile] = []
        refused: list[str] = []
        for top in files:
            found = sort_entries(str(top), files_below(str(top)), partial(os.path.relpath, start=top.parent))
            for name, (path, facts) in sorted(found.files.items()):
                target = posixpath.join(folder, name)
                request = PutFile(run, target, facts.st_size, facts.st_mtime_ns, facts.st_mode & 0o777)
                moves.append((request.size_bytes, partial(send, ask, Path(path), request)))
            links += [PutFile(run, posixpath.join(folder, n), 0, 0, 0, link=text) for n, text in found.links.items()]
            refused += found.refused
        start = Progress(0, len(moves), 0, sum(size for size, _ in moves), refused=tuple(sorted(refused)))
        progress = _move_all(moves, start, report)
        for link in links:
            message_of(ask(link, deadline_s=BLOCK_S))
        return progress
    except OSError as error:
        raise TransferError(_io_error(error, error.filename)) from error


def send_one(ask: Ask, path: Path, request: Put, arrived: Callable[[int], None]) -> None:
    """Send a file of this machine; ends when it has its place. Raises TransferError, OSError."""
    steps = send_file(path, request, arrived)
    reply: Any = None
    while True:
        try:
            step, body, seconds = steps.send(reply)
        except StopIteration:
            return
        reply = ask(step, deadline_s=seconds, body=body)


def send_file(path: Path, request: Put, arrived: Callable[[int], None]) -> Steps:
    """Send a file of this machine from the byte on that the node lacks. `request`: its size, its time and its place
    there. The file of a tree is named after its content."""
    size = request.size_bytes
    for _ in range(TRIES):
        have, is_done = yield from put(request)
        if is_done:
            return
        with open(path, "rb", buffering=0) as file:
            digest = hash_start(file.fileno(), have)
            while have < size:
                hole = hole_at(file.fileno(), have)
                block = os.pread(file.fileno(), BLOCK_BYTES, have + hole)
                if not hole and not block:
                    break
                _hash_hole(digest, hole)
                digest.update(block)
                before = have
                have, is_done = yield from put(replace(request, offset=have, hole_bytes=hole or None), block)
                if have != before + hole + len(block):  # the part is not what it was: a full disk, or another transfer
                    break
                arrived(have)
            facts = os.fstat(file.fileno())
            if isinstance(request, PutFile) and (facts.st_size, facts.st_mtime_ns) != (size, request.mtime_ns):
                break
        if not is_done and have == size:
            _, is_done = yield from put(replace(request, sha256=digest.hexdigest()), seconds=finish_s(size))
        if is_done:
            return
    what = Text("outputs.sent-changing", "{path} changes while it is sent", path=path)
    raise TransferError(Failure("output-changed", what, Text("outputs.sent-again", "repeat the command")))


def put(
    request: Put, body: bytes = b"", *, seconds: float = BLOCK_S
) -> Generator[tuple[Put, bytes, float], Reply[PutFileReply], tuple[int, bool]]:
    """Return the bytes that the node has, and whether the file has its place."""
    message = message_of((yield request, body, seconds))
    return message.have, message.done


def finish_s(size: int) -> float:
    """Return how long to wait for a reply about a whole file."""
    return BLOCK_S + size / FINISH_BYTES_PER_S


def make_folder(folder: Path) -> None:
    """Make a directory and its parents, private. Raises OSError."""
    for level in (*reversed(folder.parents), folder):
        if not level.is_dir():
            level.mkdir(mode=0o700, exist_ok=True)


def message_of(reply: Reply[R]) -> R:
    """Return the message of a reply. Raises TransferError for an error."""
    if reply.error is not None:
        raise TransferError(reply.error)
    return reply.message


def not_written(error: OSError, into: Path) -> Failure:
    """Return the failure for an error of this machine's disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(into)
    return _io_error(error, error.filename or str(into))


def _io_error(error: OSError, path: str) -> Failure:
    return Failure("io-error", Text("outputs.io-error", "{path}: {error}", path=path, error=error.strerror))


def disk_full(into: Path) -> Failure:
    """Return the failure for a full disk of this machine."""
    what = Text("outputs.disk-full", "not enough disk space for {path} on the head node", path=str(into))
    hint = Text("outputs.disk-full.hint", "free disk space, or fetch to another directory: ascendrun fetch JOB -O DIR")
    return Failure("disk-full", what, hint)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
