"""Files on this node that the head fetches or sends: listed by pattern, read and written in blocks, hashed.

Their paths are absolute, or relative to the working directory of a run, or without a run to the user's home directory.
"""

from __future__ import annotations

import errno
import glob
import os
import stat

from ascendrun.node import layout
from ascendrun.node.files import sync_dir, write_all
from ascendrun.node.op_errors import OperationError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

MAX_FILES = 50_000
"""Files of one list; a list of more does not fit into a frame."""
BLOCK_BYTES = 1 << 20
"""Most bytes of one read. Logs of the same node wait for no more than that."""


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
    """{run, path, offset} -> {"size_bytes", "mtime_ns"} of the file now, and at most BLOCK_BYTES from `offset` on."""
    fd = _open(root, request)
    try:
        data = os.pread(fd, BLOCK_BYTES, int(request["offset"]))
        facts = os.fstat(fd)
    except OSError as error:
        raise os_failure(error, "read-output", path=str(request["path"])) from error
    finally:
        os.close(fd)
    return {"size_bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns}, data


def hash_output(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """{run, path} -> {"sha256"} of the whole file."""
    import hashlib

    fd = _open(root, request)
    digest = hashlib.sha256()
    with open(fd, "rb", buffering=0) as file:
        try:
            for block in iter(lambda: file.read(BLOCK_BYTES), b""):
                digest.update(block)
        except OSError as error:
            raise os_failure(error, "read-output", path=str(request["path"])) from error
    return {"sha256": digest.hexdigest()}


def put_file(root: str, request: dict[str, Any], body: bytes) -> dict[str, Any]:
    """{run, path, size_bytes, mtime_ns, mode, offset, sha256} -> {"have", "done"}: bytes that are here; the file is.

    Without `offset` nothing is written. With it the body is written there, if the part ends there. With `sha256` the
    complete part gets its name if it has this hash, else it is removed. Files and directories are of their owner only.
    """
    path = os.path.normpath(os.path.join(_base(root, request), str(request["path"])))
    size, mtime_ns = int(request["size_bytes"]), int(request["mtime_ns"])
    mode = 0o600 | int(request["mode"]) & 0o700
    name = "%s %s %s %d %d" % (layout.machine_key(), root, path, size, mtime_ns)  # hosts may share the directory
    part = os.path.join(os.path.dirname(path), ".ascendrun-part-" + layout.sha256(os.fsencode(name)).hexdigest()[:24])
    try:
        if _has_file(path, size, mtime_ns):
            return {"have": size, "done": True}
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
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
            if have != size or _hash(fd) != request["sha256"]:
                os.unlink(part)
                return {"have": 0, "done": False}
            os.fchmod(fd, mode)
            os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)
        os.replace(part, path)
        sync_dir(os.path.dirname(path))
    except OSError as error:
        raise os_failure(error, "write-in", path=path) from error
    return {"have": size, "done": True}


def _has_file(path: str, size: int, mtime_ns: int) -> bool:
    """Return whether the file was sent before: only then it has the time of its source."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return stat.S_ISREG(facts.st_mode) and (facts.st_size, facts.st_mtime_ns) == (size, mtime_ns)


def _hash(fd: int) -> str:
    import hashlib

    digest, at = hashlib.sha256(), 0
    while True:
        block = os.pread(fd, BLOCK_BYTES, at)
        if not block:
            return digest.hexdigest()
        digest.update(block)
        at += len(block)


def _base(root: str, request: dict[str, Any]) -> str:
    run = request.get("run")
    return os.path.expanduser("~") if run is None else layout.work_dir(root, str(run))


def _open(root: str, request: dict[str, Any]) -> int:
    path = os.path.join(_base(root, request), str(request["path"]))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    except OSError as error:
        raise os_failure(error, "read-output", path=str(request["path"])) from error


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
