"""A simulated node as its tools see it: chips, versions, and the files that hold them and the faults of the moment."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from ascendrun.sim.ascend.tool.families import FAMILIES, Family

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


def load_faults(text: str) -> list[Fault]:
    return [Fault(**raw) for raw in json.loads(text)["faults"]]


def read_node(home: str) -> Node:
    with open(os.path.join(home, NODE_FILE), encoding="utf-8") as file:
        return load_node(file.read())


def read_faults(home: str) -> list[Fault]:
    """All faults that were ever switched on and not off, also those of a later moment."""
    try:
        with open(os.path.join(home, STATE_FILE), encoding="utf-8") as file:
            return load_faults(file.read())
    except FileNotFoundError:
        return []
