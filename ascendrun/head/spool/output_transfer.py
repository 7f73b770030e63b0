"""Files of a run on one node that match patterns: listed, and fetched into a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable

from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import Outputs
from ascendrun.head.spool.transfer import Ask, Progress, RemoteFile, TransferError, fetch_file, message_of, not_written
from ascendrun.text import Text

LIST_S = 120.0


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
    listing = message_of(ask(Outputs(run, tuple(patterns)), deadline_s=LIST_S))
    files = [
        RemoteFile(path, size, mtime_ns, _target(into, path[len(strip) :] if path.startswith(strip) else path))
        for path, size, mtime_ns in listing.files
    ]
    total = sum(file.size for file in files)
    progress = Progress(0, len(files), 0, total, listing.missing)
    try:
        admit(total, sum(file.missing_bytes for file in files))
        report(progress)
        for file in files:
            if not file.is_here:
                fetch_file(ask, run, file, partial(_report_more, report, progress))
            progress = replace(progress, files=progress.files + 1, done_bytes=progress.done_bytes + file.size)
            report(progress)
    except OSError as error:
        raise TransferError(not_written(error, into)) from error
    return progress


def _report_more(report: Callable[[Progress], None], before: Progress, done_bytes: int) -> None:
    report(replace(before, done_bytes=before.done_bytes + done_bytes))


def _target(into: Path, path: str) -> Path:
    """Return the place of a file below a directory, whatever a node sends."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        reason = Text("outputs.invalid-path", "invalid path {path:quote}", path=path)
        raise TransferError(Failure("invalid-reply", reason))
    return into.joinpath(*parts)
