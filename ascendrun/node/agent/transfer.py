"""Bytes of files between this node and the head: in blocks from an offset, resumable, verified by their hash.

The other side is head/spool/transfer.py. Of all files that move, this is the contract:

    from the node   `read_block`: bytes of FILE from OFFSET, at most BLOCK_BYTES, with the size and the time of the file
                    after the read, by which the head notices a change; `hash_of`: SHA-256 of the whole file. Where a
                    hole begins, its length is sent in place of bytes.
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
import fnmatch
import glob
import itertools
import os
import stat

from ascendrun.node import layout
from ascendrun.node.files import BLOCK_BYTES, hash_start, hole_at, sync_dir, write_all
from ascendrun.node.op_errors import OperationError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Iterator
MAX_FILES = 50_000
"""Files of one list; a list of more does not fit into a frame."""


def open_file(path: str) -> int:
    """Open a regular file for reading. Raises OSError, for anything else too: a FIFO must not block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def read_block(path: str, offset: int) -> tuple[dict[str, Any], bytes]:
    """Return ({"size_bytes", "mtime_ns"} of the file now, at most BLOCK_BYTES from `offset` on). Raises OSError.

    Where a hole begins: with {"hole_bytes"} and without bytes."""
    fd = open_file(path)
    try:
        hole = hole_at(fd, offset)
        data = b"" if hole else os.pread(fd, BLOCK_BYTES, offset)
        facts = os.fstat(fd)
    finally:
        os.close(fd)
    return {"size_bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns, "hole_bytes": hole}, data


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


def make_link(path: str, text: str) -> None:
    """Make a link, or replace a file or link by it. Raises OSError."""
    with contextlib.suppress(OSError):
        if os.readlink(path) == text:
            return
    temp = "%s.tmp-%d" % (path, os.getpid())
    os.symlink(text, temp)
    os.replace(temp, path)


def part_name(*source: object) -> str:
    """Return the name of the part of a source, for this machine only: hosts may share the directory."""
    text = " ".join(map(str, (layout.machine_key(), *source)))
    return "part-" + str(layout.sha256(os.fsencode(text)).hexdigest()[:24])


def take_block(part: str, request: dict[str, Any], body: bytes, complete: Callable[[int], bool]) -> dict[str, Any]:
    """{size_bytes, offset, hole_bytes, sha256} and the bytes -> {"have", "done"}: the bytes in the part, whether it has
    its place. Raises OSError.

    Without `offset` nothing is written. With it the hole and the body are put there, if the part ends there. With
    `sha256` the part is complete: `complete(descriptor)` gives it its place; False: it is damaged, and removed.
    """
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        have = os.fstat(fd).st_size
        if request.get("offset") == have:
            have += int(request.get("hole_bytes") or 0)
            os.ftruncate(fd, have)
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


class Entries:
    """What is copied of a directory, by name: `files` (path, facts) and `links` (text). `refused`: links that lead out
    of the directory or to nothing that is copied."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, os.stat_result]] = {}
        self.links: dict[str, str] = {}
        self.refused: set[str] = set()

    def add_file(self, name: str, path: str) -> bool:
        """Add a regular file; False: it is none."""
        with contextlib.suppress(OSError):
            facts = os.stat(path)
            if stat.S_ISREG(facts.st_mode):
                self.files[name] = path, facts
        return name in self.files


def sort_entries(top: str, paths: Iterable[str], name_of: Callable[[str], str], trees: str = "") -> Entries:
    """Sort the files and links at or below `top`, which is followed itself. Below it a link to what is copied stays a
    link; one to another file below is that file. What is in `trees` is skipped."""
    found, inside = Entries(), os.path.realpath(top)
    links: dict[str, str] = {}
    copied: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if trees and real.startswith(trees):
            continue
        if real != inside and not real.startswith(inside.rstrip("/") + "/"):
            found.refused.add(name_of(path))
        elif os.path.islink(path) and path != top:
            links[path] = real
        elif found.add_file(name_of(path), path):
            while real != inside and real not in copied:  # a link to `top` itself would have no end
                copied.add(real)
                real = os.path.dirname(real)
    for path, real in links.items():
        if real in copied:
            place = os.path.normpath(os.path.join(top, os.path.relpath(real, inside)))
            found.links[name_of(path)] = os.path.relpath(place, os.path.dirname(path))
        elif not found.add_file(name_of(path), path):
            found.refused.add(name_of(path))
    return found


def list_outputs(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """{run, patterns} -> {"files": [[path, bytes, mtime_ns, stored bytes]], "links": [[path, text]], "refused": [path],
    "missing": patterns without a file, "folder"}.

    A pattern is a path or a glob pattern (`**`: any depth), relative to the run's working directory, or absolute. Of a
    directory it is every file below it. Links are those of `sort_entries`, and staged code is no output.
    """
    work = _base(root, request)
    trees = os.path.join(os.path.realpath(root), "trees") + "/"
    files: dict[str, list[Any]] = {}
    links: dict[str, str] = {}
    refused: set[str] = set()
    missing = []
    for pattern in map(str, request["patterns"]):

        def name_of(path: str, is_absolute: bool = os.path.isabs(pattern)) -> str:
            return path if is_absolute else os.path.relpath(path, work)

        top, parts = _split_pattern(work, pattern)
        paths = list(itertools.islice(_matches(top, parts), MAX_FILES + 1))
        found = sort_entries(top, paths, name_of, trees)
        for name, (_, facts) in found.files.items():
            stored = min(facts.st_size, facts.st_blocks * 512)
            files[name] = [name, facts.st_size, facts.st_mtime_ns, stored]
        if max(len(paths), len(files)) > MAX_FILES:
            raise OperationError("too-many-files", "too-many-outputs", pattern=pattern, limit=MAX_FILES)
        links.update(found.links)
        refused.update(found.refused)
        if not (found.files or found.links or found.refused):
            missing.append(pattern)
    return {
        "files": [files[name] for name in sorted(files)],
        "links": sorted(item for item in links.items() if item[0] not in files),
        "refused": sorted(refused),
        "missing": missing,
        "folder": work,
    }


def read_output(root: str, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """{run, path, offset} -> read_block of the file; without `offset` hash_of it."""
    path, offset = os.path.join(_base(root, request), str(request["path"])), request.get("offset")
    try:
        return (hash_of(path), b"") if offset is None else read_block(path, int(offset))
    except OSError as error:
        raise os_failure(error, "read-output", path=str(request["path"])) from error


def put_file(root: str, request: dict[str, Any], body: bytes) -> dict[str, Any]:
    """{run, path, size_bytes, mtime_ns, mode, offset, hole_bytes, sha256, link} -> take_block: the file replaces an
    earlier one. `link`: it is a link with this text.

    Files and directories are of their owner only. One with the size and the time of the source is not sent again.
    """
    path, size = _target(root, request), int(request["size_bytes"])
    folder = os.path.dirname(path)
    try:
        if request.get("link"):
            os.makedirs(folder, 0o700, exist_ok=True)
            make_link(path, str(request["link"]))
            return {"have": 0, "done": True}
        if is_complete(path, size, int(request["mtime_ns"])):
            return {"have": size, "done": True}
        os.makedirs(folder, 0o700, exist_ok=True)
        part, complete = file_place(root, request)
        return take_block(part, request, body, complete)
    except OSError as error:
        raise os_failure(error, "write-in", path=path) from error


def file_place(root: str, request: dict[str, Any]) -> tuple[str, Callable[[int], bool]]:
    """Return the part of a file that put_file receives, and what gives a complete one its place."""
    path, mtime_ns = _target(root, request), int(request["mtime_ns"])
    folder, mode = os.path.dirname(path), 0o600 | int(request["mode"]) & 0o700
    part = os.path.join(folder, ".ascendrun-" + part_name(root, path, int(request["size_bytes"]), mtime_ns))

    def complete(fd: int) -> bool:
        if hash_start(fd).hexdigest() != request["sha256"]:
            return False
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        try:
            os.replace(part, path)
        except FileNotFoundError:  # the request was repeated while this one still worked
            return is_complete(path, int(request["size_bytes"]), mtime_ns)
        sync_dir(folder)
        return True

    return part, complete


def _target(root: str, request: dict[str, Any]) -> str:
    return os.path.normpath(os.path.join(_base(root, request), str(request["path"])))


def _base(root: str, request: dict[str, Any]) -> str:
    run = request.get("run")
    return os.path.expanduser("~") if run is None else layout.work_dir(root, str(run))


def _split_pattern(work: str, pattern: str) -> tuple[str, list[str]]:
    """Return the path before the first part of a pattern that is not a name, which is followed: the user wrote it; and
    the other parts."""
    parts = pattern.split("/")
    named = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    top = os.path.join(work, "/".join(parts[:named]) or ("/" if pattern[:1] == "/" else ""))
    return os.path.normpath(top), [part for part in parts[named:] if part]


def _matches(folder: str, parts: list[str]) -> Iterator[str]:
    """Yield the paths of all files and links that a pattern names, and that are below the directories that it names. A
    link to a directory is followed only where a part is its name."""
    if not parts:
        yield from files_below(folder)
        return
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _matches(folder, rest)
    elif not glob.has_magic(first):
        if os.path.lexists(os.path.join(folder, first)):
            yield from _matches(os.path.join(folder, first), rest)
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            is_hidden = entry.name.startswith(".") and not first.startswith(".")
            if is_hidden or (first != "**" and not fnmatch.fnmatchcase(entry.name, first)):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _matches(entry.path, parts if first == "**" else rest)
            elif not rest:
                yield entry.path


def files_below(top: str) -> Iterator[str]:
    """Yield the paths of all files and links below a directory; those to directories are not followed. Or the file."""
    if not os.path.isdir(top):
        if os.path.lexists(top):
            yield top
        return
    for base, folders, names in os.walk(top):
        folders.sort()
        yield from (os.path.join(base, name) for name in sorted(names))
        yield from (path for path in (os.path.join(base, name) for name in folders) if os.path.islink(path))
