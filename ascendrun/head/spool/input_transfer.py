"""Transfer of files of this machine to a directory of a node: in blocks, resumable, verified by hash."""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.spool.output_transfer import BLOCK_S, HASH_BYTES_PER_S, TRIES, Ask, Progress, TransferError
from ascendrun.node.agent.outputs import BLOCK_BYTES
from ascendrun.text import Text


@dataclass(frozen=True)
class _Source:
    """A file of this machine, and its path below the directory on the node."""

    path: Path
    name: str
    size: int
    mtime_ns: int
    mode: int


def send(
    ask: Ask,
    run: str | None,
    files: Sequence[Path],
    folder: str,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Send files, and directories with all files below them, to a directory of a node. Raises TransferError; another
    call continues. `run`: as for agent.PutFile. Links to files are followed, links to directories are not."""
    try:
        sources = [source for path in files for source in _list_sources(path)]
        progress = Progress(0, len(sources), 0, sum(source.size for source in sources))
        report(progress)
        for source in sources:
            before = progress

            def arrived(have: int, before: Progress = before) -> None:
                report(replace(before, done_bytes=before.done_bytes + have))

            _send_file(ask, run, source, posixpath.join(folder, source.name), arrived)
            progress = replace(before, files=before.files + 1, done_bytes=before.done_bytes + source.size)
            report(progress)
    except OSError as error:
        what = Text("outputs.io-error", "{path}: {error}", path=error.filename, error=error.strerror)
        raise TransferError(Failure("io-error", what)) from error
    return progress


def _list_sources(top: Path) -> Iterator[_Source]:
    if not top.is_dir():
        yield _make_source(top, top.name)
        return
    for base, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            path = Path(base, name)
            if path.is_file():
                yield _make_source(path, posixpath.join(top.name, path.relative_to(top).as_posix()))


def _make_source(path: Path, name: str) -> _Source:
    facts = path.stat()
    return _Source(path, name, facts.st_size, facts.st_mtime_ns, facts.st_mode & 0o777)


def _send_file(ask: Ask, run: str | None, source: _Source, path: str, arrived: Callable[[int], None]) -> None:
    """Send one file. Raises TransferError, OSError."""
    request = agent.PutFile(run, path, source.size, source.mtime_ns, source.mode)
    with open(source.path, "rb", buffering=0) as file:
        for _ in range(TRIES):
            have, is_done = _ask(ask, request)
            digest = _hash_start(file.fileno(), have)
            while not is_done and have < source.size:
                block = os.pread(file.fileno(), BLOCK_BYTES, have)
                if not block:
                    break
                digest.update(block)
                before = have
                have, is_done = _ask(ask, replace(request, offset=have), block)
                if have != before + len(block):  # the part is not what it was: a full disk, or another transfer
                    break
                arrived(have)
            facts = os.fstat(file.fileno())
            if (facts.st_size, facts.st_mtime_ns) != (source.size, source.mtime_ns):
                break
            if not is_done and have == source.size:
                seconds = BLOCK_S + source.size / HASH_BYTES_PER_S
                _, is_done = _ask(ask, replace(request, sha256=digest.hexdigest()), deadline_s=seconds)
            if is_done:
                return
    what = Text("outputs.sent-changing", "{path} changes while it is sent", path=source.path)
    raise TransferError(Failure("output-changed", what, Text("outputs.sent-again", "repeat the command")))


def _ask(ask: Ask, request: agent.PutFile, body: bytes = b"", *, deadline_s: float = BLOCK_S) -> tuple[int, bool]:
    reply = ask(request, deadline_s=deadline_s, body=body)
    if reply.error is not None:
        raise TransferError(reply.error)
    return reply.message.have, reply.message.done


def _hash_start(fd: int, end: int) -> hashlib._Hash:
    digest, at = hashlib.sha256(), 0
    while at < end:
        block = os.pread(fd, min(BLOCK_BYTES, end - at), at)
        if not block:
            break
        digest.update(block)
        at += len(block)
    return digest
