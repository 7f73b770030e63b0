"""Which host tries to reach which, and on which port: every pair of a few hosts, a ring and samples of many."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ascendrun.core.reports import NodeReport

ALL_PAIRS_UP_TO = 8
SAMPLES = 3
"""Above that, each host tries its neighbour in the ring, the first host (where ranks meet), and so many others."""
HCCL_BASE_PORT = 60000


@dataclass(frozen=True)
class Target:
    peer: str
    address: str
    port: int


@dataclass(frozen=True)
class TouchPlan:
    """`targets`, `expected`: by host name; a host listens on all `ports` until everybody expected has come."""

    ports: tuple[int, ...]
    targets: Mapping[str, tuple[Target, ...]]
    expected: Mapping[str, tuple[str, ...]]


def plan_touches(reports: Mapping[str, NodeReport], ports: Sequence[int]) -> TouchPlan | None:
    """None when there is nobody to reach or no port to try. A pair without a route is left out: it has a finding."""
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
    return TouchPlan(
        tuple(ports),
        {host: tuple(some) for host, some in targets.items()},
        {host: tuple(names) for host, names in expected.items()},
    )


def choose_pairs(hosts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(from, to), each once, both ways of a pair counted apart; the same for the same hosts."""
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


def choose_ports(candidates: Sequence[int], taken: Iterable[Iterable[int]], *, family: str | None) -> tuple[int, ...]:
    """The first candidate for MASTER_PORT that no host has taken, and for npu the first port of HCCL's that is free.

    `taken`: per host.
    """
    busy = {port for ports in taken for port in ports}
    ranges = [list(candidates)]
    if family == "npu":
        ranges.append(list(range(HCCL_BASE_PORT, HCCL_BASE_PORT + 32)))
    found = (next((port for port in ports if port not in busy), None) for ports in ranges)
    return tuple(port for port in found if port is not None)


def _address(reports: Mapping[str, NodeReport], *, of: str, seen_from: str) -> str | None:
    """What `of` calls itself on its way to the other: where MASTER_ADDR and HCCL expect it; None: no route."""
    route = reports[of].routes.get(seen_from)
    if route is None or not route.source or route.source.startswith("127.") or route.source == "::1":
        return None
    return route.source
