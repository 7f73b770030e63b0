"""The state directory: private, and on a disk that meets the requirements of SQLite."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ascendrun.core.errors import AscendrunError
from ascendrun.core.pulse import Clock, Pulse
from ascendrun.head.state.store_place import claim, other_owner
from ascendrun.node.agent.checks import network_of
from ascendrun.node.files import replace_file
from ascendrun.node.op_errors import OperationError
from ascendrun.text import Text


class StoreUnusableError(AscendrunError, code="state-unusable"):
    """The state directory cannot hold the store: a network file system, no space, a file of a newer release."""


class StoreDamagedError(StoreUnusableError, code="state-damaged"):
    """A file of the state directory is damaged, missing or not the one that was written last.

    The next controller, or the running one when it is requested to check, replaces it.
    """


def make_state_dir(state_dir: Path) -> None:
    """Make the directory, private. Raises StoreUnusableError on a network file system, if it cannot be made, and if
    another machine has the store."""
    try:
        claim(state_dir)
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(state_dir, 0o700)
    except (OSError, OperationError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreUnusableError(
            Text("store.cannot-create", "cannot create {path}: {error}", path=str(state_dir), error=why),
            hint=Text("store.own-directory", "set ASCENDRUN_STATE_DIR to a directory of your user on a local disk"),
        ) from error
    owner = other_owner(state_dir)
    if owner is not None:
        raise StoreUnusableError.of(
            "store.elsewhere",
            "the jobs of this user are on {host}",
            "`ascendrun controller move` continues here",
            host=owner,
        )
    kind = network_of(str(state_dir))
    if kind is not None:
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


def set_aside(path: Path) -> Path | None:
    """Move a database and its log to a new directory in damaged/; return the new path of the database.

    None: there was nothing to move. The oldest of more than KEPT_DAMAGED directories is removed. Raises OSError.
    """
    parts = [name for name in (path.name, f"{path.name}-wal", f"{path.name}-shm") if (path.parent / name).exists()]
    if not parts:
        return None
    base = path.parent / "damaged"
    base.mkdir(mode=0o700, exist_ok=True)
    number = 1 + max((int(entry.name) for entry in base.iterdir() if entry.name.isdigit()), default=0)
    folder = base / str(number)
    folder.mkdir(mode=0o700)
    for name in parts:
        os.rename(path.parent / name, folder / name)
    if (base / str(number - KEPT_DAMAGED)).is_dir():
        import shutil

        shutil.rmtree(base / str(number - KEPT_DAMAGED), ignore_errors=True)
    return folder / path.name


def tree_file(state_dir: Path, sha256: str) -> Path:
    """Return the head's file of a packed tree."""
    return state_dir / "trees" / f"{sha256}.tar"


def spool_dir(state_dir: Path, job_id: str, attempt: int) -> Path:
    """Return the directory of copies of an attempt's node files: <host>/<file>.<generation>, as in `node/layout.py`."""
    return state_dir / "jobs" / job_id / f"attempt-{attempt}"


def is_spool_of(attempt_dir: Path, tag: str) -> bool:
    """Return whether an attempt's spool directory is of this attempt, or of none yet."""
    try:
        return (attempt_dir / SPOOL_RUN).read_text() in (tag, "")
    except OSError:
        return True


def claim_spool_dir(attempt_dir: Path, tag: str) -> None:
    """Make an attempt's spool directory and mark it; one of another run with the same job id is moved aside.

    Raises OSError.
    """
    if not is_spool_of(attempt_dir, tag):
        number = sum(1 for _ in attempt_dir.parent.glob(f"{attempt_dir.name}.other-*"))
        attempt_dir.rename(attempt_dir.with_name(f"{attempt_dir.name}.other-{number + 1}"))
    make_spool_dir(attempt_dir)
    replace_file(str(attempt_dir / SPOOL_RUN), tag.encode(), durable=False)


def write_placement(attempt_dir: Path, hosts: Sequence[str]) -> None:
    """Record the hosts of an attempt, in the order of their node ranks, next to their records. Raises OSError."""
    replace_file(str(attempt_dir / SPOOL_HOSTS), "".join(f"{host}\n" for host in hosts).encode(), durable=False)


def read_placement(attempt_dir: Path) -> tuple[str, ...]:
    """Return what `write_placement` recorded, (): nothing."""
    try:
        return tuple((attempt_dir / SPOOL_HOSTS).read_text().split())
    except (OSError, ValueError):
        return ()


def read_host_facts(attempt_dir: Path) -> dict[str, dict[str, Any]]:
    """Return what each host reported before the attempt started, as recorded_facts; {}: nothing was stored."""
    return read_values(attempt_dir / SPOOL_FACTS)


def read_values(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file; {}: missing or damaged."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


SPOOL_LEVELS = 4
"""Directories of a host in an attempt's spool, with itself: jobs, job, attempt, host."""


def make_spool_dir(folder: Path, levels: int = SPOOL_LEVELS) -> None:
    """Make a host's directory in an attempt's spool, and `levels` - 1 above it; private at every level, whatever the
    umask. Mostly those above are there: for hundreds of hosts each system call counts. Raises OSError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if levels == 1:
            raise
        make_spool_dir(folder.parent, levels - 1)
        folder.mkdir(mode=0o700, exist_ok=True)


def open_to_append(folder: Path, name: str) -> int:
    """Open a file of a host's directory in an attempt's spool; both are made if they are missing. Raises OSError."""
    path, flags = f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)  # not after a check: each system call costs a turn of the interpreter
    except FileNotFoundError:
        make_spool_dir(folder)
        return os.open(path, flags, 0o600)


def clock_now() -> Clock:
    """Return the present moment."""
    return Clock(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot_id())


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_pulse(state_dir: Path) -> Pulse | None:
    """Return the newest pulse; None: none was written, or it cannot be read."""
    try:
        return Pulse.from_json(json.loads((state_dir / PULSE_NAME).read_bytes()))
    except (OSError, AttributeError, TypeError, ValueError):
        return None


PULSE_NAME = "pulse.json"
SPOOL_RUN = "run"
"""File in an attempt's spool directory: the tag of the attempt."""
SPOOL_HOSTS = "hosts"
"""File in an attempt's spool directory: its hosts, one on each line."""
SPOOL_FACTS = "facts.json"
"""File in an attempt's spool directory: by host, what it reported before the start (recorded_facts)."""
SPOOL_STACKS = "stacks.json"
"""File in a host's spool directory: the newest stacks of its ranks that the hang monitor took, {at_s, ranks}."""
REBUILT_FILE = "rebuilt.json"
"""File in the state directory: what was rebuilt after damage, until a command has printed it."""
KEPT_DAMAGED = 10
"""Damaged databases that are kept."""

SPOOL_COMPLETE = "complete"
"""File in an attempt's spool directory: the collector has every byte of every file there."""
