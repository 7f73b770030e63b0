"""The first event of an agent: facts of this node."""

from __future__ import annotations

import os
import sys
import time

from ascendrun.node import layout, procs, wire
from ascendrun.node.files import claim_json, make_private_dir, read_json, remove_tree
from ascendrun.node.layout import sha256
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def hello(root: str, agent_path: str) -> dict[str, Any]:
    """Return the agent's first event."""
    with open(agent_path, "rb") as file:
        digest = sha256(file.read()).hexdigest()
    return {
        "event": "hello",
        "protocol": wire.PROTOCOL,
        "agent_sha256": digest,
        "pid": os.getpid(),
        "boot_id": procs.boot_id(),
        "machine_id": procs.read_line("/etc/machine-id"),
        "hostname": os.uname().nodename,
        "user": procs.user_name(os.geteuid()),
        "uid": os.geteuid(),
        "root": root,
        "python": sys.executable or os.readlink("/proc/self/exe"),
        "python_version": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": os.uname().release,
        "arch": os.uname().machine,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "at_ns": time.time_ns(),
        "machine_key": layout.machine_key(),
        "net_ns": inode("/proc/self/ns/net"),
        **node_state(root),
    }


def node_state(root: str) -> dict[str, Any]:
    """Return {incarnation, neighbours, live}: the id of this machine's directory in ROOT, made once; the keys of the
    other machines that use ROOT; the tags of attempts that were prepared and have not ended. None: not readable."""
    folder = layout.node_dir(root)
    path = os.path.join(folder, "incarnation.json")
    try:
        found = read_json(path)
        if found is None:
            make_private_dir(layout.live_dir(root))
            claim_json(path, {"incarnation": os.urandom(8).hex()})
            found = read_json(path) or {}
        live = [tag for tag in sorted(os.listdir(layout.live_dir(root))) if is_live(root, tag)]
        neighbours = sorted(name for name in os.listdir(os.path.dirname(folder)) if name != layout.machine_key())
    except (OSError, OperationError):
        return {"incarnation": None, "neighbours": None, "live": None}
    return {"incarnation": found.get("incarnation"), "neighbours": neighbours, "live": live}


def is_live(root: str, tag: str) -> bool:
    """Return whether the listed attempt has not ended; otherwise remove it from the list: its supervisor could not."""
    try:
        folder = layout.attempt_dir(root, tag)
    except ValueError:  # NFS keeps removed files that are open under other names
        return False
    if not os.path.exists(os.path.join(folder, layout.ENDED)):
        return True
    remove_tree(layout.live_mark(folder))
    return False


def inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
