"""What a node says of itself when probed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """How a node reaches a peer: the interface, and the address of its own that the peer will see."""

    interface: str
    source: str


@dataclass(frozen=True)
class NodeReport:
    """Facts of one node, read through its agent. None: could not look.

    `root`: the agent's private folder on the node, absolute. `routes`: by the peer's host name; a peer
    that the node cannot resolve or route to is missing. `clock_offset_s`: node clock minus head clock.
    """

    host: str
    root: str
    hostname: str
    boot_id: str
    machine_id: str | None
    user: str
    python: str
    python_version: str
    kernel: str
    arch: str
    cpus: int
    memory_bytes: int | None
    free_bytes: int | None
    clock_offset_s: float | None
    routes: Mapping[str, Route]
