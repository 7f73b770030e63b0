"""The kernel's FUSE protocol, and a file system that passes each request through to another folder.

Plain Python over /dev/fuse, without libfuse: that takes requests off the kernel's queue unasked, and who waits for a
request that was taken cannot be killed (of 14 that hung with mfusepy 3.1, 10). The kernel caches neither names nor
attributes nor data of it (timeouts of 0, direct I/O): each call of a program is a request here. File locks stay in the
kernel, for each mount its own. Structures are those of Linux's include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable, NamedTuple

LARGEST_WRITE = 128 << 10
READ_SIZE = LARGEST_WRITE + 4096
ROOT = 1

_IN = struct.Struct("=IIQQIIII")
_OUT = struct.Struct("=IiQ")
_ATTRIBUTES = struct.Struct("=6Q10I")
_ENTRY = struct.Struct("=4Q2I")
_SET_ATTRIBUTES = struct.Struct("=II6Q8I")
_INIT_OUT = struct.Struct("=4I2H2I2H2I6I")
_STATFS_OUT = struct.Struct("=5Q10I")
_DIRENT = struct.Struct("=QQII")
_IO = struct.Struct("=QQI")

_ASYNC_READ, _ATOMIC_O_TRUNC, _BIG_WRITES = 1, 1 << 3, 1 << 5
_DIRECT_IO = 1
_NOT_PASSED = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT
_SET_MODE, _SET_UID, _SET_GID, _SET_SIZE, _SET_ATIME, _SET_MTIME, _SET_FH = (1 << bit for bit in range(7))
_SET_ATIME_NOW, _SET_MTIME_NOW = 1 << 7, 1 << 8

NAMES = {
    1: "lookup",
    2: "forget",
    3: "getattr",
    4: "setattr",
    5: "readlink",
    6: "symlink",
    8: "mknod",
    9: "mkdir",
    10: "unlink",
    11: "rmdir",
    12: "rename",
    13: "link",
    14: "open",
    15: "read",
    16: "write",
    17: "statfs",
    18: "release",
    20: "fsync",
    25: "flush",
    26: "init",
    27: "opendir",
    28: "readdir",
    29: "releasedir",
    30: "fsyncdir",
    35: "create",
    36: "interrupt",
    38: "destroy",
    42: "batch_forget",
    43: "fallocate",
    45: "rename2",
}
"""Requests that are served; the kernel remembers the ENOSYS of any other and does without."""
UNANSWERED = frozenset({"forget", "batch_forget", "interrupt"})
BOOKKEEPING = UNANSWERED | {"init", "destroy", "release", "releasedir"}
"""Requests that no program waits for: a fault does not concern them."""
GROWING = frozenset({"write", "create", "mkdir", "mknod", "symlink", "link", "fallocate"})
CHANGING = GROWING | {"setattr", "unlink", "rmdir", "rename", "rename2"}


class Request(NamedTuple):
    """One request of the kernel. `name`: None for one that is not served."""

    name: str | None
    unique: int
    node: int
    uid: int
    gid: int
    body: bytes


def parse_request(raw: bytes) -> Request:
    _, opcode, unique, node, uid, gid, _, _ = _IN.unpack_from(raw)
    return Request(NAMES.get(opcode), unique, node, uid, gid, raw[_IN.size :])


def make_reply(unique: int, body: bytes = b"", *, error: int = 0) -> bytes:
    """The answer to one request; `error`: an errno, without a body."""
    return _OUT.pack(_OUT.size + len(body), -error, unique) + body


def opens_for_writing(request: Request) -> bool:
    return request.name == "open" and bool(struct.unpack_from("=I", request.body)[0] & (os.O_ACCMODE | os.O_TRUNC))


@dataclass
class _Node:
    """A file that the kernel knows. `fd`: an O_PATH descriptor of it. `count`: look-ups that were not forgotten."""

    fd: int
    key: tuple[int, int]
    count: int = 0


class _Nodes:
    """The files that the kernel knows, by number."""

    def __init__(self, root: int) -> None:
        self._known = {ROOT: _Node(root, _key(os.fstat(root)))}
        self._numbers = {self._known[ROOT].key: ROOT}
        self._next = ROOT + 1

    def fd(self, node: int) -> int:
        if node not in self._known:
            raise OSError(errno.ESTALE, "forgotten")
        return self._known[node].fd

    def path(self, node: int) -> str:
        """A path that leads to the node itself, also when it was renamed or removed."""
        return f"/proc/self/fd/{self.fd(node)}"

    def forget(self, node: int, count: int) -> None:
        known = self._known.get(node)
        if known is None or node == ROOT:
            return
        known.count -= count
        if known.count <= 0:
            os.close(known.fd)
            del self._known[node], self._numbers[known.key]

    def entry(self, parent: int, name: bytes) -> bytes:
        """What the kernel is told of a name: the node's number, which it then knows, and its attributes."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd(parent))
        status = os.fstat(fd)
        number = self._numbers.get(_key(status))
        if number is None:
            number, self._next = self._next, self._next + 1
            self._known[number] = _Node(fd, _key(status))
            self._numbers[_key(status)] = number
        else:
            os.close(fd)
        self._known[number].count += 1
        return _ENTRY.pack(number, 0, 0, 0, 0, 0) + _attributes(status)

    def created(self, request: Request, name: bytes) -> bytes:
        if request.uid or request.gid:
            os.chown(name, request.uid, request.gid, dir_fd=self.fd(request.node), follow_symlinks=False)
        return self.entry(request.node, name)


class _Names:
    """Requests on names and attributes."""

    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes

    def init(self, request: Request) -> bytes:
        major, minor, readahead, flags = struct.unpack_from("=4I", request.body)
        if major != 7:
            raise OSError(errno.EPROTO, "an unknown protocol")
        ours = flags & (_ASYNC_READ | _ATOMIC_O_TRUNC | _BIG_WRITES)
        return _INIT_OUT.pack(7, min(minor, 31), readahead, ours, 64, 48, LARGEST_WRITE, 1, *[0] * 10)

    def destroy(self, request: Request) -> bytes:
        return b""

    def statfs(self, request: Request) -> bytes:
        found = os.statvfs(self._nodes.path(request.node))
        sizes = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return _STATFS_OUT.pack(*sizes, found.f_bsize, found.f_namemax, found.f_frsize, *[0] * 7)

    def lookup(self, request: Request) -> bytes:
        return self._nodes.entry(request.node, _name(request.body))

    def getattr(self, request: Request) -> bytes:
        return struct.pack("=QII", 0, 0, 0) + _attributes(os.fstat(self._nodes.fd(request.node)))

    def setattr(self, request: Request) -> bytes:
        valid, _, handle, size, _, atime_s, mtime_s, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = (
            _SET_ATTRIBUTES.unpack_from(request.body)
        )
        path = self._nodes.path(request.node)
        if valid & _SET_MODE:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & (_SET_UID | _SET_GID):
            os.chown(path, uid if valid & _SET_UID else -1, gid if valid & _SET_GID else -1)
        if valid & _SET_SIZE:
            os.truncate(handle if valid & _SET_FH else path, size)
        if valid & (_SET_ATIME | _SET_MTIME):
            now, status = time.time_ns(), os.stat(path)
            atime = now if valid & _SET_ATIME_NOW else atime_s * 10**9 + atime_ns
            mtime = now if valid & _SET_MTIME_NOW else mtime_s * 10**9 + mtime_ns
            kept = (
                atime if valid & _SET_ATIME else status.st_atime_ns,
                mtime if valid & _SET_MTIME else status.st_mtime_ns,
            )
            os.utime(path, ns=kept)
        return self.getattr(request)

    def readlink(self, request: Request) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._nodes.fd(request.node)))

    def symlink(self, request: Request) -> bytes:
        name, target = request.body.split(b"\0")[:2]
        os.symlink(target, name, dir_fd=self._nodes.fd(request.node))
        return self._nodes.created(request, name)

    def mknod(self, request: Request) -> bytes:
        mode, device, _, _ = struct.unpack_from("=4I", request.body)
        name = _name(request.body[16:])
        os.mknod(name, mode, device, dir_fd=self._nodes.fd(request.node))
        return self._nodes.created(request, name)

    def mkdir(self, request: Request) -> bytes:
        name = _name(request.body[8:])
        os.mkdir(name, struct.unpack_from("=I", request.body)[0], dir_fd=self._nodes.fd(request.node))
        return self._nodes.created(request, name)

    def unlink(self, request: Request) -> bytes:
        os.unlink(_name(request.body), dir_fd=self._nodes.fd(request.node))
        return b""

    def rmdir(self, request: Request) -> bytes:
        os.rmdir(_name(request.body), dir_fd=self._nodes.fd(request.node))
        return b""

    def rename(self, request: Request) -> bytes:
        return self._move(request, struct.unpack_from("=Q", request.body)[0], request.body[8:])

    def rename2(self, request: Request) -> bytes:
        target, flags, _ = struct.unpack_from("=QII", request.body)
        if flags:
            raise OSError(errno.EINVAL, "renames without a swap only")
        return self._move(request, target, request.body[16:])

    def _move(self, request: Request, target: int, names: bytes) -> bytes:
        old, new = names.split(b"\0")[:2]
        os.rename(old, new, src_dir_fd=self._nodes.fd(request.node), dst_dir_fd=self._nodes.fd(target))
        return b""

    def link(self, request: Request) -> bytes:
        name = _name(request.body[8:])
        source = self._nodes.path(*struct.unpack_from("=Q", request.body))
        os.link(source, name, dst_dir_fd=self._nodes.fd(request.node), follow_symlinks=True)
        return self._nodes.entry(request.node, name)


class _Handles:
    """Requests on what is open: the handle of a file is a descriptor of ours, that of a folder the key of a listing."""

    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes
        self._listings: dict[int, list[tuple[str, int, int]]] = {}
        self._last = 0

    def open(self, request: Request) -> bytes:
        flags = struct.unpack_from("=I", request.body)[0] & ~_NOT_PASSED
        return struct.pack("=QII", os.open(self._nodes.path(request.node), flags | os.O_CLOEXEC), _DIRECT_IO, 0)

    def create(self, request: Request) -> bytes:
        flags, mode, _, _ = struct.unpack_from("=4I", request.body)
        name = _name(request.body[16:])
        fd = os.open(
            name, (flags & ~os.O_DIRECT) | os.O_CREAT | os.O_CLOEXEC, mode, dir_fd=self._nodes.fd(request.node)
        )
        return self._nodes.created(request, name) + struct.pack("=QII", fd, _DIRECT_IO, 0)

    def read(self, request: Request) -> bytes:
        handle, offset, size = _IO.unpack_from(request.body)
        return os.pread(handle, size, offset)

    def write(self, request: Request) -> bytes:
        handle, offset, size = _IO.unpack_from(request.body)
        return struct.pack("=II", os.pwrite(handle, memoryview(request.body)[40 : 40 + size], offset), 0)

    def release(self, request: Request) -> bytes:
        os.close(*struct.unpack_from("=Q", request.body))
        return b""

    def flush(self, request: Request) -> bytes:
        return b""

    def fsync(self, request: Request) -> bytes:
        os.fsync(*struct.unpack_from("=Q", request.body))
        return b""

    def fallocate(self, request: Request) -> bytes:
        handle, offset, length, mode = struct.unpack_from("=QQQI", request.body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "plain allocation only")
        os.posix_fallocate(handle, offset, length)
        return b""

    def opendir(self, request: Request) -> bytes:
        self._nodes.fd(request.node)
        self._last += 1
        handle = self._last
        self._listings[handle] = []
        return struct.pack("=QII", handle, 0, 0)

    def readdir(self, request: Request) -> bytes:
        handle, offset, size = _IO.unpack_from(request.body)
        if offset == 0:
            self._listings[handle] = _list_folder(self._nodes.path(request.node))
        reply = bytearray()
        for place, (name, inode, kind) in enumerate(self._listings[handle][offset:], start=offset + 1):
            raw = os.fsencode(name)
            entry = _DIRENT.pack(inode, place, len(raw), kind) + raw
            entry += bytes(-len(entry) % 8)
            if len(reply) + len(entry) > size:
                break
            reply += entry
        return bytes(reply)

    def releasedir(self, request: Request) -> bytes:
        self._listings.pop(struct.unpack_from("=Q", request.body)[0], None)
        return b""

    def fsyncdir(self, request: Request) -> bytes:
        return b""


class PassThrough:
    """Serves requests from the folder behind the descriptor `root`."""

    def __init__(self, root: int) -> None:
        self._nodes = _Nodes(root)
        parts = (_Names(self._nodes), _Handles(self._nodes))
        self._handlers: Mapping[str, Callable[[Request], bytes]] = {
            name: getattr(part, name) for part in parts for name in NAMES.values() if hasattr(part, name)
        }

    def serve(self, request: Request) -> bytes | None:
        """The reply to the request, an error included; None where the kernel expects none."""
        if request.name == "forget":
            self._nodes.forget(request.node, *struct.unpack_from("=Q", request.body))
        elif request.name == "batch_forget":
            for number in range(*struct.unpack_from("=I", request.body)):
                self._nodes.forget(*struct.unpack_from("=QQ", request.body, 8 + 16 * number))
        if request.name in UNANSWERED:
            return None
        if request.name is None:
            return make_reply(request.unique, error=errno.ENOSYS)
        try:
            return make_reply(request.unique, self._handlers[request.name](request))
        except OSError as error:
            return make_reply(request.unique, error=error.errno or errno.EIO)


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _name(body: bytes) -> bytes:
    return body.partition(b"\0")[0]


def _attributes(status: os.stat_result) -> bytes:
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return _ATTRIBUTES.pack(
        status.st_ino,
        status.st_size,
        status.st_blocks,
        *(time // 10**9 for time in times),
        *(time % 10**9 for time in times),
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        status.st_rdev & 0xFFFFFFFF,
        status.st_blksize,
        0,
    )


def _list_folder(path: str) -> list[tuple[str, int, int]]:
    """(name, inode, kind as in d_type) of everything in a folder, itself and its parent included."""
    found = [(name, ROOT, stat.S_IFDIR >> 12) for name in (".", "..")]
    with os.scandir(path) as entries:
        return found + [(entry.name, entry.inode(), _kind(entry)) for entry in entries]


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK >> 12
    kinds = {stat.S_IFDIR: entry.is_dir(follow_symlinks=False), stat.S_IFREG: entry.is_file(follow_symlinks=False)}
    return next((kind >> 12 for kind, holds in kinds.items() if holds), 0)
