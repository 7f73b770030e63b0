"""Tests between nodes: TCP connections (all pairs of few hosts; a ring and samples of many), pings of device ports."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.network import HCCL_PORTS
from ascendrun.core.reports import NodeReport
from ascendrun.health.survey.parsers import read_ports
from ascendrun.health.survey.probes import PINGS_S
from ascendrun.health.survey.scripts import PINGS

Targets = tuple[tuple[int, str], ...]
"""(own device, the peer's address)."""
ALL_PAIRS_UP_TO = 8
SAMPLES = 3
"""Above that, each host tests its neighbour in the ring, the first host (rank 0), and this number of others."""


@dataclass(frozen=True)
class Target:
    peer: str
    address: str
    port: int


@dataclass(frozen=True)
class ConnectionTestPlan:
    """The plan. `targets`, `expected`: by host name. Hosts listen on all `ports` until all expected hosts connected."""

    ports: tuple[int, ...]
    targets: Mapping[str, tuple[Target, ...]]
    expected: Mapping[str, tuple[str, ...]]


def plan_connection_tests(reports: Mapping[str, NodeReport], ports: Sequence[int]) -> ConnectionTestPlan | None:
    """Return None without peers or ports. A pair without a route is omitted: it has a finding."""
    hosts = list(reports)
    targets: dict[str, list[Target]] = {host: [] for host in hosts}
    expected: dict[str, list[str]] = {host: [] for host in hosts}
    for source, peer in choose_pairs(hosts):
        address = _address(reports, of=peer, seen_from=source)
        if address is None:
            continue
        targets[source] += [Target(peer, address, port) for port in ports]
        expected[peer].append(source)
    if not ports or not any(targets.values()):
        return None
    return ConnectionTestPlan(
        tuple(ports),
        {host: tuple(some) for host, some in targets.items()},
        {host: tuple(names) for host, names in expected.items()},
    )


def choose_pairs(hosts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (from, to) pairs, both directions, without duplicates; the same for the same hosts."""
    count = len(hosts)
    if count <= ALL_PAIRS_UP_TO:
        return tuple((one, other) for one in hosts for other in hosts if one != other)
    pairs: set[tuple[str, str]] = set()
    for index, host in enumerate(hosts):
        pairs.add((host, hosts[(index + 1) % count]))
        pairs.add((host, hosts[0]))
        start = zlib.crc32(host.encode("utf-8"))
        pairs.update(
            (host, hosts[(index + 2 + (start + step * 7919) % (count - 2)) % count]) for step in range(SAMPLES)
        )
    return tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))


def choose_ports(candidates: Sequence[int], bases: Sequence[int], taken: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Return the first candidate for MASTER_PORT that is free on all hosts, and the first free base of HCCL's ports.

    `taken`: per host.
    """
    busy = {port for ports in taken for port in ports}
    free = [base for base in bases if not busy.intersection(range(base, base + HCCL_PORTS))]
    return (*[port for port in candidates if port not in busy][:1], *free[:1])


def _address(reports: Mapping[str, NodeReport], *, of: str, seen_from: str) -> str | None:
    """Return the source address of `of` on the route to the other, as MASTER_ADDR and HCCL use it; None: no route."""
    route = reports[of].routes.get(seen_from)
    if route is None or not route.source or route.source.startswith("127.") or route.source == "::1":
        return None
    return route.source


# ---------------------------------------------------------------- pings between device ports


def ping_items(results: Mapping[str, Mapping[str, Any]], *, every_pair: bool) -> dict[str, dict[str, Any]]:
    """Return the survey item of each host with pings to send, from the hosts' raw first results."""
    targets = plan_pings({host: addresses_of(raw.get("hccn")) for host, raw in results.items()}, every_pair=every_pair)
    return {
        host: {
            "name": "hccn-pings",
            "kind": "argv",
            "timeout_s": PINGS_S * (4 if every_pair else 1),
            "max_bytes": 1 << 20,
            "argv": ["sh", "-c", PINGS, "ascendrun", *(str(one) for target in found for one in target)],
        }
        for host, found in targets.items()
        if found
    }


def addresses_of(raw: Mapping[str, Any] | None) -> Mapping[int, str]:
    """Return by device the IPv4 address of a port with link up; faults of other ports are found without a ping."""
    try:
        ports = read_ports(raw) if raw is not None else None
    except Exception:  # the output of a tool may be anything; without addresses, no ping
        return {}
    return {
        device: port.ip.address
        for device, port in (ports.ports if ports is not None else {}).items()
        if port.link is not None and port.link.is_up is True and port.ip is not None and port.ip.address is not None
    }


def plan_pings(addresses: Mapping[str, Mapping[int, str]], *, every_pair: bool) -> dict[str, Targets]:
    """Plan pings between equal device numbers, like HCCL's rings between nodes. Each host pings the next, so that
    every port sends and replies once. With `every_pair` every host pings all others."""
    hosts = [host for host, ports in addresses.items() if ports]
    planned: dict[str, Targets] = {}
    for place, host in enumerate(hosts):
        following = hosts[place + 1 :] + hosts[:place]
        peers = following if every_pair else following[:1]
        planned[host] = tuple(
            (device, addresses[peer][device])
            for peer in peers
            for device in addresses[host]
            if device in addresses[peer]
        )
    return planned
