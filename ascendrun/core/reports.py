"""The report of a node about itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any, Protocol

from ascendrun.core.dataclass import dataclass, load_dataclass


@dataclass(frozen=True)
class Route:
    """Route from a node to a peer: the interface, and the node's address that the peer will see."""

    interface: str
    source: str


@dataclass(frozen=True)
class NodeReport:
    """Facts of one node, read through its agent. None: not readable.

    `root`: the agent's private directory on the node, absolute. `routes`: by the peer's host name; a peer that the node
    cannot resolve or route to is missing. `clock_offset_s`: node clock minus head clock. `login_s`: seconds until the
    login's shell ran the command. `login_noise`: output of its startup files. `machine_key`, `incarnation`, `net_ns`,
    `neighbours`, `live`: see AgentInfo; None with an older agent.
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
    routes: Mapping[str, Route] = field(metadata={"read": None})  # as load_report makes them
    uid: int | None = None
    is_local: bool | None = None
    login_s: float | None = None
    login_noise: str | None = None
    machine_key: str | None = None
    incarnation: str | None = None
    net_ns: int | None = None
    neighbours: tuple[str, ...] | None = None
    live: tuple[str, ...] | None = None


class HomeUser(Protocol):
    """A NodeReport, or other facts of a node."""

    @property
    def root(self) -> str | None: ...
    @property
    def machine_key(self) -> str | None: ...
    @property
    def neighbours(self) -> tuple[str, ...] | None: ...


def shared_homes(machines: Mapping[str, HomeUser]) -> dict[str, str]:
    """Return, by host, the host that stands for its home directory: itself unless nodes share a home."""
    by_key: dict[tuple[str | None, str | None], list[str]] = {}
    for host, machine in machines.items():
        by_key.setdefault((machine.root, machine.machine_key), []).append(host)
    homes: dict[str, str] = {}
    # Whoever came last to a shared home lists all others.
    for host, machine in sorted(machines.items(), key=lambda item: -len(item[1].neighbours or ())):
        if host not in homes:
            homes[host] = host
            for key in machine.neighbours or ():
                for other in by_key.get((machine.root, key), ()):
                    homes.setdefault(other, host)
    return homes


def report_values(report: NodeReport, everyone: Collection[str] = ()) -> dict[str, Any]:
    """Return a report as plain data for the socket. Routes as [interface, source, peers]: all peers share a few.

    peers null: all of `everyone` except the host itself. Otherwise a thousand hosts would give a million names.
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
    """Return the report of `report_values`, with the same `everyone`."""
    routes: dict[str, Route] = {}
    for interface, source, peers in values["routes"]:
        if peers is None:
            routes = dict.fromkeys(everyone, Route(interface, source))
            routes.pop(values["host"], None)
        else:
            routes.update(dict.fromkeys(peers, Route(interface, source)))
    return load_dataclass(NodeReport, {**values, "routes": routes})
