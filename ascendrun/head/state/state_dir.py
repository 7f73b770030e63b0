"""The state directory: private, and on a disk that meets the requirements of SQLite."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ascendrun.core.errors import AscendrunError
from ascendrun.text import Text

_NETWORK_FILESYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "glusterfs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.juicefs",
        "9p",
        "afs",
    }
)


class StoreUnusableError(AscendrunError):
    """The state directory cannot hold the store: a network file system, no space, a file of a newer release."""

    code = "state-unusable"
    exit_code = 8


def make_state_dir(state_dir: Path) -> None:
    """Make the directory, private. Raises StoreUnusableError on a network file system or if it cannot be made."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(state_dir, 0o700)
    except OSError as error:
        raise StoreUnusableError(
            Text("store.cannot-create", "cannot create {path}: {error}", path=str(state_dir), error=error.strerror),
            hint=Text("store.own-directory", "set ASCENDRUN_STATE_DIR to a directory of your user on a local disk"),
        ) from error
    kind = filesystem_of(state_dir, Path("/proc/self/mounts").read_text())
    if kind in _NETWORK_FILESYSTEMS:
        raise StoreUnusableError(
            Text(
                "store.network-file-system",
                "{path} is on {kind}; SQLite requires a local file system",
                path=str(state_dir),
                kind=kind,
            ),
            hint=Text("store.local-directory", "export ASCENDRUN_STATE_DIR=/var/tmp/$USER/ascendrun"),
        )


def make_private_file(path: Path) -> None:
    """Make an empty file that only its owner may read, if it is missing. Raises OSError.

    An existing file is not even opened: closing it would drop all locks that SQLite has on it in this process.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def filesystem_of(path: Path, mounts: str) -> str | None:
    """Return the file system type of `path`, from the text of /proc/self/mounts; None: not listed."""
    best: tuple[int, str | None] = (-1, None)
    target = os.path.realpath(path)
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].encode().decode("unicode_escape")
        inside = point == "/" or target == point or target.startswith(point + "/")
        if inside and len(point) >= best[0]:
            best = (len(point), fields[2])
    return best[1]


def spool_dir(state_dir: Path, job_id: str, attempt: int) -> Path:
    """Return the directory of copies of an attempt's node files: <host>/<file>.<generation>, as in `node/layout.py`."""
    return state_dir / "jobs" / job_id / f"attempt-{attempt}"


def make_spool_dir(folder: Path) -> None:
    """Make a host's directory in an attempt's spool; private at every level, whatever the umask. Raises OSError."""
    for level in (*reversed(tuple(folder.parents)[:3]), folder):
        level.mkdir(mode=0o700, exist_ok=True)


SPOOL_COMPLETE = "complete"
"""File in an attempt's spool directory: the collector has every byte of every file there."""
