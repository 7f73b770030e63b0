"""Checks of the network between NPUs of different nodes: links, addresses, TLS, and reachability of ports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ascendrun.ascend.hccn import LinkHistory, Optical
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, compare, finding, is_many, npu_nodes, severity_at
from ascendrun.health.survey.npu_facts import Port, PortPing, chip_of_node
from ascendrun.text import Text

NET_HEALTH_BAD = (
    "Socket fail", "Socket failed", "Receive timeout", "Unreachable", "Time exceeded", "Fault", "Thread error",
    "Detect ip set",
)  # fmt: skip
"""Init is normal if no detection address is configured; Unknown means no result."""
FLAPS, DAY_S = 3, 86400.0
"""A single change may be a moved cable; this limit is a choice."""
WITHOUT_PORTS = ("310", "310P")


def port_nodes(context: CheckContext) -> Iterator[tuple[str, Mapping[int, Port]]]:
    """Yield the nodes whose devices have network ports, with the ports."""
    for host, facts in npu_nodes(context):
        chip = chip_of_node(facts.npu)
        if facts.npu.ports is not None and (chip is None or chip.family not in WITHOUT_PORTS):
            yield host, facts.npu.ports.ports


def _severity(context: CheckContext, host: str, devices: Mapping[int, object]) -> Severity:
    """Return the severity: a job on one node uses internal links, not these ports."""
    return severity_at(context, host, devices) if is_many(context) else Severity.NOTE


@check("hccn-tool", "hccn_tool works", "hccn-hangs hccn-refused")
def check_tool(context: CheckContext) -> Iterator[Finding]:
    for host, facts in npu_nodes(context):
        ports, table = facts.npu.ports, facts.npu.table
        if ports is None or (table is not None and table.info is not None and table.info.errors):
            if "hccn" in facts.late and facts.npu.has_any:
                yield finding("hccn-hangs", Severity.FAIL if is_many(context) else Severity.NOTE, host)
            continue  # without the driver, its other tool has no results
        if ports.hung or "hccn" in facts.late:
            severity = Severity.FAIL if is_many(context) else Severity.NOTE
            yield finding("hccn-hangs", severity, host, evidence=ports.hung[:3])
        refused = [error for error in ports.errors if error.kind == "permission"]
        if refused:
            yield finding("hccn-refused", Severity.NOTE, host, evidence=(refused[0].text,), user=facts.user or "?")


@check("device-links", "the link of every NPU port is up", "device-link-down")
def check_links(context: CheckContext) -> Iterator[Finding]:
    for host, ports in port_nodes(context):
        down = {device: port for device, port in ports.items() if port.link is not None and port.link.is_up is False}
        if down:
            evidence = tuple(f"hccn_tool -i {device} -link -g: link status: DOWN" for device in list(down)[:4])
            yield finding("device-link-down", _severity(context, host, down), host, evidence, **_named(down))


@check("device-flaps", "the links of the NPU ports stay up", "device-link-flaps", is_full=True)
def check_flaps(context: CheckContext) -> Iterator[Finding]:
    """Find links that go down repeatedly: collectives time out, although each check finds them up."""
    for host, ports in port_nodes(context):
        flaps = {device: _downs(port.history) for device, port in ports.items()}
        restless = {device: count for device, count in flaps.items() if count >= FLAPS}
        if restless:
            evidence = tuple(
                Text(
                    "doctor.link-flaps",
                    "device {device}: down {count:plural time times} within a day",
                    device=device,
                    count=count,
                )
                for device, count in restless.items()
            )[:4]
            severity = Severity.WARN if is_many(context) else Severity.NOTE
            yield finding("device-link-flaps", severity, host, evidence, **_named(restless))


def _downs(history: LinkHistory | None) -> int:
    """Return how often the link went down within the last day; 0 if unknown."""
    if history is None or history.now is None:
        return 0
    return sum(
        1
        for change in history.changes or ()
        if not change.is_up and 0 <= (history.now - change.at).total_seconds() <= DAY_S
    )


def _named(devices: Mapping[int, object]) -> dict[str, Any]:
    return {"devices": tuple(sorted(devices)), "first": min(devices)}


@check(
    "device-addresses",
    "every NPU port has its own address, as in /etc/hccn.conf",
    "device-ip-missing device-ip-twice hccn-conf-stale",
)
def check_addresses(context: CheckContext) -> Iterator[Finding]:
    holders: dict[str, list[str]] = {}
    for host, ports in port_nodes(context):
        unset = {device: port for device, port in ports.items() if port.has_no_address}
        if unset and is_many(context):
            evidence = _conf_lines(context, host, unset)
            yield finding("device-ip-missing", _severity(context, host, unset), host, evidence, **_named(unset))
        yield from _conf_differs(context, host, ports)
        for device, port in ports.items():
            if port.address is not None:
                holders.setdefault(port.address, []).append(f"{host} {device}")
    for address, places in holders.items():
        if len(places) > 1:
            hosts = tuple(dict.fromkeys(place.rpartition(" ")[0] for place in places))
            severity = Severity.FAIL if context.job is not None or len(hosts) == 1 else Severity.WARN
            lines = tuple(f"{place.rpartition(' ')[0]}: device {place.rpartition(' ')[2]}" for place in places)
            yield finding("device-ip-twice", severity, hosts, lines, address=address)


def _conf_of(context: CheckContext, host: str) -> Mapping[int, str | None]:
    files = context.facts[host].npu.files
    conf = files.hccn_conf if files is not None else None
    return (
        {device: port.address or port.address_inet6 for device, port in conf.ports.items()} if conf is not None else {}
    )


def _conf_lines(context: CheckContext, host: str, devices: Mapping[int, object]) -> tuple[str, ...]:
    conf = _conf_of(context, host)
    return tuple(f"/etc/hccn.conf: address_{device}={conf[device]}" for device in devices if conf.get(device))[:4]


def _conf_differs(context: CheckContext, host: str, ports: Mapping[int, Port]) -> Iterator[Finding]:
    conf = _conf_of(context, host)
    stale = {
        device: Text(
            "doctor.port-address",
            "device {device}: {address}, in /etc/hccn.conf {configured}",
            device=device,
            address=port.address,
            configured=conf[device],
        )
        for device, port in ports.items()
        if port.address and conf.get(device) not in (None, port.address)
    }
    if stale:
        severity = Severity.WARN if is_many(context) else Severity.NOTE
        yield finding("hccn-conf-stale", severity, host, evidence=tuple(stale.values())[:4], **_named(stale))


@check("device-address-family", "the addresses of NPU ports are of one family", "device-ip-family")
def check_address_family(context: CheckContext) -> Iterator[Finding]:
    """Find device addresses of two families in one job, which HCCL rejects."""
    families = {
        f"{host} {device}": "IPv6" if ":" in port.address else "IPv4"
        for host, ports in port_nodes(context)
        for device, port in ports.items()
        if port.address is not None
    }
    yield from _outliers(context, families, "device-ip-family")


@check("device-tls", "TLS is on or off on all NPU ports", "device-tls-differs")
def check_tls(context: CheckContext) -> Iterator[Finding]:
    """Find TLS switches that differ; all ranks must agree (EI0016)."""
    switches = {
        f"{host} {device}": "on" if port.tls.is_enabled else "off"
        for host, ports in port_nodes(context)
        for device, port in ports.items()
        if port.tls is not None and port.tls.is_enabled is not None
    }
    yield from _outliers(context, switches, "device-tls-differs")


def _outliers(context: CheckContext, values: Mapping[str, str], code: str) -> Iterator[Finding]:
    """Yield a finding for each host and value of ports ("host device") that differ from the majority."""
    same = compare(values)
    for value, places in same.others if same else ():
        by_host: dict[str, dict[int, str]] = {}
        for place in places:
            host, _, device = place.rpartition(" ")
            by_host.setdefault(host, {})[int(device)] = value
        for host, devices in by_host.items():
            majority = same.majority if same else ""
            yield finding(
                code,
                _severity(context, host, devices),
                host,
                evidence=(
                    Text(
                        "doctor.ports-differ",
                        "{count} of {total} ports: {value}",
                        count=len(places),
                        total=len(values),
                        value=value,
                    ),
                ),
                **_named(devices),
                value=value,
                majority=majority,
                switch=1 if majority == "on" else 0,
            )


@check("net-health", "the NPU ports reach their gateway", "device-net-health", is_full=True)
def check_net_health(context: CheckContext) -> Iterator[Finding]:
    """Report the driver's gateway test; a warning, since a wrong netdetect address has the same result."""
    for host, ports in port_nodes(context):
        groups: dict[str, dict[int, Port]] = {}
        for device, port in ports.items():
            word = port.net_health.status if port.net_health is not None else None
            if word in NET_HEALTH_BAD and not port.has_no_address and (port.link is None or port.link.is_up):
                groups.setdefault(str(word), {})[device] = port
        for word, devices in groups.items():
            severity = Severity.WARN if is_many(context) else Severity.NOTE
            yield finding("device-net-health", severity, host, **_named(devices), status=word)


@check(
    "device-cables",
    "the NPU ports use FEC and their optical modules work",
    "device-fec-off device-optical",
    is_full=True,
)
def check_cables(context: CheckContext) -> Iterator[Finding]:
    for host, ports in port_nodes(context):
        bare = {
            device: port for device, port in ports.items() if port.fec is not None and port.fec.mode == "no FEC mode"
        }
        if bare:
            yield finding("device-fec-off", Severity.WARN, host, **_named(bare))
        faults = {
            device: fault for device, port in ports.items() for fault in [_optical_fault(device, port.optical)] if fault
        }
        if faults:
            yield finding("device-optical", Severity.WARN, host, evidence=tuple(faults.values())[:4], **_named(faults))


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


@check(
    "hccl-ping", "NPU ports of different nodes reach each other", "device-unreachable device-ping-loss", is_full=True
)
def check_ping(context: CheckContext) -> Iterator[Finding]:
    owners = {
        port.address: f"{host} device {device}"
        for host, ports in port_nodes(context)
        for device, port in ports.items()
        if port.address
    }
    for host, _ in port_nodes(context):
        failed = [one for one in context.facts[host].npu.pings or () if _is_lost(one)]
        lossy = [one for one in failed if one.ping is not None and one.ping.received]
        for code, pings in (
            ("device-ping-loss", lossy),
            ("device-unreachable", [one for one in failed if one not in lossy]),
        ):
            if pings:
                devices = {one.device: one for one in pings}
                evidence = tuple(_ping_line(one, owners) for one in pings[:4])
                yield finding(code, _severity(context, host, devices), host, evidence, **_named(devices))


def _is_lost(one: PortPing) -> bool:
    """Return whether the ping lost packets or did not return; unreadable output counts as not lost."""
    return one.ping is None or (
        one.ping.sent is not None and one.ping.received is not None and one.ping.received < one.ping.sent
    )


def _ping_line(one: PortPing, owners: Mapping[str, str]) -> Text:
    return Text(
        "doctor.ping",
        "device {device} to {address} ({owner}): {received} of {sent} replies",
        device=one.device,
        address=one.address,
        owner=owners.get(one.address),
        received=one.ping.received if one.ping is not None else None,
        sent=one.ping.sent if one.ping is not None else None,
    )
