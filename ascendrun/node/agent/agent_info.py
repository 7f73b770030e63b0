"""The first event of an agent: facts of this node."""

from __future__ import annotations

import os
import pwd
import sys
import time

from ascendrun.node import procs, wire

try:
    from _sha256 import sha256  # type: ignore[import-not-found, unused-ignore]  # Python's own; hashlib brings OpenSSL, for 4 ms at each start
except ImportError:
    from hashlib import sha256

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
        "user": user_name(),
        "uid": os.geteuid(),
        "root": root,
        "python": sys.executable or os.readlink("/proc/self/exe"),
        "python_version": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": os.uname().release,
        "arch": os.uname().machine,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "at_ns": time.time_ns(),
    }


def user_name() -> str:
    """Return the account's name, or its number where it has no name (containers)."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
