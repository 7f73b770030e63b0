"""The report of a node about itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ascendrun.core.dataclass_json import load_dataclass


@dataclass(frozen=True)
class Route:
    """How a node reaches a peer: the interface, and the node's address that the peer will see."""

    interface: str
    source: str


@dataclass(frozen=True)
class NodeReport:
    """Facts of one node, read through its agent. None: could not look.

    `root`: the agent's private folder on the node, absolute. `routes`: by the peer's host name; a peer
    that the node cannot resolve or route to is missing. `clock_offset_s`: node clock minus head clock. `login_s`: until
    the login's shell ran our command. `login_noise`: what its startup files wrote.
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
    uid: int | None = None
    is_local: bool | None = None
    login_s: float | None = None
    login_noise: str | None = None


def report_values(report: NodeReport, everyone: Collection[str] = ()) -> dict[str, Any]:
    """A report as plain data, for the socket. Routes as [interface, source, peers]: all peers share a few.

    peers null: all of `everyone` but the host itself. A thousand hosts would else name each other a million times.
    """
    groups: dict[Route, list[str]] = {}
    for peer, route in report.routes.items():
        groups.setdefault(route, []).append(peer)
    values = dict(vars(report))
    others = {*everyone} - {report.host}
    values["routes"] = [
        [route.interface, route.source, None if len(peers) == len(others) and others.issuperset(peers) else peers]
        for route, peers in groups.items()
    ]
    return values


def load_report(values: Mapping[str, Any], everyone: Collection[str] = ()) -> NodeReport:
    """The report of `report_values`, with the same `everyone`."""
    routes: dict[str, Route] = {}
    for interface, source, peers in values["routes"]:
        if peers is None:
            routes = dict.fromkeys(everyone, Route(interface, source))
            routes.pop(values["host"], None)
        else:
            routes.update(dict.fromkeys(peers, Route(interface, source)))
    return load_dataclass(NodeReport, {**values, "routes": routes})
