"""Checks of the hosts' own network: routes, interfaces, ports, and whether they really reach each other."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.core.names import fold_names
from ascendrun.core.reports import Route
from ascendrun.health.survey.check_context import Check, World
from ascendrun.health.survey.facts import NodeFacts, PortHolder, Touch

HCCL_BASE, HCCL_COUNT, HCCL_DEVICE_PORT = 60000, 32, 16666
_MOVED = ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE")


def check_routes(world: World) -> Iterator[Finding]:
    away = {host for host, facts in world.facts.items() if not facts.is_local}
    for host, facts in world.facts.items():
        if facts.routes is None or facts.is_local:
            continue
        if any(_is_loopback(route.source) for route in facts.route_kinds):
            own = [peer for route, peers in _by_route(facts, world) if _is_loopback(route.source) for peer in peers]
            if own:
                yield Finding("peer-is-loopback", Severity.FAIL, (host,), {"peers": fold_names(own)})
        lost = away.difference(facts.routes, (host,))
        if lost:
            yield Finding("no-route", Severity.FAIL, (host,), {"peers": fold_names(sorted(lost))})


def check_one_interface(world: World) -> Iterator[Finding]:
    """Collectives bind one interface: it has to lead to all peers."""
    for host, facts in world.facts.items():
        if len(facts.route_kinds) < 2:
            continue
        used: dict[str, list[str]] = {}
        for route, peers in _by_route(facts, world):
            if route.interface and not _is_loopback(route.source):
                used.setdefault(route.interface, []).extend(peers)
        if len(used) > 1:
            yield Finding(
                "several-interfaces",
                Severity.WARN,
                (host,),
                {"interfaces": ", ".join(sorted(used))},
                tuple(f"{name}: {fold_names(peers)}" for name, peers in sorted(used.items())),
            )


def _by_route(facts: NodeFacts, world: World) -> list[tuple[Route, list[str]]]:
    """Each route with the peers that it leads to."""
    groups: dict[Route, list[str]] = {}
    for peer, route in (facts.routes or {}).items():
        if peer in world.facts:
            groups.setdefault(route, []).append(peer)
    return list(groups.items())


def _is_loopback(address: str | None) -> bool:
    return bool(address) and (str(address).startswith("127.") or address == "::1")


def check_master_port(world: World) -> Iterator[Finding]:
    """The rank-0 node needs one free candidate; the user's own port is the only one."""
    if world.plan is None:
        return
    first = world.plan.nodes[0].host
    facts = world.facts.get(first)
    if facts is None or facts.taken_ports is None:
        return
    if len(world.plan.master_ports) == 1:
        port = world.plan.master_ports[0]
        if port in facts.taken_ports:
            yield _taken("port-taken", Severity.FAIL, first, port, facts.taken_ports[port])
        yield from _in_ephemeral_range(first, facts, port)


def _in_ephemeral_range(host: str, facts: NodeFacts, port: int) -> Iterator[Finding]:
    if facts.port_ranges is None:
        return
    (low, high), reserved = facts.port_ranges
    if low <= port <= high and not any(first <= port <= last for first, last in reserved):
        yield Finding("port-ephemeral", Severity.NOTE, (host,), {"port": str(port), "range": f"{low}-{high}"})


def check_hccl_ports(world: World) -> Iterator[Finding]:
    """HCCL's root binds the base port; the others follow it. Where a variable moves them we do not know them."""
    if world.family != "npu":
        return
    for host, facts in world.facts.items():
        if any(name in (facts.environ or {}) for name in _MOVED):
            continue
        for port, holder in sorted((facts.taken_ports or {}).items()):
            if HCCL_BASE <= port < HCCL_BASE + HCCL_COUNT:
                severity = Severity.FAIL if port == HCCL_BASE else Severity.WARN
                if holder.tag is not None and world.job is None:
                    severity = Severity.NOTE  # a job of ours runs there, and nothing else is to be started
                yield _taken("hccl-port-taken", severity, host, port, holder)
            elif port == HCCL_DEVICE_PORT:
                yield _taken("hccl-port-taken", Severity.NOTE, host, port, holder)
        yield from _hccl_ports_reserved(host, facts)


def _hccl_ports_reserved(host: str, facts: NodeFacts) -> Iterator[Finding]:
    if facts.port_ranges is None:
        return
    (low, high), reserved = facts.port_ranges
    wanted = range(max(low, HCCL_BASE), min(high, HCCL_BASE + HCCL_COUNT - 1) + 1)
    if any(not any(first <= port <= last for first, last in reserved) for port in wanted):
        yield Finding("ports-not-reserved", Severity.WARN, (host,), {"range": f"{low}-{high}"})


def _taken(code: str, severity: Severity, host: str, port: int, holder: PortHolder) -> Finding:
    who = (
        f"the job of attempt {holder.tag}, pid {holder.pid}"
        if holder.tag is not None
        else f"pid {holder.pid} ({(holder.command or '?')[:80]})"
        if holder.pid is not None
        else f"a process of uid {holder.uid}"
        if holder.uid is not None
        else "somebody"
    )
    return Finding(code, severity, (host,), {"port": str(port), "holder": who})


def check_touch(world: World) -> Iterator[Finding]:
    """Hosts that came to each other's very ports. What a peer's own failure explains is told at the peer."""
    for host, facts in world.facts.items():
        failed: dict[tuple[str, int], list[Touch]] = {}
        for touch in facts.touched or ():
            if touch.error is not None and touch.peer in world.facts:
                failed.setdefault((touch.code or "failed", touch.port), []).append(touch)
        for (code, port), touches in sorted(failed.items()):
            values = {
                "peers": fold_names(touch.peer for touch in touches),
                "port": str(port),
                "how": touches[0].error or "",
            }
            evidence = tuple(
                f"{host} -> {touch.peer} ({touch.address}:{touch.port}): {touch.error}" for touch in touches[:4]
            )
            known = {"silent": "peer-timeout", "refused": "peer-refuses", "wrong-host": "peer-wrong"}
            yield Finding(known.get(code, "peer-fails"), Severity.FAIL, (host,), values, evidence)


CHECKS = (
    Check("routes", check_routes, "every node has a route to every other", ("peer-is-loopback", "no-route")),
    Check("one-interface", check_one_interface, "one interface leads to all peers", ("several-interfaces",)),
    Check(
        "master-port", check_master_port, "MASTER_PORT is free where the ranks meet", ("port-taken", "port-ephemeral")
    ),
    Check(
        "hccl-ports",
        check_hccl_ports,
        "HCCL's ports are free and kept from outgoing connections",
        ("hccl-port-taken", "ports-not-reserved"),
    ),
    Check(
        "peer-ports",
        check_touch,
        "nodes reach each other by TCP on the very ports of a job",
        ("peer-timeout", "peer-refuses", "peer-wrong", "peer-fails"),
    ),
)
