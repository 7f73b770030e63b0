"""Connection tests between hosts: all pairs of few hosts; a ring and samples of many hosts."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

from ascendrun.core.dataclass import dataclass
from ascendrun.core.network import HCCL_PORTS
from ascendrun.core.reports import NodeReport

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
