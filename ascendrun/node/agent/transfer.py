"""Bytes of files between this node and the head: in blocks from an offset, resumable, verified by their hash.

The other side is head/spool/transfer.py. Of all files that move, this is the contract:

    from the node   `read_block`: bytes of FILE from OFFSET, at most BLOCK_BYTES, with the size and the time of the file
                    after the read, by which the head notices a change; `hash_of`: SHA-256 of the whole file.
    to the node     `take_block`: the bytes go to a part, a file whose name the source and this machine decide. The
                    reply says how many bytes the part has; the sender continues there. The last request has the hash:
                    the complete part gets its place, or is removed and sent again.

Each request is bounded, and repeatable after a lost reply. Nothing has its final name before it is verified. What
differs stays with the callers: the operations below say which files, trees.py what a tree is; artifacts.py sends
excerpts of files and commands, which have no hash, and follow.py files that grow.

Paths are absolute, or relative to the working directory of a run, or without a run to the user's home directory.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat

from ascendrun.node import layout
from ascendrun.node.files import BLOCK_BYTES, hash_start, sync_dir, write_all
from ascendrun.node.op_errors import OperationError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator
MAX_FILES = 50_000
"""Files of one list; a list of more does not fit into a frame."""


def open_file(path: str, flags: int = 0) -> int:
    """Open a regular file for reading. Raises OSError, for anything else too: a FIFO must not block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def read_block(path: str, offset: int) -> tuple[dict[str, Any], bytes]:
    """Return ({"size_bytes", "mtime_ns"} of the file now, at most BLOCK_BYTES from `offset` on). Raises OSError."""
    fd = open_file(path)
    try:
        data = os.pread(fd, BLOCK_BYTES, offset)
        facts = os.fstat(fd)
    finally:
        os.close(fd)
    return {"size_bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns}, data


def hash_of(path: str) -> dict[str, Any]:
    """Return {"sha256"} of the whole file. Raises OSError."""
    fd = open_file(path)
    try:
        return {"sha256": hash_start(fd).hexdigest()}
    finally:
        os.close(fd)


def is_complete(path: str, size: int, mtime_ns: int) -> bool:
    """Return whether a file was received and verified before: only then it has the time of its source. Raises
    IsADirectoryError."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return stat.S_ISREG(facts.st_mode) and (facts.st_size, facts.st_mtime_ns) == (size, mtime_ns)


def part_name(*source: object) -> str:
    """Return the name of the part of a source, for this machine only: hosts may share the directory."""
    text = " ".join(map(str, (layout.machine_key(), *source)))
    return "part-" + str(layout.sha256(os.fsencode(text)).hexdigest()[:24])


def take_block(part: str, request: dict[str, Any], body: bytes, complete: Callable[[int], bool]) -> dict[str, Any]:
    """{size_bytes, offset, sha256} and the bytes -> {"have", "done"}: the bytes in the part, whether it has its place.

    Without `offset` nothing is written. With it the body is written there, if the part ends there. With `sha256` the
    part is complete: `complete(descriptor)` gives it its place; False: it is damaged, and removed. Raises OSError.
    """
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        have = os.fstat(fd).st_size
        if request.get("offset") == have and body:
            os.lseek(fd, have, os.SEEK_SET)
            write_all(fd, body)
            have += len(body)
        if request.get("sha256") is None:
            return {"have": have, "done": False}
        os.fsync(fd)
        is_done = have == int(request["size_bytes"]) and complete(fd)
    finally:
        os.close(fd)
    if not is_done:
        with contextlib.suppress(FileNotFoundError):  # another transfer of the same file removed it
            os.unlink(part)
    return {"have": have if is_done else 0, "done": is_done}


# --- which files the head fetches and sends ---


def list_outputs(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """{run, patterns} -> {"files": [[path, bytes, mtime_ns]], "missing": patterns without a file, "folder"}.

    A pattern is a path or a glob pattern (`**`: any depth), relative to the run's working directory, or absolute. Of a
    directory it is every file below it. Links to directories are not followed below a pattern, and staged code is no
    output.
    """
    work = _base(root, request)
    trees = os.path.join(os.path.realpath(root), "trees") + "/"
    found: dict[str, list[Any]] = {}
    missing = []
    for pattern in request["patterns"]:
        has_file = False
        for path in _matches(work, str(pattern)):
            facts = _stat(path, trees)
            if facts is None:
                continue
            has_file = True
            name = path if os.path.isabs(pattern) else os.path.relpath(path, work)
            found[name] = [name, facts.st_size, facts.st_mtime_ns]
            if len(found) > MAX_FILES:
                raise OperationError("too-many-files", "too-many-outputs", pattern=str(pattern), limit=MAX_FILES)
        if not has_file:
            missing.append(pattern)
    return {"files": [found[name] for name in sorted(found)], "missing": missing, "folder": work}


def read_output(root: str, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """{run, path, offset} -> read_block of the file; without `offset` hash_of it."""
    path, offset = os.path.join(_base(root, request), str(request["path"])), request.get("offset")
    try:
        return (hash_of(path), b"") if offset is None else read_block(path, int(offset))
    except OSError as error:
        raise os_failure(error, "read-output", path=str(request["path"])) from error


def put_file(root: str, request: dict[str, Any], body: bytes) -> dict[str, Any]:
    """{run, path, size_bytes, mtime_ns, mode, offset, sha256} -> take_block: the file replaces an earlier one.

    Files and directories are of their owner only. One with the size and the time of the source is not sent again.
    """
    path = os.path.normpath(os.path.join(_base(root, request), str(request["path"])))
    size, mtime_ns = int(request["size_bytes"]), int(request["mtime_ns"])
    mode = 0o600 | int(request["mode"]) & 0o700
    folder = os.path.dirname(path)
    part = os.path.join(folder, ".ascendrun-" + part_name(root, path, size, mtime_ns))

    def complete(fd: int) -> bool:
        if hash_start(fd).hexdigest() != request["sha256"]:
            return False
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.replace(part, path)
        sync_dir(folder)
        return True

    try:
        if is_complete(path, size, mtime_ns):
            return {"have": size, "done": True}
        os.makedirs(folder, 0o700, exist_ok=True)
        return take_block(part, request, body, complete)
    except OSError as error:
        raise os_failure(error, "write-in", path=path) from error


def _base(root: str, request: dict[str, Any]) -> str:
    run = request.get("run")
    return os.path.expanduser("~") if run is None else layout.work_dir(root, str(run))


def _matches(work: str, pattern: str) -> Iterator[str]:
    """Yield the paths of every file that the pattern names."""
    for top in sorted(glob.iglob(os.path.join(glob.escape(work), pattern), recursive=True)):
        top = os.path.normpath(top)
        if not os.path.isdir(top):
            yield top
            continue
        for base, folders, names in os.walk(top):
            folders.sort()
            yield from (os.path.join(base, name) for name in sorted(names))


def _stat(path: str, trees: str) -> os.stat_result | None:
    """Return the facts of a regular file; None: something else, gone, or staged code."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    is_output = stat.S_ISREG(facts.st_mode) and not os.path.realpath(path).startswith(trees)
    return facts if is_output else None
