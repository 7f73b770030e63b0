"""The machine that has a user's store: with a home on a network file system, one of several login nodes.

The store is then on a local disk of the login node on which the first command ran, and a file in the home names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ascendrun.node.agent.checks import network_of
from ascendrun.node.files import claim_json, make_private_dir, read_json, write_json
from ascendrun.node.layout import local_base
from ascendrun.node.op_errors import OperationError


def on_local_disk(state_dir: Path) -> Path:
    """Return the default state directory, in place of one on a network file system."""
    return state_dir if network_of(str(state_dir)) is None else _local_store()


def other_owner(state_dir: Path) -> str | None:
    """Return the other machine that has this store; None: this one, no machine yet, or each machine has its own."""
    host = _read_pointer().get("host") if state_dir == _local_store() else None
    return None if host in (None, os.uname().nodename) else str(host)


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
    return {key: value for key, value in _read_pointer().items() if key != "host"}


def standby_dir(state_dir: Path) -> Path:
    """Return the directory of the copy of a head; a machine that has it is a standby, until it becomes the head."""
    return state_dir.with_name(f"{state_dir.name}.standby")


def may_be_head(state_dir: Path) -> bool:
    """Return whether this machine has the jobs of a head with a standby: not a copy, nor a superseded store."""
    try:
        head = None if standby_dir(state_dir).is_dir() else read_json(str(state_dir / "head.json"))
    except OSError:
        return False
    return head is not None and head.get("superseded") is None


def is_this_machine(head: str) -> bool:
    """Return whether a user@host names this machine."""
    return head.rpartition("@")[2] in (*os.uname().nodename.split(".")[:1], os.uname().nodename)


def _read_pointer() -> dict[str, Any]:
    try:
        found = read_json(str(_pointer()))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _local_store() -> Path:
    return Path(local_base(), "state")


def _pointer() -> Path:
    return Path(os.path.expanduser("~"), ".ascendrun", "head.json")
