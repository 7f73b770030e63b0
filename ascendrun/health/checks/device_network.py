"""Checks of the network between NPUs of different nodes: links, addresses, TLS, and reachability of ports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Callable

from ascendrun.ascend.hccn import LinkHistory, Optical
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey import check_context
from ascendrun.health.survey.facts import NodeFacts, Port, PortPing
from ascendrun.text import Text

NET_HEALTH_BAD = (
    "Socket fail", "Socket failed", "Receive timeout", "Unreachable", "Time exceeded", "Fault", "Thread error",
    "Detect ip set",
)  # fmt: skip
"""Init is normal if no detection address is configured; Unknown means no result."""
FLAPS, DAY_S = 3, 86400.0
"""A single change may be a moved cable; this limit is a choice."""
WITHOUT_PORTS = ("310", "310P")


def port_nodes(context: check_context.CheckContext) -> Iterator[tuple[str, Mapping[int, Port]]]:
    """Yield the nodes whose devices have network ports, with the ports."""
    for host, facts in check_context.npu_nodes(context):
        chip = facts.npu.chip
        if facts.npu.ports is not None and (chip is None or chip.family not in WITHOUT_PORTS):
            yield host, facts.npu.ports.ports


port_check = check_context.check_each(port_nodes)


def _faulty(
    context: check_context.CheckContext,
    host: str,
    code: str,
    faults: Mapping[int, str | Text | None],
    severity: Severity | None = None,
    **values: object,
) -> Iterator[Finding]:
    """Yield the finding for devices with a fault, if any, with at most four lines of evidence.

    `severity` None: it prevents a job of several nodes; a job on one node uses internal links, not these ports.
    """
    if faults:
        severe = check_context.severity_at(context, host, faults) if check_context.is_many(context) else Severity.NOTE
        lines = [line for line in list(faults.values())[:4] if line is not None]
        named = {"devices": tuple(sorted(faults)), "first": min(faults)}
        yield check_context.finding(code, severity or severe, host, lines, **named, **values)


def _risk(context: check_context.CheckContext) -> Severity:
    return Severity.WARN if check_context.is_many(context) else Severity.NOTE


@check_context.npu_check("hccn-tool", "hccn_tool works", "hccn-hangs hccn-refused")
def check_tool(context: check_context.CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    ports, table = facts.npu.ports, facts.npu.table
    severity = Severity.FAIL if check_context.is_many(context) else Severity.NOTE
    if ports is None or (table is not None and table.info is not None and table.info.errors):
        if "hccn" in facts.late and facts.npu.has_any:
            yield check_context.finding("hccn-hangs", severity, host)
        return  # without the driver, its other tool has no results
    if ports.hung or "hccn" in facts.late:
        yield check_context.finding("hccn-hangs", severity, host, evidence=ports.hung[:3])
    refused = [error for error in ports.errors if error.kind == "permission"]
    if refused:
        yield check_context.finding(
            "hccn-refused", Severity.NOTE, host, evidence=(refused[0].text,), user=facts.user or "?"
        )


@port_check("device-links", "the link of every NPU port is up", "device-link-down")
def check_links(context: check_context.CheckContext, host: str, ports: Mapping[int, Port]) -> Iterator[Finding]:
    down = {
        device: f"hccn_tool -i {device} -link -g: link status: DOWN"
        for device, port in ports.items()
        if port.link is not None and port.link.is_up is False
    }
    yield from _faulty(context, host, "device-link-down", down)


@port_check("device-flaps", "the links of the NPU ports stay up", "device-link-flaps", is_full=True)
def check_flaps(context: check_context.CheckContext, host: str, ports: Mapping[int, Port]) -> Iterator[Finding]:
    """Find links that go down repeatedly: collectives time out, although each check finds them up."""
    flaps = {device: _downs(port.history) for device, port in ports.items()}
    restless = {
        device: Text(
            "doctor.link-flaps",
            "device {device}: down {count:plural time times} within a day",
            device=device,
            count=count,
        )
        for device, count in flaps.items()
        if count >= FLAPS
    }
    yield from _faulty(context, host, "device-link-flaps", restless, _risk(context))


def _downs(history: LinkHistory | None) -> int:
    """Return how often the link went down within the last day; 0 if unknown."""
    if history is None or history.now is None:
        return 0
    ages_s = [(history.now - change.at).total_seconds() for change in history.changes or () if not change.is_up]
    return sum(1 for age_s in ages_s if 0 <= age_s <= DAY_S)


@check_context.check(
    "device-addresses",
    "every NPU port has its own address, as in /etc/hccn.conf",
    "device-ip-missing device-ip-twice hccn-conf-stale",
)
def check_addresses(context: check_context.CheckContext) -> Iterator[Finding]:
    holders: dict[str, list[tuple[str, int]]] = {}
    for host, ports in port_nodes(context):
        files = context.facts[host].npu.files
        conf = files.hccn_conf.ports if files is not None and files.hccn_conf is not None else {}
        configured = {device: port.address or port.address_inet6 for device, port in conf.items()}
        unset = [device for device, port in ports.items() if port.has_no_address]
        lines = [f"/etc/hccn.conf: address_{device}={configured[device]}" for device in unset if configured.get(device)]
        if unset and check_context.is_many(context):
            severity, named = (
                check_context.severity_at(context, host, unset),
                {"devices": tuple(sorted(unset)), "first": min(unset)},
            )
            yield check_context.finding("device-ip-missing", severity, host, lines[:4], **named)
        stale = {
            device: Text(
                "doctor.port-address",
                "device {device}: {address}, in /etc/hccn.conf {configured}",
                device=device,
                address=port.address,
                configured=configured[device],
            )
            for device, port in ports.items()
            if port.address and configured.get(device) not in (None, port.address)
        }
        yield from _faulty(context, host, "hccn-conf-stale", stale, _risk(context))
        for device, port in ports.items():
            if port.address is not None:
                holders.setdefault(port.address, []).append((host, device))
    for address, places in holders.items():
        if len(places) > 1:
            hosts = tuple(dict.fromkeys(host for host, _ in places))
            severity = Severity.FAIL if context.job is not None or len(hosts) == 1 else Severity.WARN
            lines = [f"{host}: device {device}" for host, device in places]
            yield check_context.finding("device-ip-twice", severity, hosts, lines, address=address)


@check_context.check("device-address-family", "the addresses of NPU ports are of one family", "device-ip-family")
def check_address_family(context: check_context.CheckContext) -> Iterator[Finding]:
    """Find device addresses of two families in one job, which HCCL rejects."""
    yield from _outliers(
        context,
        "device-ip-family",
        lambda port: None if port.address is None else "IPv6" if ":" in port.address else "IPv4",
    )


@check_context.check("device-tls", "TLS is on or off on all NPU ports", "device-tls-differs")
def check_tls(context: check_context.CheckContext) -> Iterator[Finding]:
    """Find TLS switches that differ; all ranks must agree (EI0016)."""
    yield from _outliers(
        context,
        "device-tls-differs",
        lambda port: (
            None if port.tls is None or port.tls.is_enabled is None else "on" if port.tls.is_enabled else "off"
        ),
    )


@check_context.check("device-mtu", "the NPU ports have one MTU", "device-mtu-differs", is_full=True)
def check_mtu(context: check_context.CheckContext) -> Iterator[Finding]:
    """Find ports with another largest packet: the network may lose those that the other side cannot receive.

    It is a warning: no source states what HCCL does with two values.
    """
    mtus = _outliers(
        context, "device-mtu-differs", lambda port: str(port.mtu.mtu) if port.mtu and port.mtu.mtu else None
    )
    yield from (replace(one, severity=_risk(context)) for one in mtus)


def _outliers(
    context: check_context.CheckContext, code: str, value_of: Callable[[Port], str | None]
) -> Iterator[Finding]:
    """Yield a finding for each host and value of ports that differ from the majority."""
    values = {
        (host, device): value
        for host, ports in port_nodes(context)
        for device, port in ports.items()
        if (value := value_of(port)) is not None
    }
    same = check_context.compare(values)
    for value, places in same.others if same else ():
        line = Text(
            "doctor.ports-differ",
            "{count} of {total} ports: {value}",
            count=len(places),
            total=len(values),
            value=value,
        )
        majority = same.majority if same else ""
        more = {"value": value, "majority": majority, "switch": 1 if majority == "on" else 0}
        for host in dict.fromkeys(host for host, _ in places):
            faults = {device: None for where, device in places if where == host}
            for one in _faulty(context, host, code, faults, **more):
                yield replace(one, evidence=(line,))


@port_check("net-health", "the NPU ports reach their gateway", "device-net-health", is_full=True)
def check_net_health(context: check_context.CheckContext, host: str, ports: Mapping[int, Port]) -> Iterator[Finding]:
    """Report the driver's gateway test; a warning, since a wrong netdetect address has the same result."""
    groups: dict[str, dict[int, None]] = {}
    for device, port in ports.items():
        word = port.net_health.status if port.net_health is not None else None
        if word in NET_HEALTH_BAD and not port.has_no_address and (port.link is None or port.link.is_up):
            groups.setdefault(str(word), {})[device] = None
    for word, devices in groups.items():
        yield from _faulty(context, host, "device-net-health", devices, _risk(context), status=word)


@port_check(
    "device-cables",
    "the NPU ports use FEC and their optical modules work",
    "device-fec-off device-optical",
    is_full=True,
)
def check_cables(context: check_context.CheckContext, host: str, ports: Mapping[int, Port]) -> Iterator[Finding]:
    fecs = {device: port.fec.mode for device, port in ports.items() if port.fec is not None}
    bare = {device: None for device, mode in fecs.items() if mode == "no FEC mode"}
    yield from _faulty(context, host, "device-fec-off", bare, Severity.WARN)
    optical = {device: _optical_fault(device, port.optical) for device, port in ports.items()}
    faults = {device: fault for device, fault in optical.items() if fault is not None}
    yield from _faulty(context, host, "device-optical", faults, Severity.WARN)


def _optical_fault(device: int, optical: Optical | None) -> Text | None:
    """Return the fault of a module; None: no fault, or unknown (a copper cable has no module)."""
    if optical is None or optical.is_present is None:
        return None
    if not optical.is_present:
        return Text("doctor.no-module", "device {device}: no module", device=device)
    low = optical.rx_power_low_mw
    dark = [power for power in optical.rx_power_mw if power is not None and low is not None and power < low]
    if dark:
        return Text(
            "doctor.low-light",
            "device {device}: receives {power:g} mW (expected at least {low:g} mW)",
            device=device,
            power=min(dark),
            low=low,
        )
    raised = tuple(name for name, value in optical.flags.items() if value)
    return (
        Text("doctor.module-alarm", "device {device}: alarm {names}", device=device, names=raised) if raised else None
    )


@check_context.check(
    "hccl-ping", "NPU ports of different nodes reach each other", "device-unreachable device-ping-loss", is_full=True
)
def check_ping(context: check_context.CheckContext) -> Iterator[Finding]:
    owners = {
        port.address: f"{host} device {device}"
        for host, ports in port_nodes(context)
        for device, port in ports.items()
        if port.address
    }
    for host, _ in port_nodes(context):
        for code, is_lossy in (("device-ping-loss", True), ("device-unreachable", False)):
            failed = [
                one
                for one in context.facts[host].npu.pings or ()
                if _is_lost(one) and is_lossy is bool(one.ping is not None and one.ping.received)
            ]
            lines = [_ping_line(one, owners) for one in failed[:4]]
            for found in _faulty(context, host, code, dict.fromkeys(one.device for one in failed)):
                yield replace(found, evidence=tuple(lines))


def _is_lost(one: PortPing) -> bool:
    """Return whether the ping lost packets or did not return; unreadable output counts as not lost."""
    return one.ping is None or (
        one.ping.sent is not None and one.ping.received is not None and one.ping.received < one.ping.sent
    )


def _ping_line(one: PortPing, owners: Mapping[str, str]) -> Text:
    received, sent = (one.ping.received, one.ping.sent) if one.ping is not None else (None, None)
    values = {"address": one.address, "owner": owners.get(one.address), "received": received, "sent": sent}
    english = "device {device} to {address} ({owner}): {received} of {sent} replies"
    return Text("doctor.ping", english, device=one.device, **values)
