"""Small files, written atomically (a crash leaves the old or the new), in directories private to the user."""

from __future__ import annotations

import errno
import json
import os
import stat

from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BLOCK_BYTES = 1 << 20
"""Most bytes of one read or request. Logs of the same node wait for no more than that."""
HOLE_BYTES = 1 << 30
"""Most bytes of a hole that are skipped at once: the receiver hashes them, and may be told to end."""
READ_BYTES = 1 << 18
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnreadableError(OSError):
    """A file whose content is unknown: no statement about whether it exists. errno EBADMSG: it has other content."""


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return sorted names; [] for a directory that does not exist. Raises OSError."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def to_bytes(text: str) -> bytes:
    """Encode paths, arguments and variables as UTF-8 in any locale of the node; bytes that were not UTF-8 are kept."""
    return text.encode("utf-8", "surrogateescape")


def make_private_dir(path: str) -> None:
    """Make `path` and its missing parents (0700). Raises OperationError when it belongs to another user, OSError."""
    try:
        os.makedirs(path, 0o700)
    except FileExistsError:
        pass
    found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise OperationError("bad-directory", "not-a-directory", path=path)
    if found.st_uid != os.geteuid():
        raise OperationError("bad-directory", "other-owner", path=path, owner=found.st_uid, user=os.geteuid())
    if found.st_mode & 0o077:
        os.chmod(path, 0o700)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`, even if the kernel writes less per call. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_some(fd: int, limit: int = READ_BYTES) -> bytes | None:
    """Return available bytes: b"" at the end of the stream, None: no data now."""
    try:
        return os.read(fd, limit)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def hash_start(fd: int, end: int | None = None) -> Any:
    """Return the SHA-256 object of the first `end` bytes of an open file, or of as many as it has; None: of all."""
    import hashlib  # here: agents that hash nothing start faster

    digest, at = hashlib.sha256(), 0
    while end is None or at < end:
        block = os.pread(fd, BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - at), at)
        if not block:
            break
        digest.update(block)
        at += len(block)
    return digest


def hole_at(fd: int, offset: int) -> int:
    """Return the length of the hole of an open file at `offset`, at most HOLE_BYTES; 0: it is shorter than a block."""
    try:
        hole = os.lseek(fd, offset, os.SEEK_DATA) - offset
    except OSError as error:  # ENXIO: no byte follows; else the file system has no holes
        hole = os.fstat(fd).st_size - offset if error.errno == errno.ENXIO else 0
    return min(hole, HOLE_BYTES) if hole >= BLOCK_BYTES else 0


def write_json(path: str, value: Any, *, durable: bool = True) -> None:
    """Replace the file atomically, as `replace_file`."""
    replace_file(path, json.dumps(value).encode("utf-8"), durable=durable)


def write_all_json(files: dict[str, Any]) -> None:
    """Replace files of one directory, each atomically, by path; durable when all are written."""
    for path, value in files.items():
        temp = _write_temp(path, json.dumps(value).encode("utf-8"))
        os.replace(temp, path)
    if files:
        sync_dir(os.path.dirname(path))


def replace_file(path: str, data: bytes, *, durable: bool = True) -> None:
    """Replace the file atomically: temp file (0600), fsync, rename. Raises OSError; then the old file is unchanged.

    `durable` False: without fsync, for data that a power failure makes useless.
    """
    temp = _write_temp(path, data, durable=durable)
    try:
        os.replace(temp, path)
    except OSError:
        os.unlink(temp)
        raise
    if durable:
        sync_dir(os.path.dirname(path))


def claim_json(path: str, value: Any) -> bool:
    """Create the complete file unless it exists. True for the one caller, of all processes, that created it."""
    data = json.dumps(value).encode("utf-8")
    temp = _write_temp(path, data)
    try:
        os.link(temp, path)
    except FileExistsError:
        if os.stat(temp).st_nlink == 1:
            return False  # else the link is ours: a network file system repeated the request after a lost reply
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        return _claim_without_links(path, data)
    finally:
        os.unlink(temp)
    sync_dir(os.path.dirname(path))
    return True


def read_json(path: str) -> dict[str, Any] | None:
    """Return the object in the file; None: no such file. Raises UnreadableError."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read().decode("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(error.errno, error.strerror, path) from error
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UnreadableError(errno.EBADMSG, "not a JSON object", path)
    return value


def read_claim(path: str) -> dict[str, Any] | None:
    """As read_json, but {} for a file with other content: a crash may leave a claim empty."""
    try:
        return read_json(path)
    except UnreadableError as error:
        if error.errno != errno.EBADMSG:
            raise
        return {}


def exists(path: str) -> bool:
    """Return whether the file exists. Raises UnreadableError, where os.path.exists answers False."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UnreadableError(error.errno, error.strerror, path) from error
    return True


def sync_dir(path: str) -> None:
    """Make a rename in `path` durable; file systems that cannot sync directories are accepted."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def free_bytes(path: str) -> int:
    """Return the bytes that this user may still write on the file system of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def remove_tree(path: str) -> None:
    """Remove a file or directory, read-only too; does nothing if it does not exist."""
    if not os.path.isdir(path) or os.path.islink(path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        return
    for base, _, _ in os.walk(os.fsencode(path)):
        os.chmod(base, 0o700)
    import shutil

    shutil.rmtree(path)


def _write_temp(path: str, data: bytes, *, durable: bool = True) -> str:
    temp = "%s.tmp-%d-%s" % (path, os.getpid(), os.urandom(4).hex())
    fd = os.open(temp, _NEW, 0o600)
    try:
        write_all(fd, data)
        if durable:
            os.fsync(fd)
    except OSError:
        os.unlink(temp)
        raise
    finally:
        os.close(fd)
    return temp


def _claim_without_links(path: str, data: bytes) -> bool:
    # Some network and FUSE file systems have no hard links; a crash between open and write leaves an empty claim, which
    # still excludes all other processes.
    try:
        fd = os.open(path, _NEW, 0o600)
    except FileExistsError:
        return False
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    return True
