"""Writer of a support archive from pieces: bounded, without credentials, reproducible."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.logs.redaction import Redactor
from ascendrun.output_file import write_output
from ascendrun.text import Text

SCHEMA_VERSION = 1
MANIFEST = "MANIFEST.json"
LEAST_BYTES = 16 * 1024
"""Bytes of every piece that are kept at least."""
MOST_BYTES = 16 * 1024 * 1024
"""Bytes of one piece that are kept at most."""
MARGIN_BYTES, GUARD_BYTES = 64 * 1024, 32 * 1024
"""A secret that crosses a cut must not remain in part. Beyond each cut, MARGIN_BYTES more are read and searched; at the
edge, up to GUARD_BYTES that may be part of a secret are discarded."""
HEAD_SHARE = 0.25
"""Fraction of the kept bytes of a long piece that is its start; the rest is its end, where failures are."""
_CUT_MARK = b"\n[... %d bytes omitted ...]\n"

Read = Callable[[int, int], bytes]
"""(offset, count) -> bytes"""


@dataclass(frozen=True)
class Piece:
    """One file of the archive. `size`: all bytes that `read` returns; later growth of the file is ignored."""

    name: str
    size: int
    read: Read


@dataclass(frozen=True)
class Packed:
    """One piece as packed. `bytes`, `sha256`: as in the archive. `of_bytes`: its original length. `redactions`: the
    number of redaction marks in it."""

    name: str
    bytes: int
    of_bytes: int
    is_cut: bool
    redactions: int
    sha256: str


@dataclass(frozen=True)
class Contents:
    """Actual or expected contents of an archive. `left_out`: (item, reason)."""

    packed: tuple[Packed, ...]
    left_out: tuple[tuple[str, str | Text], ...]
    secrets: int


class CannotWriteError(AscendrunError, code="cannot-write", exit_code=2):
    """The archive cannot be written."""


def cannot_write(path: Path, error: OSError) -> CannotWriteError:
    return CannotWriteError.of(
        "bundle.cannot-write",
        "cannot write {path}: {error}",
        "set another file with -O FILE.tar.gz",
        path=str(error.filename or path),
        error=error.strerror or str(error),
    )


def text_piece(name: str, text: str | bytes) -> Piece:
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return Piece(name, len(data), lambda offset, count: data[offset : offset + count])


def json_piece(name: str, value: object) -> Piece:
    return text_piece(name, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, default=str) + "\n")


def file_piece(name: str, paths: Sequence[Path]) -> Piece:
    """Return a piece of concatenated files: the generations of a rotated file are one text. Raises OSError."""
    facts = [os.lstat(path) for path in paths]
    if not all(stat.S_ISREG(fact.st_mode) for fact in facts):
        raise OSError(f"{name}: not a regular file")
    sizes = [fact.st_size for fact in facts]

    def read(offset: int, count: int) -> bytes:
        pieces = []
        for path, size in zip(paths, sizes):
            if offset < size and count > 0:
                with open(path, "rb") as file:
                    file.seek(offset)
                    pieces.append(file.read(min(count, size - offset)))
                count -= len(pieces[-1])
            offset = max(0, offset - size)
        return b"".join(pieces)

    return Piece(name, sum(sizes), read)


def water_level(sizes: Iterable[int], budget: int) -> int:
    """Return how many bytes of each piece fit in the budget: small pieces completely, large ones equally.

    At least LEAST_BYTES, at most MOST_BYTES.
    """
    waiting, left = sorted(sizes), budget
    level = MOST_BYTES
    for count, size in enumerate(waiting):
        share = left // (len(waiting) - count)
        if size > share:
            level = share
            break
        left -= size
    return max(LEAST_BYTES, min(level, MOST_BYTES))


def make_archive(
    pieces: Sequence[Piece],
    redactor: Redactor,
    *,
    root: str,
    facts: Mapping[str, object],
    max_bytes: int,
    left_out: Sequence[tuple[str, str | Text]] = (),
    out: IO[bytes] | None = None,
    mtime_s: int = 0,
) -> Contents:
    """Write the archive to `out` (None: nowhere, to list what it would contain).

    Everything is read twice: secrets found in one file are then removed from all. Raises OSError.
    """
    pieces = sorted(pieces, key=lambda piece: piece.name)
    level = water_level([piece.size for piece in pieces], max_bytes)
    for piece in pieces:
        for window in _windows(piece, level):
            redactor.scan(window)
    packed: list[Packed] = []
    with _open_tar(out) as tar:
        for piece in pieces:
            name, before = redactor.redact_text(piece.name), redactor.count
            data = _pack(piece, level, redactor)
            digest = hashlib.sha256(data).hexdigest()
            packed.append(Packed(name, len(data), piece.size, piece.size > level, redactor.count - before, digest))
            _add(tar, f"{root}/{name}", data, mtime_s)
        contents = Contents(tuple(packed), tuple(left_out), redactor.secrets)
        _add(tar, f"{root}/{MANIFEST}", _manifest(contents, facts, redactor), mtime_s)
    return contents


def write_archive(path: Path, write: Callable[[IO[bytes]], Contents]) -> tuple[Contents, str]:
    """Write a private file, complete or not at all; return its contents and SHA-256. Raises OSError."""

    def write_and_digest(file: IO[bytes]) -> tuple[Contents, str]:
        contents = write(file)
        file.seek(0)
        digest = hashlib.sha256()
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
        return contents, digest.hexdigest()

    return write_output(path, write_and_digest, mode=0o600)


# ---------------------------------------------------------------- one piece


def _windows(piece: Piece, level: int) -> list[bytes]:
    """Return the parts read of a piece: all of it, or its start and its end, each with a margin."""
    if piece.size <= level:
        return [piece.read(0, piece.size)]
    head, tail = _shares(level)
    start = max(0, piece.size - tail - MARGIN_BYTES)
    return [piece.read(0, head + MARGIN_BYTES), piece.read(start, piece.size - start)]


def _pack(piece: Piece, level: int, redactor: Redactor) -> bytes:
    windows = [redactor.redact(window) for window in _windows(piece, level)]
    if len(windows) == 1:
        return windows[0]
    head, tail = _shares(level)
    first = windows[0][: max(0, min(head, len(windows[0]) - GUARD_BYTES))]
    newline = first.rfind(b"\n", max(0, len(first) - GUARD_BYTES))
    first = first[:newline] if newline >= 0 else first
    last = windows[1][max(GUARD_BYTES, len(windows[1]) - tail) :]
    newline = last.find(b"\n", 0, GUARD_BYTES)
    last = last[newline + 1 :]
    return first + _CUT_MARK % max(0, piece.size - len(first) - len(last)) + last


def _shares(level: int) -> tuple[int, int]:
    head = int(level * HEAD_SHARE)
    return head, level - head


# ---------------------------------------------------------------- the archive


class _Nowhere(io.RawIOBase):
    """Output that discards everything."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


@contextmanager
def _open_tar(out: IO[bytes] | None) -> Iterator[tarfile.TarFile]:
    # Neither name nor time of the archive itself: equal input gives equal bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=out or _Nowhere(), mtime=0, compresslevel=6) as compressed:
        with tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            yield tar


def _add(tar: tarfile.TarFile, name: str, data: bytes, mtime_s: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), mtime_s, 0o600
    tar.addfile(info, io.BytesIO(data))


def _manifest(contents: Contents, facts: Mapping[str, object], redactor: Redactor) -> bytes:
    values: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "files": [asdict(one) for one in contents.packed],
        "left_out": [{"what": what, "why": str(why)} for what, why in contents.left_out],
        "secrets": contents.secrets,
    }
    text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    return redactor.redact(text.encode("utf-8", "surrogateescape"))
