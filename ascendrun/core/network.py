"""Rendezvous address of the ranks and interface of each node, from the routes between the hosts."""

from __future__ import annotations

import ipaddress
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.reports import NodeReport, Route
from ascendrun.text import Text

LOOPBACK = Route(interface="lo", source="127.0.0.1")

_FIRST_PORT, _LAST_PORT = 20000, 29999
_CANDIDATES = 100
_TAKEN_BY_HABIT = frozenset((29400, 29500))
"""torchrun's defaults: manually started jobs use them."""

HCCL_FIRST, HCCL_PORTS, HCCL_BLOCKS = 61024, 32, 140
"""HCCL listens on up to 32 host ports. Blocks of them above Linux's range for outgoing connections, and away from
HCCL's default of 60000: manually started jobs use it."""
HCCL_LAST = HCCL_FIRST + HCCL_PORTS * HCCL_BLOCKS - 1
_HCCL_CANDIDATES = 4
MOVES_HCCL = "HCCL_HOST_SOCKET_PORT_RANGE"
"""With this variable HCCL ignores HCCL_IF_BASE_PORT."""


@dataclass(frozen=True)
class Network:
    """`interfaces` by host name."""

    master_address: str
    interfaces: Mapping[str, str]


def choose_network(hosts: Sequence[Host], reports: Mapping[str, NodeReport], faults: dict[str, Text]) -> Network:
    """Choose the source address of the first host towards most others, and each host's interface towards the first.

    Hosts that are all this machine use the loopback address. Mismatches are added to `faults`, by host.
    """
    first = hosts[0]
    away = [host for host in hosts[1:] if not (_is_here(host) and _is_here(first))]
    if not away:
        return Network(LOOPBACK.source, {host.name: LOOPBACK.interface for host in hosts})
    routes = [route for route in (_route(reports, first, host) for host in away) if route is not None]
    if not routes:
        faults[first.name] = Text(
            "network.node-0-no-route",
            "{host}: no route to {peers:hosts}; all ranks connect to {host} (node 0); "
            "check its network and name resolution",
            host=first.name,
            peers=[host.name for host in away],
        )
        return Network("", {host.name: "" for host in hosts})
    majority = Counter(routes).most_common(1)[0][0]
    interfaces: dict[str, str] = {host.name: majority.interface for host in hosts}
    for host in away:
        route = _route(reports, host, first)
        if route is None:
            faults[host.name] = _no_route(reports, host, first)
        else:
            interfaces[host.name] = route.interface
    return Network(majority.source, interfaces)


def host_addresses(hosts: Sequence[Host], reports: Mapping[str, NodeReport]) -> dict[str, str]:
    """Return the address of each host by name: its source towards most others, or how the hostfile calls it; the
    loopback address if all hosts are this machine."""
    if all(map(_is_here, hosts)):
        return {host.name: LOOPBACK.source for host in hosts}
    found, names = {}, [host.name for host in hosts]
    for host in hosts:
        routes = reports[host.name].routes
        kinds = {id(route): route for route in routes.values()}
        sources: Counter[str] = Counter()
        for kind, count in Counter(map(id, map(routes.get, names))).items():  # a million routes are of few kinds
            if kind in kinds and not _is_loopback(kinds[kind].source):
                sources[kinds[kind].source] += count
        found[host.name] = max(sources, key=sources.__getitem__, default=host.addr or host.name)
    return found


def candidate_ports(run_id: str, wanted: str | None) -> tuple[int, ...]:
    """Return the ports to try for MASTER_PORT, in order: the user's only, or a hundred derived from the run_id.

    Below Linux's range for outgoing connections (from 32768) and away from HCCL's 60000-60031.
    """
    if wanted is not None:
        return (int(wanted),)
    start = zlib.crc32(run_id.encode("utf-8"))
    span = _LAST_PORT - _FIRST_PORT + 1
    ports = (_FIRST_PORT + (start + step) % span for step in range(_CANDIDATES + len(_TAKEN_BY_HABIT)))
    return tuple(port for port in ports if port not in _TAKEN_BY_HABIT)[:_CANDIDATES]


def candidate_bases(run_id: str, env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the values to try for HCCL_IF_BASE_PORT: the user's only, or four derived from the run_id.

    (): the user chose HCCL's ports in another way, or wrote no number.
    """
    wanted = env.get("HCCL_IF_BASE_PORT")
    if MOVES_HCCL in env or (wanted is not None and not wanted.isdigit()):
        return ()
    if wanted is not None:
        return (int(wanted),)
    start = zlib.crc32(run_id.encode("utf-8"))
    return tuple(HCCL_FIRST + HCCL_PORTS * ((start + step) % HCCL_BLOCKS) for step in range(_HCCL_CANDIDATES))


def _route(reports: Mapping[str, NodeReport], host: Host, peer: Host) -> Route | None:
    """Return the route from `host` to `peer`; None: no route, or `host` resolves `peer` to itself."""
    route = reports[host.name].routes.get(peer.name)
    return None if route is None or _is_loopback(route.source) else route


def _no_route(reports: Mapping[str, NodeReport], host: Host, peer: Host) -> Text:
    if peer.name in reports[host.name].routes:
        return Text(
            "network.loopback",
            "{host}: {peer} resolves to a loopback address; correct /etc/hosts on that host, or set addr= of {peer}",
            host=host.name,
            peer=peer.name,
        )
    return Text(
        "network.no-route",
        "{host}: no route to {peer}, where all ranks connect; check name resolution, cabling and firewall",
        host=host.name,
        peer=peer.name,
    )


def _is_here(host: Host) -> bool:
    """Return whether the host is this machine according to the hostfile."""
    return host.is_local or _is_loopback(host.addr or host.name)


@cache
def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
