"""Notices between the supervisors of an attempt that the ranks of a host have ended: without a controller no other
process ends those of the other hosts. A datagram to UDP port MASTER_PORT of each, with an HMAC."""

from __future__ import annotations

import contextlib
import hmac
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST = 1000


class Peers:
    """Without `peers` in the attempt, or with the port in use, nothing is sent and nothing received."""

    def __init__(self, prepared: dict[str, Any], port: int | None) -> None:
        peers = prepared.get("peers") or {"addresses": [], "key": "", "after_s": 0.0}
        tag, own, key = prepared["tag"], int(prepared["node_rank"]), peers["key"].encode("ascii")
        self._after_s = float(peers["after_s"])
        self._ends = [(address, port or 0) for address in peers["addresses"]]
        notices = [
            hmac.new(key, b"%d of %s" % (node, tag.encode()), "sha256").digest() for node in range(len(self._ends))
        ]
        self._notice, self._nodes = notices[own : own + 1], {notice: node for node, notice in enumerate(notices)}
        self._ended: dict[int | None, float] = {}
        self._socket = _bind(self._ends.pop(own)) if port and self._ends else None

    def tick(self, *, notify: bool) -> int | None:
        """Receive notices, and send them if `notify`; return the number of a node whose ranks ended `after_s` ago."""
        if self._socket is None:
            return None
        with contextlib.suppress(OSError):
            for _ in range(MOST):
                self._ended.setdefault(self._nodes.get(self._socket.recv(64)), time.monotonic())
        for end in self._ends if notify else ():
            with contextlib.suppress(OSError):  # a name, or a host that is gone
                self._socket.sendto(self._notice[0], end)
        until = time.monotonic() - self._after_s
        return next((node for node, at_s in self._ended.items() if node is not None and at_s <= until), None)


def _bind(end: tuple[str, int]) -> socket.socket | None:
    bound = socket.socket(socket.AF_INET6 if ":" in end[0] else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        bound.bind(end)
    except OSError:
        bound.close()
        return None
    bound.setblocking(False)
    return bound
