"""Files on this node that the head fetches or sends: which ones a pattern names, and where they are.

Their paths are absolute, or relative to the working directory of a run, or without a run to the user's home directory.
"""

from __future__ import annotations

import glob
import os
import stat

from ascendrun.node import layout
from ascendrun.node.agent import transfer
from ascendrun.node.files import hash_start, sync_dir
from ascendrun.node.op_errors import OperationError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

MAX_FILES = 50_000
"""Files of one list; a list of more does not fit into a frame."""


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
    """{run, path, offset} -> transfer.read_block of the file; without `offset` transfer.hash_of it."""
    path, offset = os.path.join(_base(root, request), str(request["path"])), request.get("offset")
    try:
        return (transfer.hash_of(path), b"") if offset is None else transfer.read_block(path, int(offset))
    except OSError as error:
        raise os_failure(error, "read-output", path=str(request["path"])) from error


def put_file(root: str, request: dict[str, Any], body: bytes) -> dict[str, Any]:
    """{run, path, size_bytes, mtime_ns, mode, offset, sha256} -> transfer.take_block: the file replaces an earlier one.

    Files and directories are of their owner only. One with the size and the time of the source is not sent again.
    """
    path = os.path.normpath(os.path.join(_base(root, request), str(request["path"])))
    size, mtime_ns = int(request["size_bytes"]), int(request["mtime_ns"])
    mode = 0o600 | int(request["mode"]) & 0o700
    folder = os.path.dirname(path)
    part = os.path.join(folder, ".ascendrun-" + transfer.part_name(root, path, size, mtime_ns))

    def complete(fd: int) -> bool:
        if hash_start(fd).hexdigest() != request["sha256"]:
            return False
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.replace(part, path)
        sync_dir(folder)
        return True

    try:
        if transfer.is_complete(path, size, mtime_ns):
            return {"have": size, "done": True}
        os.makedirs(folder, 0o700, exist_ok=True)
        return transfer.take_block(part, request, body, complete)
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
