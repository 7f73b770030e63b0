"""The machine that has a user's store: with a home on a network file system, one of several login nodes.

The store is then on a local disk of the login node on which the first command ran, and a file in the home names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ascendrun.node.files import claim_json, make_private_dir, read_json, write_json
from ascendrun.node.layout import local_base
from ascendrun.node.op_errors import OperationError

NETWORK_FILESYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 lustre gpfs beegfs ceph glusterfs fuse.sshfs fuse.glusterfs fuse.juicefs 9p afs".split()
)
_POINTER = Path(".ascendrun", "head.json")


def kind_of(path: Path) -> str | None:
    """Return the type of the file system of `path`; None: unknown."""
    return filesystem_of(path, Path("/proc/self/mounts").read_text())


def on_local_disk(state_dir: Path) -> Path:
    """Return the default state directory, in place of one on a network file system."""
    return _local_store() if kind_of(state_dir) in NETWORK_FILESYSTEMS else state_dir


def other_owner(state_dir: Path) -> str | None:
    """Return the other machine that has this store; None: this one, no machine yet, or each machine has its own."""
    if state_dir != _local_store():
        return None
    try:
        found: Any = read_json(str(_pointer()))
        return None if found["host"] == os.uname().nodename else str(found["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def claim(state_dir: Path, *, takes_over: bool = False) -> None:
    """Write down that this machine has the store; unless `takes_over` only if none has it. Raises OSError,
    OperationError."""
    if state_dir == _local_store():
        make_private_dir(local_base())
        make_private_dir(str(_pointer().parent))
        write = write_json if takes_over else claim_json
        write(str(_pointer()), {"host": os.uname().nodename})


def note_head(state_dir: Path, values: Mapping[str, Any]) -> None:
    """Write down what another machine needs to go on without this store, unless it has. Never raises."""
    if state_dir == _local_store() and other_owner(state_dir) is None:
        with suppress(OSError, OperationError):
            write_json(str(_pointer()), {**values, "host": os.uname().nodename})


def noted_head() -> dict[str, Any]:
    """Return what the machine with the store has written down by `note_head`; {}: nothing."""
    try:
        found: dict[str, Any] = read_json(str(_pointer())) or {}
        return {key: value for key, value in found.items() if key != "host"}
    except (OSError, ValueError, AttributeError):
        return {}


def _local_store() -> Path:
    return Path(local_base(), "state")


def _pointer() -> Path:
    return Path(os.path.expanduser("~"), _POINTER)


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
