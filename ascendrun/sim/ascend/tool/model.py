"""A simulated node as its tools see it: chips, versions, and the files that hold them and the faults of the moment."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple, Sequence

HOME = "var/lib/ascend-sim"  # below the root of the node's tree
NODE_FILE = "node.json"
STATE_FILE = "state.json"
MARKER_FOLDER = "npu"


class Chip(NamedTuple):
    """One chip (a die of an A3). `fixed`: readings that do not follow the processes, by name."""

    npu_id: int
    chip_id: int
    logic_id: int
    bus_id: str
    hbm_mb: int
    hbm_idle_mb: int
    ddr_mb: int
    ddr_used_mb: int
    hugepages_total: int
    hugepages_used: int
    idle_w: float
    idle_c: int
    address: str | None
    netmask: str | None
    gateway: str | None
    netdetect: str | None
    vnic: str | None
    has_tls: bool
    serial: str
    fixed: dict[str, Any]


class Row(NamedTuple):
    """One process that holds memory of a chip; `load` is the share of the AI cores that it keeps busy."""

    logic_id: int
    pid: int
    name: str
    memory_mb: int
    load: int
    age_s: float


class Fault(NamedTuple):
    """One fault: of a card, or of the whole node (`card` None); in force from `since_s` (UTC seconds) on."""

    name: str
    card: int | None
    since_s: float
    value: str | None


class Node(NamedTuple):
    """`chip` is a name of FAMILIES; `rows`: processes that the table lists without running here."""

    chip: str
    layout: str
    tool_version: str
    driver_version: str
    firmware_version: str
    is_compatible: bool
    booted_s: float
    cpus: int
    chips: tuple[Chip, ...]
    rows: tuple[Row, ...]

    @property
    def family(self) -> Family:
        return FAMILIES[self.chip]

    @property
    def is_new(self) -> bool:
        """Whether the driver prints what 25.x and newer added to the views."""
        major = self.tool_version.split(".")[0]
        return major.isdigit() and int(major) >= 25


def dump_node(node: Node) -> str:
    raw = dict(node._asdict())
    raw["chips"] = [dict(chip._asdict()) for chip in node.chips]
    raw["rows"] = [dict(row._asdict()) for row in node.rows]
    return json.dumps(raw, indent=1)


def load_node(text: str) -> Node:
    raw = json.loads(text)
    raw["chips"] = tuple(Chip(**chip) for chip in raw["chips"])
    raw["rows"] = tuple(Row(**row) for row in raw["rows"])
    return Node(**raw)


def dump_faults(faults: list[Fault]) -> str:
    return json.dumps({"faults": [dict(fault._asdict()) for fault in faults]}, indent=1)


def read_node(home: str) -> Node:
    with open(os.path.join(home, NODE_FILE), encoding="utf-8") as file:
        return load_node(file.read())


def read_faults(home: str) -> list[Fault]:
    """All faults that were ever switched on and not off, also those of a later moment."""
    try:
        with open(os.path.join(home, STATE_FILE), encoding="utf-8") as file:
            return [Fault(**raw) for raw in json.loads(file.read())["faults"]]
    except FileNotFoundError:
        return []


class Family(NamedTuple):
    """One kind of chip. Megabytes are 2**20 bytes; `memory_mb` of the 310 family is its only memory, shown as DDR.

    `layouts`: those that the tool may use for it, the usual one first, the wide one of newer drivers last.
    """

    name: str
    map_name: str
    layouts: tuple[str, ...]
    dies: int
    hbm_mb: int
    ddr_mb: int
    hbm_idle_mb: int
    idle_w: float
    busy_w: float
    idle_c: int
    busy_c: int
    cores: int
    mhz: int
    idle_mhz: int
    buses: tuple[str, ...]
    pci_device: int
    speed_mbit: int
    has_vector: bool = True
    has_mcu: bool = True
    product: str = "NA"


_BUSES_910A = ("61", "DB", "B2", "3E", "60", "DA", "B1", "3D")
_BUSES_910B = ("C1", "C2", "81", "82", "01", "02", "41", "42")
_BUSES_A3 = ("9D", "9F", "99", "9B", "95", "97", "91", "93", "8D", "8F", "89", "8B", "85", "87", "81", "83")
_BUSES_310P = ("01", "01", "02", "02", "81", "81", "82", "82")
_BUSES_950 = ("71", "61", "01", "11", "F1", "E1", "81", "91")
_NARROW_AND_WIDE = ("L1", "L1b", "L1c")


def _a2(name: str, hbm_mb: int, cores: int, mhz: int = 1800) -> Family:
    return Family(
        name=name, map_name=f"Ascend {name}", layouts=_NARROW_AND_WIDE, dies=1, hbm_mb=hbm_mb, ddr_mb=0,
        hbm_idle_mb=3377, idle_w=94.0, busy_w=310.0, idle_c=40, busy_c=58, cores=cores, mhz=mhz, idle_mhz=800,
        buses=_BUSES_910B, pci_device=0xD802, speed_mbit=200000, product="IT21HMDC02-B2",
    )  # fmt: skip


def _a1(name: str) -> Family:
    return Family(
        name=name, map_name=f"Ascend {name}", layouts=_NARROW_AND_WIDE, dies=1, hbm_mb=32768, ddr_mb=15137,
        hbm_idle_mb=0, idle_w=67.0, busy_w=213.0, idle_c=37, busy_c=60, cores=32, mhz=1000, idle_mhz=1000,
        buses=_BUSES_910A, pci_device=0xD801, speed_mbit=100000, has_vector=False, has_mcu=False,
    )  # fmt: skip


def _small(name: str, dies: int, memory_mb: int, buses: tuple[str, ...], product: str) -> Family:
    return Family(
        name=name, map_name=f"Ascend {name}", layouts=("L3", "L3a"), dies=dies, hbm_mb=0, ddr_mb=memory_mb,
        hbm_idle_mb=0, idle_w=12.8, busy_w=70.0, idle_c=45, busy_c=70, cores=8, mhz=1080, idle_mhz=1080,
        buses=buses, pci_device=0xD500, speed_mbit=0, has_vector=False, has_mcu=False, product=product,
    )  # fmt: skip


def _a5(name: str, hbm_mb: int) -> Family:
    return Family(
        name=name, map_name=name, layouts=("L4", "L4c"), dies=1, hbm_mb=hbm_mb, ddr_mb=0, hbm_idle_mb=4857,
        idle_w=190.0, busy_w=420.0, idle_c=46, busy_c=71, cores=32, mhz=1650, idle_mhz=800, buses=_BUSES_950,
        pci_device=0xD806, speed_mbit=400000, product="A310-50-C00MM304A1",
    )  # fmt: skip


_A3 = Family(
    name="Ascend910", map_name="Ascend910", layouts=("L2", "L2c"), dies=2, hbm_mb=65536, ddr_mb=0, hbm_idle_mb=3195,
    idle_w=178.5, busy_w=620.0, idle_c=36, busy_c=59, cores=24, mhz=1800, idle_mhz=800, buses=_BUSES_A3,
    pci_device=0xD803, speed_mbit=200000, product="IT22SFDA01",
)  # fmt: skip

# By the name that a scenario uses; the A3 is "910_93" there, since npu-smi calls it only Ascend910.
FAMILIES: dict[str, Family] = {
    "910A": _a1("910A"),
    "910ProB": _a1("910ProB"),
    "910B1": _a2("910B1", 65536, 24),
    "910B2": _a2("910B2", 65536, 24),
    "910B2C": _a2("910B2C", 65536, 24),
    "910B3": _a2("910B3", 65536, 20),
    "910B4": _a2("910B4", 32768, 20, 1650),
    "910B4-1": _a2("910B4-1", 65536, 20, 1650),
    "910_93": _A3,
    "310": _small("310", 4, 7757, (), "Atlas 300I"),
    "310P3": _small("310P3", 2, 44278, _BUSES_310P, "Atlas 300I Duo"),
    "Ascend950PR": _a5("Ascend950PR", 131072),
    "Ascend950DT": _a5("Ascend950DT", 98304),
}


OF_CARD, OF_NODE = "card", "node"


class Kind(NamedTuple):
    """`default`: what the fault's value is where none is given; None where it has no value."""

    of: str
    meaning: str
    default: str | None = None
    is_number: bool = False  # plain, without a sign


KINDS: dict[str, Kind] = {
    "dropped": Kind(OF_CARD, "the card is off the bus: no list has it, asking for it is an invalid card id"),
    "driver_reset": Kind(
        OF_CARD, "the driver returns -8005 for VALUE seconds, then the card is off the bus", "5", is_number=True
    ),
    "health_warning": Kind(OF_CARD, "health Warning, with the error codes VALUE", "80E18402"),
    "health_alarm": Kind(OF_CARD, "health Alarm, with the error codes VALUE", "A4025021 8C03A000 8C084E00"),
    "health_critical": Kind(OF_CARD, "health Critical, with the error codes VALUE", "80E01801"),
    "health_unknown": Kind(OF_CARD, "health UNKNOWN: the device has not started"),
    "ecc_single": Kind(OF_CARD, "HBM single bit errors: VALUE more a second", "1", is_number=True),
    "ecc_double": Kind(
        OF_CARD, "HBM double bit errors, with a page isolated for each: VALUE more a second", "0.2", is_number=True
    ),
    "hbm_short": Kind(OF_CARD, "the HBM has only VALUE percent of its size", "90", is_number=True),
    "ghost_process": Kind(
        OF_CARD, "a process VALUE that no longer runs is listed and holds HBM", "39999", is_number=True
    ),
    "hbm_held": Kind(OF_CARD, "VALUE MB of HBM are held, by no process of the table", "29000", is_number=True),
    "throttled": Kind(OF_CARD, "hot, and at VALUE percent of its usual clock", "55", is_number=True),
    "rated_clock": Kind(OF_CARD, "the AI cores are rated for VALUE MHz", "1500", is_number=True),
    "hot": Kind(OF_CARD, "VALUE degrees", "96", is_number=True),
    "link_down": Kind(OF_CARD, "the link of its port is down"),
    "link_flaps": Kind(OF_CARD, "the link goes down for a second every VALUE seconds", "10", is_number=True),
    "net_health": Kind(OF_CARD, "net_health reports VALUE", "Receive timeout"),
    "tls_on": Kind(OF_CARD, "TLS on"),
    "tls_off": Kind(OF_CARD, "TLS off"),
    "ip_missing": Kind(OF_CARD, "the port has no address"),
    "ip_v6": Kind(OF_CARD, "the port has an IPv6 address only"),
    "hccn_conf_stale": Kind(OF_CARD, "the port has another address than in /etc/hccn.conf"),
    "mtu": Kind(OF_CARD, "the port sends packets of up to VALUE bytes", "4200", is_number=True),
    "unreachable": Kind(OF_CARD, "no reply to ping from the address VALUE, or from any", "any"),
    "fec_none": Kind(OF_CARD, "no forward error correction"),
    "optical_absent": Kind(OF_CARD, "no optical module"),
    "optical_dark": Kind(OF_CARD, "the optical module receives next to no light"),
    "roce_errors": Kind(OF_CARD, "RoCE retransmissions and errors: VALUE more a second", "3", is_number=True),
    "driver_missing": Kind(OF_NODE, "npu-smi cannot reach the driver: -8005"),
    "device_used": Kind(OF_NODE, "another container holds the devices: -8020"),
    "driver_incomplete": Kind(OF_NODE, "npu-smi warns that the driver may not be completely installed"),
    "firmware_mismatch": Kind(OF_NODE, "driver and firmware do not fit: Compatibility NOK"),
    "hccn_refused": Kind(OF_NODE, "hccn_tool may not read the devices"),
    "hang": Kind(OF_NODE, "the tool VALUE (npu-smi, hccn_tool, both) sleeps and ignores TERM", "both"),
    "slow": Kind(OF_NODE, "the tools respond after VALUE seconds", "5", is_number=True),
    "trickle": Kind(OF_NODE, "the tools write a byte every VALUE seconds", "0.5", is_number=True),
    "garbage": Kind(OF_NODE, "the tools write bytes that mean nothing"),
    "truncated": Kind(OF_NODE, "the tools' output ends in the middle of a line"),
}


class Faults:
    """The faults in force at one moment."""

    def __init__(self, faults: Sequence[Fault], now_s: float) -> None:
        self._active: list[Fault] = [fault for fault in faults if fault.since_s <= now_s]
        self._now_s = now_s

    def of(self, name: str, card: int | None = None) -> Fault | None:
        """The fault in force on this card (None: the node), or None."""
        for fault in self._active:
            if fault.name == name and fault.card == card:
                return fault
        return None

    def has(self, name: str, card: int | None = None) -> bool:
        return self.of(name, card) is not None

    def age_s(self, fault: Fault) -> float:
        return self._now_s - fault.since_s

    def number(self, name: str, card: int | None = None) -> float | None:
        """The value of the fault in force as a number; None where it is not in force."""
        fault = self.of(name, card)
        return None if fault is None else float(value_of(fault))

    def grown(self, name: str, card: int) -> int:
        """How many there are by now of what grows by the fault's value each second; at least 1 once in force."""
        fault = self.of(name, card)
        return 0 if fault is None else 1 + int(float(value_of(fault)) * self.age_s(fault))

    def is_driver_away(self) -> bool:
        """Whether the driver does not respond now: missing, or in its reset."""
        reset = next((fault for fault in self._active if fault.name == "driver_reset"), None)
        return self.has("driver_missing") or (reset is not None and self.age_s(reset) < float(value_of(reset)))

    def is_gone(self, card: int) -> bool:
        return self.has("dropped", card) or self.has("driver_reset", card)


def value_of(fault: Fault) -> str:
    return fault.value if fault.value is not None else KINDS[fault.name].default or ""
