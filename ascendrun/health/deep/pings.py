"""Plan of pings between device ports: a ring over the hosts on every rail, or all pairs on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.health.survey.npu_facts import Port
from ascendrun.health.survey.npu_parsers import read_ports
from ascendrun.health.survey.npu_probes import PINGS_S
from ascendrun.health.survey.npu_scripts import PINGS

Targets = tuple[tuple[int, str], ...]
"""(own device, the peer's address)."""


def ping_items(results: Mapping[str, Mapping[str, Any]], *, every_pair: bool) -> dict[str, dict[str, Any]]:
    """Return the survey item of each host with pings to send, from the hosts' raw first results."""
    targets = plan_pings({host: addresses_of(raw.get("hccn")) for host, raw in results.items()}, every_pair=every_pair)
    return {
        host: {
            "name": "hccn-pings",
            "kind": "argv",
            "timeout_s": PINGS_S * (4 if every_pair else 1),
            "max_bytes": 1 << 20,
            "argv": ["sh", "-c", PINGS, "ascendrun", *_arguments(found)],
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
        if _is_up(port) and port.ip is not None and port.ip.address is not None
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


def _is_up(port: Port) -> bool:
    return port.link is not None and port.link.is_up is True


def _arguments(targets: Targets) -> list[str]:
    return [argument for device, address in targets for argument in (str(device), address)]
