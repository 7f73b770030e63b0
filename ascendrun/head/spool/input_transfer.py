"""Files of this machine that a command copies to a directory of a node: which ones, and under which names."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Callable

from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import PutFile
from ascendrun.head.spool.transfer import Ask, Progress, TransferError, run_steps, send_file
from ascendrun.text import Text


def send(
    ask: Ask,
    run: str | None,
    files: Sequence[Path],
    folder: str,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Send files, and directories with all files below them, to a directory of a node. Raises TransferError; another
    call continues. `run`: as for PutFile. Links to files are followed, links to directories are not."""
    try:
        named = [(path, posixpath.join(folder, name)) for top in files for path, name in _list_files(top)]
        sources = [(path, _make_request(run, path, target)) for path, target in named]
        progress = Progress(0, len(sources), 0, sum(request.size_bytes for _, request in sources))
        report(progress)
        for path, request in sources:
            before = progress

            def arrived(have: int, before: Progress = before) -> None:
                report(replace(before, done_bytes=before.done_bytes + have))

            run_steps(ask, send_file(path, request, arrived))
            done_bytes = before.done_bytes + request.size_bytes
            progress = replace(before, files=before.files + 1, done_bytes=done_bytes)
            report(progress)
    except OSError as error:
        what = Text("outputs.io-error", "{path}: {error}", path=error.filename, error=error.strerror)
        raise TransferError(Failure("io-error", what)) from error
    return progress


def _list_files(top: Path) -> Iterator[tuple[Path, str]]:
    """Yield files and their names on the node, below the target directory."""
    if not top.is_dir():
        yield top, top.name
        return
    for base, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            path = Path(base, name)
            if path.is_file():
                yield path, posixpath.join(top.name, path.relative_to(top).as_posix())


def _make_request(run: str | None, path: Path, target: str) -> PutFile:
    facts = path.stat()
    return PutFile(run, target, facts.st_size, facts.st_mtime_ns, facts.st_mode & 0o777)
