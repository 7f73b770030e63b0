"""`hccn_tool` of a simulated node: the network port of one chip.

Both forms are understood: `-i N -ITEM -g` and the 950's `-g -ITEM -i N -u UDIE -p PORT`. Nothing can be set.
"""

from __future__ import annotations

import time
from typing import Callable, NamedTuple, Sequence

from ascendrun.sim.ascend.tool.live import Reading, Reply, Scene
from ascendrun.sim.ascend.tool.model import Chip, Faults, Node, value_of

NOT_DONE = "Command execute failed!"
REFUSED = "Read file failed, cmd execute failed! pls check cmd run permission."
MAX_CHANGES = 20  # link changes that are kept
_PACKETS_A_S = 120_000  # of a busy port


class Port(NamedTuple):
    """One chip's port at one moment. `words`: what stood on the command line besides the item."""

    node: Node
    faults: Faults
    reading: Reading
    words: Sequence[str]
    now_s: float

    @property
    def chip(self) -> Chip:
        return self.reading.chip

    def fault(self, name: str) -> bool:
        return self.faults.has(name, self.chip.npu_id)

    @property
    def address(self) -> str | None:
        """Its IPv4 address; None where it has none."""
        if self.chip.address is None or self.fault("ip_missing") or self.fault("ip_v6"):
            return None
        if not self.fault("hccn_conf_stale"):
            return self.chip.address
        head, _, last = self.chip.address.rpartition(".")
        return f"{head}.{(int(last) + 100) % 250 + 1}"

    @property
    def is_up(self) -> bool:
        if self.fault("link_down"):
            return False
        flaps = self.faults.of("link_flaps", self.chip.npu_id)
        return flaps is None or self.faults.age_s(flaps) % float(value_of(flaps)) >= 1.0


def _link_stat(port: Port) -> str:
    changes = link_changes(port)
    ups = sum(is_up for _, is_up in changes)
    lines = [f"current time        : {_clock(port.now_s)}", f"link up count       : {ups}"]
    if port.node.is_new:
        lines.append(f"link down count     : {len(changes) - ups}")
    lines.append("link change records :" + ("" if changes else " NA"))
    for at_s, is_up in sorted(changes, reverse=True)[:MAX_CHANGES]:
        lines.append(f"    {_clock(at_s)}    LINK {'UP' if is_up else 'DOWN'}")
    return "".join(f"[devid {port.chip.logic_id}]{line}\n" for line in lines)


def _clock(at_s: float) -> str:
    return time.asctime(time.gmtime(at_s))


def link_changes(port: Port) -> list[tuple[float, bool]]:
    """When the link changed and whether it came up, oldest first: once at boot, and what the faults did since."""
    booted_s = port.node.booted_s
    changes = [(booted_s, True)] if booted_s <= port.now_s else []
    down = port.faults.of("link_down", port.chip.npu_id)
    if down:
        changes.append((down.since_s, False))
    flaps = port.faults.of("link_flaps", port.chip.npu_id)
    if flaps:
        period_s = float(value_of(flaps))
        count = int(port.faults.age_s(flaps) // period_s)
        for turn in range(max(0, count - MAX_CHANGES), count + 1):
            at_s = flaps.since_s + turn * period_s
            changes += [(when, is_up) for when, is_up in ((at_s, False), (at_s + 1, True)) if when <= port.now_s]
    return sorted(changes)


def _ip(port: Port) -> str:
    if "-inet6" in port.words:
        has_v6 = port.fault("ip_v6")
        return f"ipv6_address:fd00::{port.chip.logic_id + 1:x}\nprefix_length:64\n" if has_v6 else "\n"
    return f"ipaddr:{port.address}\nnetmask:{port.chip.netmask}\n" if port.address else "\n"


def _net_health(port: Port) -> str:
    fault = port.faults.of("net_health", port.chip.npu_id)
    if fault:
        word = value_of(fault)
    elif not port.is_up or port.address is None:
        word = "Socket fail"
    else:
        word = "Success" if port.chip.netdetect else "Init"
    return f"net health status: {word}\n"


def interface(chip: Chip) -> str:
    return f"eth{chip.logic_id}"


def _vnic(port: Port) -> str:
    if port.chip.vnic is None:
        return f"{NOT_DONE}\n"
    up = "UP" if port.is_up else "DOWN"
    return f"vnic link status: {up}\nvnic ipaddr: {port.chip.vnic}\nvnic netmask: 255.255.0.0\n"


def _tls(port: Port) -> str:
    on = (port.chip.has_tls or port.fault("tls_on")) and not port.fault("tls_off")
    preset = ", tls preconfigured[1](0:non-preset, 1:preset)"
    old = port.node.tool_version.split(".")[0] in ("21", "22")
    return (
        f"dev_id:{port.chip.logic_id}, tls switch[{int(on)}](0:disable, 1:enable){'' if old else preset}, "
        "tls alarm time threshold[60]days\n"
    )


def _ping(port: Port) -> str:
    """`-ping -g address A [pkt N]`: replies arrive if the link is up and no fault makes A unreachable."""
    words = dict(zip(port.words, list(port.words)[1:]))
    address, count = words.get("address"), words.get("pkt", "3")
    if address is None or not count.isdigit():
        return f"{NOT_DONE}\n"
    lost = port.faults.of("unreachable", port.chip.npu_id)
    reached = port.is_up and port.address is not None and not (lost and value_of(lost) in ("any", address))
    sent = int(count)
    lines = [f"device {port.chip.logic_id} PING {address}"]
    if reached:
        lines += [f"recv seq={seq},time={1.418 if not seq else 0.034 + 0.006 * (seq % 3):.6f}ms" for seq in range(sent)]
    received = sent if reached else 0
    loss = 100 * (sent - received) / sent if sent else 0
    lines.append(f"{sent} packets transmitted, {received} received, {loss:.2f}% packet loss")
    return "\n".join(lines) + "\n"


def _stat(port: Port) -> str:
    # Packets so far of the processes that run on the chip now.
    packets = int(sum(row.age_s * row.load / 100 * _PACKETS_A_S for row in port.reading.rows))
    errors = port.faults.grown("roce_errors", port.chip.npu_id)
    moved = [f"mac_{way}_total_pkt" for way in ("tx", "rx")]
    moved += [f"roce_{way}_{what}_pkt" for way in ("rx", "tx") for what in ("rc", "all")]
    failed = ("mac_rx_fcs_err_pkt", "roce_rx_err_pkt", "roce_tx_err_pkt", "roce_out_of_order", "roce_new_pkt_rty")
    counts = {f"{name}_num": packets for name in moved}
    counts.update({f"mac_{way}_total_oct_num": packets * 4096 for way in ("tx", "rx")})
    counts.update({f"{name}_num": errors for name in failed})
    return "packet statistics:\n" + "".join(f"{name}:{counts.get(name, 0)}\n" for name in STAT_NAMES)


def _priorities(head: str) -> tuple[str, ...]:
    return (f"{head}_pkt_num", *(f"{head}_pri{number}_pkt_num" for number in range(8)))


STAT_NAMES: tuple[str, ...] = (
    "mac_tx_mac_pause_num",
    "mac_rx_mac_pause_num",
    *_priorities("mac_tx_pfc"),
    *_priorities("mac_rx_pfc"),
    *(f"mac_{way}_{what}_num" for way in ("tx", "rx") for what in ("total_pkt", "total_oct", "bad_pkt", "bad_oct")),
    "mac_rx_fcs_err_pkt_num",
    *(f"roce_{way}_{what}_pkt_num" for way in ("rx", "tx") for what in ("rc", "all", "err")),
    "roce_cqe_num",
    "roce_rx_cnp_pkt_num",
    "roce_tx_cnp_pkt_num",
    "roce_unexpected_ack_num",
    "roce_out_of_order_num",
    "roce_verification_err_num",
    "roce_qp_status_err_num",
    "roce_new_pkt_rty_num",
    "roce_ecn_db_num",
    *(f"nic_{way}_all_{what}_num" for way in ("tx", "rx") for what in ("pkg", "oct")),
)


def _hw_stats(port: Port) -> str:
    used = len(port.reading.rows)
    counts = [(f"{what}_{verb}", 1 if verb == "alloc" and what != "mr" else 0)
              for what in ("pd", "mr", "cq", "qp") for verb in ("alloc", "dealloc")]  # fmt: skip
    counts += [("pd_active", 1 + used), ("mr_active", used), ("cq_active", 1 + used), ("qp_active", 1 + used)]
    counts += [("aeqe", 0), ("ceqe", 0)]
    return "".join(f"[devid {port.chip.logic_id}] {name}: {count}\n" for name, count in counts)


def _optical(port: Port) -> str:
    """A healthy module's readings are within its thresholds; each differs a little by chip."""
    absent, dark = port.fault("optical_absent"), port.fault("optical_dark")
    turn = port.chip.logic_id
    tx = [f"{1.3968 + 0.017 * ((turn + lane) % 4):.4f} mW" for lane in range(4)]
    rx = [f"{0.0054 if dark else 0.9907 + 0.009 * ((turn + lane) % 4):.4f} mW" for lane in range(4)]
    flags = "0xff" if dark or absent else "0x0"
    lanes = [(f"{way} Power{lane}", power[lane]) for lane in range(4) for way, power in (("Tx", tx), ("Rx", rx))]
    fields = [
        ("present", "not present" if absent else "present"),
        ("temperature", f"{44 + turn % 4} C"),
        ("high power enable reg", "enabled"),
        ("vendor name", "SIMULATED"),
        ("vendor part number", "SIM-QSFP-200G"),
        ("vendor serial number", f"SIM{port.chip.serial[-6:]}{turn:02d}"),
        ("vendor org unique id", "0xac 0x4a 0x0"),
        ("xsfp identifier", "QSFP+ or later"),
        ("xsfp wave length", "850 nm"),
        ("manufact date code", "2023.6.18"),
        ("Vcc", f"{3262.9 + turn % 3:.2f} mV"),
        *lanes,
        ("Vcc High Thres", "3465.00 mV"),
        ("Vcc Low Thres", "3135.00 mV"),
        ("Temp High Thres", "70 C"),
        ("Temp Low Thres", "0 C"),
        ("TxPower High Thres", "3.5481 mW"),
        ("TxPower Low Thres", "0.2818 mW"),
        ("RxPower High Thres", "3.5481 mW"),
        ("RxPower Low Thres", "0.1445 mW"),
        *((f"Tx Bias{lane}", f"{7.92 + 0.008 * lane:.4f} mA") for lane in range(4)),
        ("Tx Los Flag", "0x0"),
        ("Rx Los Flag", flags),
        ("Tx LoL Flag", "0x0"),
        ("Rx LoL Flag", flags),
        *((f"Host SNR Lane{lane}", "not supported") for lane in range(4)),
        *((f"Media SNR Lane{lane}", f"{22.1875 + 0.25 * lane:.4f} dB") for lane in range(4)),
    ]
    return "optical info:\n" + "".join(f"{name:<21}: {value}\n" for name, value in fields)


def _lldp(port: Port) -> str:
    chip = port.chip
    if not port.is_up:
        return f"{NOT_DONE}\n"
    return (
        "Chassis ID TLV\n        MAC: 02:00:00:00:00:01\n"
        f"Port ID TLV\n        Ifname: 400GE1/1/{chip.logic_id // 2 + 1}:{chip.logic_id % 2 + 1}\n"
        "System Name TLV\n        sim-leaf-1\nSystem Description TLV\n        Simulated switch\n"
        "System Capabilities TLV\n        Enabled capabilities: Bridge, Router\n"
        "Management Address TLV\n        IPv4: 192.0.2.1\nMaximum Frame Size TLV\n        9216\nEnd of LLDPDU TLV\n"
    )


def _route(port: Port) -> str:
    rows = [("Destination", "Gateway", "Genmask", "Flags", "Metric", "Ref", "Use", "Iface")]
    chip = port.chip
    if port.address and chip.netmask:
        if chip.gateway:
            rows.append(("default", chip.gateway, "0.0.0.0", "UG", "0", "0", "0", interface(chip)))
        network = ".".join(str(int(a) & int(m)) for a, m in zip(port.address.split("."), chip.netmask.split(".")))
        rows.append((network, "*", chip.netmask, "U", "0", "0", "0", interface(chip)))
    rows.append(("127.0.0.1", "*", "255.255.255.255", "UH", "0", "0", "0", "lo"))
    lines = ["{:<15} {:<15} {:<15} {:<5} {:<6} {:<5} {:>4} {}".format(*row) for row in rows]
    return "\n".join(["Routing table:", *lines]) + "\n"


def _status(port: Port) -> str:
    speed = f"{port.node.family.speed_mbit}Mb/s" if port.is_up else "Unknown!"
    return (
        f"Netdev status:Settings for {interface(port.chip)}:\n\tSpeed: {speed}\n\tDuplex: Full\n"
        f"\tLink detected: {'yes' if port.is_up else 'no'}\n"
    )


ITEMS: dict[str, Callable[[Port], str]] = {
    "-link": lambda port: f"link status: {'UP' if port.is_up else 'DOWN'}\n",
    "-link_stat": _link_stat,
    "-ip": _ip,
    "-net_health": _net_health,
    "-netdetect": lambda port: f"netdetect addr: {port.chip.netdetect or '0.0.0.0'}\n",
    "-gateway": lambda port: (
        f"default gateway:{port.chip.gateway}, Iface:{interface(port.chip)}\n" if port.chip.gateway else "\n"
    ),
    "-mtu": lambda port: f"mtu:{int(port.faults.number('mtu', port.chip.npu_id) or 1500)}\n",
    "-speed": lambda port: f"Speed: {port.node.family.speed_mbit} Mb/s\n" if port.is_up else "Speed: Unknown!\n",
    "-fec": lambda port: f"fec mode: {'no' if port.fault('fec_none') else 'rs'} FEC mode\n",
    "-vnic": _vnic,
    "-tls": _tls,
    "-ping": _ping,
    "-stat": _stat,
    "-hw_stats": _hw_stats,
    "-optical": _optical,
    "-lldp": _lldp,
    "-route": _route,
    "-status": _status,
}

_WITH_VALUE = ("-i", "-u", "-p")


def respond(arguments: Sequence[str], scene: Scene) -> Reply:
    """What the command line `hccn_tool ARGUMENTS` prints."""
    if scene.faults.has("hccn_refused") or not scene.is_privileged:
        return Reply(f"{REFUSED}\n", 1)
    device, items, words = _read(arguments)
    reading = next((one for one in scene.readings if str(one.chip.logic_id) == device), None)
    is_query = "-g" in arguments and len(items) == 1
    if not is_query or reading is None or scene.faults.is_driver_away() or not scene.node.family.speed_mbit:
        return Reply(f"{NOT_DONE}\n", 1)
    port = Port(scene.node, scene.faults, reading, words, time.time())
    text = ITEMS[items[0]](port)
    return Reply(text, 1 if text == f"{NOT_DONE}\n" else 0)


def _read(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The device ("" without one), the items, and the other words."""
    device, items, words = "", [], []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in _WITH_VALUE and rest:
            value = rest.pop(0)
            device = value if word == "-i" else device
        elif word in ITEMS:
            items.append(word)
        else:
            words.append(word)
    return device, items, words
