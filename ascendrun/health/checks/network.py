"""Checks of the host network: routes, interfaces, ports, and TCP connections between nodes."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.core.network import HCCL_FIRST, HCCL_LAST, HCCL_PORTS, MOVES_HCCL, candidate_bases
from ascendrun.core.reports import Route
from ascendrun.health.survey.check_context import CheckContext, check, finding, node_check, outliers
from ascendrun.health.survey.facts import ConnectionTest, NodeFacts, PortHolder
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts

HCCL_DEVICE_PORT = 16666


@check("routes", "every node has a route to every other", "peer-is-loopback no-route")
def check_routes(context: CheckContext) -> Iterator[Finding]:
    away = {host for host, facts in context.facts.items() if not facts.is_local}
    for host, facts in context.facts.items():
        if facts.routes is None or facts.is_local:
            continue
        if any(_is_loopback(route.source) for route in facts.route_kinds):
            own = [peer for route, peers in _by_route(facts, context) if _is_loopback(route.source) for peer in peers]
            if own:
                yield finding("peer-is-loopback", Severity.FAIL, host, peers=tuple(own))
        lost = away.difference(facts.routes, (host,))
        if lost:
            yield finding("no-route", Severity.FAIL, host, peers=tuple(sorted(lost)))


@node_check("one-interface", "one interface reaches all peers", "several-interfaces")
def check_one_interface(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Check the interface that collectives bind: it must reach all peers."""
    if len(facts.route_kinds) < 2:
        return
    used: dict[str, list[str]] = {}
    for route, peers in _by_route(facts, context):
        if route.interface and not _is_loopback(route.source):
            used.setdefault(route.interface, []).extend(peers)
    if len(used) > 1:
        evidence = tuple(f"{name}: {fold_hosts(peers)}" for name, peers in sorted(used.items()))
        yield finding("several-interfaces", Severity.WARN, host, evidence, interfaces=tuple(sorted(used)))


@check("mtu", "the interfaces between the nodes have one MTU", "mtu-differs")
def check_mtu(context: CheckContext) -> Iterator[Finding]:
    """Compare the MTU towards other nodes: TCP agrees on the smaller one, but a switch may drop what is larger."""
    mtus = {}
    for host, facts in context.facts.items():
        used = {route.interface for route in facts.route_kinds if not _is_loopback(route.source)}
        mtus[host] = min((mtu for name, mtu in (facts.mtus or {}).items() if name in used), default=None)
    yield from outliers("mtu-differs", Severity.WARN, mtus)


def _by_route(facts: NodeFacts, context: CheckContext) -> list[tuple[Route, list[str]]]:
    """Return each route with the peers on it."""
    groups: dict[Route, list[str]] = {}
    for peer, route in (facts.routes or {}).items():
        if peer in context.facts:
            groups.setdefault(route, []).append(peer)
    return list(groups.items())


def _is_loopback(address: str | None) -> bool:
    return bool(address) and (str(address).startswith("127.") or address == "::1")


@check("master-port", "MASTER_PORT is free on the node of rank 0", "port-taken port-ephemeral")
def check_master_port(context: CheckContext) -> Iterator[Finding]:
    """Check for a free port on the node of rank 0; a port set by the user is the only candidate."""
    if context.plan is None:
        return
    first = context.plan.nodes[0].host
    facts = context.facts.get(first)
    if facts is None or facts.taken_ports is None:
        return
    if len(context.plan.master_ports) == 1:
        port = context.plan.master_ports[0]
        if port in facts.taken_ports:
            yield _taken("port-taken", Severity.FAIL, first, port, facts.taken_ports[port])
        outgoing = facts.outgoing_ports(range(port, port + 1))
        if outgoing is not None:
            yield finding("port-ephemeral", Severity.NOTE, first, port=port, low=outgoing[0], high=outgoing[1])


@check(
    "hccl-ports",
    "a block of HCCL ports is free and reserved from outgoing connections",
    "hccl-port-taken ports-not-reserved",
)
def check_hccl_ports(context: CheckContext) -> Iterator[Finding]:
    """Check the blocks of which one becomes HCCL_IF_BASE_PORT; unknown if a variable of the setup changes them."""
    if context.device_type != "npu":
        return
    bases = context.plan.hccl_bases if context.plan is not None else candidate_bases("doctor", {})
    for host, facts in context.facts.items():
        severity = Severity.FAIL if context.job else Severity.WARN
        if facts.leased_block is not None:
            yield _taken("hccl-port-taken", severity, host, *facts.leased_block)
        environ = facts.environ or {}
        own = environ.get("HCCL_IF_BASE_PORT")
        if MOVES_HCCL in environ or own not in (None, *map(str, bases)):
            continue
        taken = facts.taken_ports or {}
        in_use = [[port for port in range(base, base + HCCL_PORTS) if port in taken] for base in bases]
        if in_use and all(in_use):
            port = in_use[0][0]
            yield _taken("hccl-port-taken", severity, host, port, taken[port])
        if HCCL_DEVICE_PORT in taken:
            yield _taken("hccl-port-taken", Severity.NOTE, host, HCCL_DEVICE_PORT, taken[HCCL_DEVICE_PORT])
        for base in bases[:1]:
            last = base + HCCL_PORTS - 1
            outgoing = facts.outgoing_ports(range(base, last + 1))
            ports = f"{base}-{last}" if base < HCCL_FIRST else f"{HCCL_FIRST}-{HCCL_LAST}"
            if outgoing is not None:
                low, high = outgoing
                yield finding("ports-not-reserved", Severity.WARN, host, low=low, high=high, ports=ports)


def _taken(code: str, severity: Severity, host: str, port: int, holder: PortHolder) -> Finding:
    if holder.tag is not None:
        who = Text("doctor.port-of-run", "run {run_id} (pid {pid})", run_id=holder.tag, pid=holder.pid)
    elif holder.pid is not None:
        who = Text(
            "doctor.port-of-process", "pid {pid} ({command})", pid=holder.pid, command=(holder.command or "?")[:80]
        )
    elif holder.uid is not None:
        who = Text("doctor.port-of-user", "a process of uid {uid}", uid=holder.uid)
    else:
        who = Text("doctor.port-of-unknown", "an unknown process")
    return finding(code, severity, host, port=port, holder=who, run=holder.tag)


@node_check(
    "peer-ports",
    "nodes can connect to each other over TCP on the ports of a job",
    "peer-timeout peer-refuses peer-wrong peer-fails",
)
def check_peer_ports(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Evaluate connection tests to a job's ports. Peers that were not reached, or could not listen since another run
    has the ports, have their own findings."""
    failed: dict[tuple[str, int], list[ConnectionTest]] = {}
    listening = {peer for peer, one in context.facts.items() if one.leased_block is None}
    for test in facts.connection_tests or ():
        if test.error is not None and test.peer in listening:
            failed.setdefault((test.code or "failed", test.port), []).append(test)
    for (code, port), tests in sorted(failed.items()):
        values = {"peers": tuple(test.peer for test in tests), "port": port, "how": tests[0].error or ""}
        english, names = "{host} -> {peer} ({address}:{port}): {error}", ("peer", "address", "port", "error")
        evidence = [
            Text("doctor.connection-test", english, host=host, **{name: getattr(test, name) for name in names})
            for test in tests[:4]
        ]
        known = {"silent": "peer-timeout", "refused": "peer-refuses", "wrong-host": "peer-wrong"}
        yield finding(known.get(code, "peer-fails"), Severity.FAIL, host, evidence=evidence, **values)
