"""Checks of the network between NPUs of different nodes: links, addresses, TLS, and whether ports reach each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ascendrun.ascend.hccn_counters import Optical
from ascendrun.ascend.hccn_history import LinkHistory
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.checks.devices import ids_text, is_many, npu_nodes, severity_at
from ascendrun.health.survey.check_context import Check, World, compare
from ascendrun.health.survey.npu_facts import Port, PortPing, chip_of_node

NET_HEALTH_BAD = (
    "Socket fail",
    "Socket failed",
    "Receive timeout",
    "Unreachable",
    "Time exceeded",
    "Fault",
    "Thread error",
    "Detect ip set",
)
"""Init is normal where no address to detect is configured; Unknown says nothing."""
FLAPS, DAY_S = 3, 86400.0
"""Once is a cable that was moved; our own limit."""
WITHOUT_PORTS = ("310", "310P")


def port_nodes(world: World) -> Iterator[tuple[str, Mapping[int, Port]]]:
    """The nodes whose devices have ports of their own, with them."""
    for host, facts in npu_nodes(world):
        chip = chip_of_node(facts.npu)
        if facts.npu.ports is not None and (chip is None or chip.family not in WITHOUT_PORTS):
            yield host, facts.npu.ports.ports


def _severity(world: World, host: str, devices: Mapping[int, object]) -> Severity:
    """One node alone trains over its own links, without these ports."""
    return severity_at(world, host, devices) if is_many(world) else Severity.NOTE


def check_tool(world: World) -> Iterator[Finding]:
    for host, facts in npu_nodes(world):
        ports, table = facts.npu.ports, facts.npu.table
        if ports is None or (table is not None and table.info is not None and table.info.errors):
            if "hccn" in facts.late and facts.npu.has_any:
                yield Finding("hccn-hangs", Severity.FAIL if is_many(world) else Severity.NOTE, (host,))
            continue  # where the driver is away its other tool has nothing to add
        if ports.hung or "hccn" in facts.late:
            yield Finding("hccn-hangs", Severity.FAIL if is_many(world) else Severity.NOTE, (host,), {}, ports.hung[:3])
        refused = [error for error in ports.errors if error.kind == "permission"]
        if refused:
            yield Finding("hccn-refused", Severity.NOTE, (host,), {"user": facts.user or "?"}, (refused[0].text,))


def check_links(world: World) -> Iterator[Finding]:
    for host, ports in port_nodes(world):
        down = {device: port for device, port in ports.items() if port.link is not None and port.link.is_up is False}
        if down:
            yield Finding(
                "device-link-down",
                _severity(world, host, down),
                (host,),
                _named(down),
                tuple(f"hccn_tool -i {device} -link -g: link status: DOWN" for device in list(down)[:4]),
            )


def check_flaps(world: World) -> Iterator[Finding]:
    """A link that comes and goes: collectives time out, though each look finds it up. By the device's own clock."""
    for host, ports in port_nodes(world):
        flaps = {device: _downs(port.history) for device, port in ports.items()}
        restless = {device: count for device, count in flaps.items() if count >= FLAPS}
        if restless:
            yield Finding(
                "device-link-flaps",
                Severity.WARN if is_many(world) else Severity.NOTE,
                (host,),
                _named(restless),
                tuple(f"device {device}: down {count} times within a day" for device, count in restless.items())[:4],
            )


def _downs(history: LinkHistory | None) -> int:
    """How often the link went down within the last day; 0 where that is not known."""
    if history is None or history.now is None:
        return 0
    return sum(
        1
        for change in history.changes or ()
        if not change.is_up and 0 <= (history.now - change.at).total_seconds() <= DAY_S
    )


def _named(devices: Mapping[int, object]) -> dict[str, str]:
    return {"devices": ids_text(devices), "first": str(min(devices))}


def check_addresses(world: World) -> Iterator[Finding]:
    holders: dict[str, list[str]] = {}
    for host, ports in port_nodes(world):
        unset = {device: port for device, port in ports.items() if port.has_no_address}
        if unset and is_many(world):
            yield Finding(
                "device-ip-missing",
                _severity(world, host, unset),
                (host,),
                _named(unset),
                _conf_lines(world, host, unset),
            )
        yield from _conf_differs(world, host, ports)
        for device, port in ports.items():
            if port.address is not None:
                holders.setdefault(port.address, []).append(f"{host} {device}")
    for address, places in holders.items():
        if len(places) > 1:
            hosts = tuple(dict.fromkeys(place.rpartition(" ")[0] for place in places))
            severity = Severity.FAIL if world.job is not None or len(hosts) == 1 else Severity.WARN
            yield Finding(
                "device-ip-twice",
                severity,
                hosts,
                {"address": address},
                tuple(f"{place.rpartition(' ')[0]}: device {place.rpartition(' ')[2]}" for place in places),
            )


def _conf_of(world: World, host: str) -> Mapping[int, str | None]:
    files = world.facts[host].npu.files
    conf = files.hccn_conf if files is not None else None
    return (
        {device: port.address or port.address_inet6 for device, port in conf.ports.items()} if conf is not None else {}
    )


def _conf_lines(world: World, host: str, devices: Mapping[int, object]) -> tuple[str, ...]:
    conf = _conf_of(world, host)
    return tuple(f"/etc/hccn.conf: address_{device}={conf[device]}" for device in devices if conf.get(device))[:4]


def _conf_differs(world: World, host: str, ports: Mapping[int, Port]) -> Iterator[Finding]:
    conf = _conf_of(world, host)
    stale = {
        device: f"device {device}: {port.address}, /etc/hccn.conf says {conf[device]}"
        for device, port in ports.items()
        if port.address and conf.get(device) not in (None, port.address)
    }
    if stale:
        yield Finding(
            "hccn-conf-stale",
            Severity.WARN if is_many(world) else Severity.NOTE,
            (host,),
            _named(stale),
            tuple(stale.values())[:4],
        )


def check_address_family(world: World) -> Iterator[Finding]:
    """HCCL refuses device addresses of two families in one job."""
    families = {
        f"{host} {device}": "IPv6" if ":" in port.address else "IPv4"
        for host, ports in port_nodes(world)
        for device, port in ports.items()
        if port.address is not None
    }
    yield from _outliers(world, families, "device-ip-family")


def check_tls(world: World) -> Iterator[Finding]:
    """All ranks of a job must agree (EI0016)."""
    switches = {
        f"{host} {device}": "on" if port.tls.is_enabled else "off"
        for host, ports in port_nodes(world)
        for device, port in ports.items()
        if port.tls is not None and port.tls.is_enabled is not None
    }
    yield from _outliers(world, switches, "device-tls-differs")


def _outliers(world: World, values: Mapping[str, str], code: str) -> Iterator[Finding]:
    """Ports ("host device") whose value is not the majority's, a finding for each host and value."""
    same = compare(values)
    for value, places in same.others if same else ():
        by_host: dict[str, dict[int, str]] = {}
        for place in places:
            host, _, device = place.rpartition(" ")
            by_host.setdefault(host, {})[int(device)] = value
        for host, devices in by_host.items():
            majority = same.majority if same else ""
            yield Finding(
                code,
                _severity(world, host, devices),
                (host,),
                {
                    **_named(devices),
                    "list": " ".join(str(device) for device in sorted(devices)),
                    "value": value,
                    "majority": majority,
                    "switch": "1" if majority == "on" else "0",
                },
                (f"{len(places)} of {len(values)} ports: {value}",),
            )


def check_net_health(world: World) -> Iterator[Finding]:
    """The driver's own look at its gateway; a warning, since a wrong netdetect address looks the same."""
    for host, ports in port_nodes(world):
        groups: dict[str, dict[int, Port]] = {}
        for device, port in ports.items():
            word = port.net_health.status if port.net_health is not None else None
            if word in NET_HEALTH_BAD and not port.has_no_address and (port.link is None or port.link.is_up):
                groups.setdefault(str(word), {})[device] = port
        for word, devices in groups.items():
            yield Finding(
                "device-net-health",
                Severity.WARN if is_many(world) else Severity.NOTE,
                (host,),
                {**_named(devices), "status": word},
            )


def check_cables(world: World) -> Iterator[Finding]:
    for host, ports in port_nodes(world):
        bare = {
            device: port for device, port in ports.items() if port.fec is not None and port.fec.mode == "no FEC mode"
        }
        if bare:
            yield Finding(
                "device-fec-off",
                Severity.WARN,
                (host,),
                {**_named(bare), "list": " ".join(str(device) for device in bare)},
            )
        faults = {device: told for device, port in ports.items() for told in [_optical_fault(port.optical)] if told}
        if faults:
            yield Finding(
                "device-optical",
                Severity.WARN,
                (host,),
                _named(faults),
                tuple(f"device {device}: {told}" for device, told in faults.items())[:4],
            )


def _optical_fault(optical: Optical | None) -> str | None:
    """None: well, or not known (a copper cable has no module to ask)."""
    if optical is None or optical.is_present is None:
        return None
    if not optical.is_present:
        return "no module"
    low = optical.rx_power_low_mw
    dark = [power for power in optical.rx_power_mw if power is not None and low is not None and power < low]
    if dark:
        return f"receives {min(dark):g} mW, at least {low:g} are needed"
    raised = [name for name, value in optical.flags.items() if value]
    return f"{', '.join(raised)} raised" if raised else None


def check_ping(world: World) -> Iterator[Finding]:
    owners = {
        port.address: f"{host} device {device}"
        for host, ports in port_nodes(world)
        for device, port in ports.items()
        if port.address
    }
    for host, _ in port_nodes(world):
        failed = [one for one in world.facts[host].npu.pings or () if _is_lost(one)]
        lossy = [one for one in failed if one.ping is not None and one.ping.received]
        for code, pings in (
            ("device-ping-loss", lossy),
            ("device-unreachable", [one for one in failed if one not in lossy]),
        ):
            if pings:
                devices = {one.device: one for one in pings}
                yield Finding(
                    code,
                    _severity(world, host, devices),
                    (host,),
                    _named(devices),
                    tuple(_ping_line(one, owners) for one in pings[:4]),
                )


def _is_lost(one: PortPing) -> bool:
    """A ping whose answer nobody could read proves nothing."""
    return one.ping is None or (
        one.ping.sent is not None and one.ping.received is not None and one.ping.received < one.ping.sent
    )


def _ping_line(one: PortPing, owners: Mapping[str, str]) -> str:
    told = "no end" if one.ping is None else f"{one.ping.sent} sent, {one.ping.received} received"
    return f"device {one.device} -> {one.address} ({owners.get(one.address, '?')}): {told}"


CHECKS: tuple[Check, ...] = (
    Check("hccn-tool", check_tool, "hccn_tool answers", ("hccn-hangs", "hccn-refused")),
    Check("device-links", check_links, "the link of every NPU port is up", ("device-link-down",)),
    Check("device-flaps", check_flaps, "the links of the NPU ports stay up", ("device-link-flaps",), is_full=True),
    Check(
        "device-addresses",
        check_addresses,
        "every NPU port has its own address, the one of /etc/hccn.conf",
        ("device-ip-missing", "device-ip-twice", "hccn-conf-stale"),
    ),
    Check(
        "device-address-family",
        check_address_family,
        "the NPU ports' addresses are of one family",
        ("device-ip-family",),
    ),
    Check("device-tls", check_tls, "TLS is switched alike on all NPU ports", ("device-tls-differs",)),
    Check("net-health", check_net_health, "the NPU ports see their gateway", ("device-net-health",), is_full=True),
    Check(
        "device-cables",
        check_cables,
        "the NPU ports correct errors and get enough light",
        ("device-fec-off", "device-optical"),
        is_full=True,
    ),
    Check(
        "hccl-ping",
        check_ping,
        "NPU ports of different nodes reach each other",
        ("device-unreachable", "device-ping-loss"),
        is_full=True,
    ),
)
