"""Requirements of a node that is ready: writable directories, space, a command that can run."""

from __future__ import annotations

import os

from ascendrun.node.files import free_bytes, to_bytes
from ascendrun.node.op_errors import OperationError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

NETWORK = """nfs nfs4 cifs smb3 smbfs ceph lustre gpfs beegfs glusterfs 9p afs gfs2 ocfs2 orangefs panfs wekafs dpc
yrfs""".split()
LOCAL_FUSE = "fuse.fuse-overlayfs fuse.gocryptfs fuse.encfs fuse.bindfs fuse.mergerfs fuse.ntfs-3g".split()
"""Types of file systems."""

ROOM_BYTES = 32 << 20
"""Minimum free space for the records of a run."""


def check_command(argv0: str, *, cwd: str, environ: Mapping[str, str]) -> None:
    """Raise OperationError("python-missing") with the search path when the rank's command cannot be run."""
    if "/" in argv0:
        path = os.path.join(cwd, argv0)
        if not os.path.exists(to_bytes(path)):
            raise OperationError("python-missing", "command-missing", path=path)
        if not os.access(to_bytes(path), os.X_OK) or os.path.isdir(to_bytes(path)):
            raise OperationError("python-missing", "command-not-executable", path=path)
        return
    search = environ.get("PATH", os.defpath)
    if find_command(argv0, search) is None:
        raise OperationError("python-missing", "command-not-in-path", command=argv0, search=search)


def find_command(name: str, search: str) -> str | None:
    """Return the executable file for this PATH; None: not found."""
    for folder in search.split(os.pathsep):
        path = os.path.join(folder, name)
        if os.access(to_bytes(path), os.X_OK) and not os.path.isdir(to_bytes(path)):
            return path
    return None


def check_directory(path: str, *, make: bool) -> None:
    """Raise OperationError("bad-directory" or "disk-full") unless a file can be made, renamed and removed there."""
    name = to_bytes(path)
    try:
        if make:
            os.makedirs(name, 0o700, exist_ok=True)
        probe = os.path.join(name, b".ascendrun-probe-%d-%s" % (os.getpid(), os.urandom(4).hex().encode()))
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"x" * 4096)
            os.rename(probe, probe + b"~")
            probe += b"~"
        finally:
            os.close(fd)
            os.unlink(probe)
    except OSError as error:
        raise os_failure(error, "write-in", path=path) from error


def check_room(path: str) -> None:
    """Raise OperationError("disk-full") when the file system of `path` is nearly full."""
    free = free_bytes(path)
    found = os.statvfs(path)
    if free < ROOM_BYTES:
        raise OperationError("disk-full", "disk-nearly-full", path=path, free_bytes=free)
    if found.f_files and not found.f_favail:
        raise OperationError("disk-full", "no-inodes", path=path)


def standing(path: str) -> str:
    """Return the path itself, or the nearest existing directory above it."""
    path = os.path.abspath(path)
    while not os.path.exists(to_bytes(path)) and path != "/":
        path = os.path.dirname(path)
    return path


def network_of(path: str) -> str | None:
    """Return the type of the network file system that has `path`, or will have it; None: a local one, or unknown. FUSE
    with a subtype counts unless known."""
    kind = file_system_of(standing(path))
    return kind if is_network(kind) else None


def file_system_of(path: str) -> str:
    """Return the type of the file system of `path`; "": unknown."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return parse_file_system(file.read(), os.stat(to_bytes(path)).st_dev)
    except OSError:
        return ""


def is_network(file_system: str) -> bool:
    return file_system in NETWORK or (file_system.startswith("fuse.") and file_system not in LOCAL_FUSE)


def parse_file_system(mountinfo: str, device: int) -> str:
    """Return the type of the mounted file system with this device number; "": none (btrfs has others)."""
    wanted = "%d:%d" % (os.major(device), os.minor(device))
    for line in mountinfo.splitlines():
        place, _, kind = line.partition(" - ")
        if place.split(" ")[2:3] == [wanted]:
            return kind.split(" ")[0]
    return ""


def check_cwd(path: str) -> None:
    """Raise OperationError("bad-directory") unless the ranks can be started there."""
    if not os.path.isdir(to_bytes(path)):
        raise OperationError("bad-directory", "workdir-missing", path=path)
    if not os.access(to_bytes(path), os.X_OK):
        raise OperationError("bad-directory", "workdir-not-accessible", path=path)
