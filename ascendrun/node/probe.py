"""What this node says of itself, and how it reaches its peers."""

from __future__ import annotations

import hashlib
import os
import pwd
import socket
import sys
import threading
import time

from ascendrun.node import procs, routes, wire
from ascendrun.node.files import free_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List

RESOLVE_S = 8.0
"""All peers are looked up side by side; who has no answer by then is told as unknown."""
PARALLEL = 32


def hello(root: str, agent_path: str) -> Dict[str, Any]:
    """The agent's first event."""
    with open(agent_path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    return {
        "event": "hello", "protocol": wire.PROTOCOL, "agent_sha256": digest, "pid": os.getpid(),
        "boot_id": procs.boot_id(), "machine_id": procs.read_line("/etc/machine-id"),
        "hostname": socket.gethostname(), "user": user_name(), "uid": os.geteuid(), "root": root,
        "python": sys.executable or os.readlink("/proc/self/exe"),
        "python_version": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": os.uname().release, "arch": os.uname().machine, "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "at_ns": time.time_ns(),
    }


def user_name() -> str:
    """The account's name; its number where it has none (containers)."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def probe(root: str, peers: Dict[str, List[str]]) -> Dict[str, Any]:
    """{at_ns, free_bytes, routes}: each peer's route is {interface, source, error}, None: unknown, `error` says why."""
    late = {"interface": None, "source": None, "error": "no answer from the name service within %g s" % RESOLVE_S}
    found: Dict[str, Any] = {}
    names = list(peers)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not names:
                    return
                name = names.pop()
            route = routes.find_route(peers[name])
            with lock:
                found[name] = route

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(PARALLEL, len(peers)))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RESOLVE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        answers = {name: found.get(name, late) for name in peers}
    return {"at_ns": time.time_ns(), "free_bytes": free_bytes(root), "routes": answers}
