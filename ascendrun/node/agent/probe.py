"""How this node reaches its peers."""

from __future__ import annotations

import threading
import time

from ascendrun.node.agent import routes
from ascendrun.node.files import free_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RESOLVE_S = 8.0
"""All peers are looked up side by side; who has no answer by then is told as unknown."""
PARALLEL = 32


def probe(root: str, peers: dict[str, list[str]]) -> dict[str, Any]:
    """{at_ns, free_bytes, routes}: each peer's route is {interface, source}, None: unknown."""
    late = {"interface": None, "source": None}
    found: dict[str, Any] = {}
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
