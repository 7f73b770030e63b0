"""What a node must offer before it says ready: folders that take writes, space, a command that can run."""

from __future__ import annotations

import os

from ascendrun.node.files import free_bytes
from ascendrun.node.op_errors import OperationError, refusal_of
from ascendrun.node.ranks import to_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

ROOM_BYTES = 32 << 20
"""Less than this free, and the records of a run are not safe."""


def check_command(argv0: str, *, cwd: str, environ: Mapping[str, str]) -> None:
    """Raises OperationError("python-missing") when the rank's command cannot be run, naming where it was looked for."""
    if "/" in argv0:
        path = os.path.join(cwd, argv0)
        if not os.path.exists(to_bytes(path)):
            raise OperationError(
                "python-missing",
                f"{path} does not exist on this node",
                "install it there, or set `python:` in the job file",
            )
        if not os.access(to_bytes(path), os.X_OK) or os.path.isdir(to_bytes(path)):
            raise OperationError("python-missing", f"{path} is not executable on this node", f"chmod +x {path}")
        return
    search = environ.get("PATH", os.defpath)
    if find_command(argv0, search) is None:
        raise OperationError(
            "python-missing",
            f"no command {argv0} in PATH on this node (looked in {search})",
            "set `python:` to a full path in the job file, or extend PATH in its `env` or `setup`",
        )


def find_command(name: str, search: str) -> str | None:
    """The executable file that this PATH leads to; None: it leads to none."""
    for folder in search.split(os.pathsep):
        path = os.path.join(folder, name)
        if os.access(to_bytes(path), os.X_OK) and not os.path.isdir(to_bytes(path)):
            return path
    return None


def check_folder(path: str, *, make: bool) -> None:
    """Raises OperationError("bad-folder" or "disk-full") unless a file can be made, renamed and removed there."""
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
        raise refusal_of(error, f"cannot write in {path}") from error


def check_room(path: str) -> None:
    """Raises OperationError("disk-full") when the file system of `path` is nearly full."""
    free = free_bytes(path)
    found = os.statvfs(path)
    if free < ROOM_BYTES:
        raise OperationError("disk-full", "only %d MB are free in %s" % (free >> 20, path), "free some space there")
    if found.f_files and not found.f_favail:
        raise OperationError("disk-full", f"no free inodes in {path}", "remove files there")


def check_cwd(path: str) -> None:
    """Raises OperationError("bad-folder") unless the ranks can be started there."""
    if not os.path.isdir(to_bytes(path)):
        raise OperationError("bad-folder", f"the working folder {path} does not exist on this node", "create it there")
    if not os.access(to_bytes(path), os.X_OK):
        raise OperationError("bad-folder", f"the working folder {path} cannot be entered", "check its mode and owner")


def checkpoint_folders(ranks: Any) -> dict[str, None]:
    """The folders that the ranks will save to, each once, in order."""
    return {
        rank["env"]["ASCENDRUN_CHECKPOINT_DIR"]: None for rank in ranks if rank["env"].get("ASCENDRUN_CHECKPOINT_DIR")
    }
