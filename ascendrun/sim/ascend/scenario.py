"""The description of a simulated node, and the node that its tools show.

Scenario(chip="910B3", cards=8, driver="24.1.rc2", ...)      load_scenario(path): the same from YAML or JSON
make_node(scenario, now_s=...) -> Node                       make_faults(scenario, now_s=...) -> [Fault]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.sim.ascend.tool.model import FAMILIES, KINDS, OF_CARD, Chip, Family, Fault, Node, Row
from ascendrun.text import Text, suggestion

T = TypeVar("T")

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")

FIRST_WIDE_DRIVER = 26  # npu-smi's tables are wide from this driver on
LAST_OLD_310_DRIVER = 22  # whose table of a 310 is not quite as wide as its lines
BOOTED_AGO_S = 3 * 86400.0
FIXABLE = ("health", "error_codes", "power_w", "temperature_c", "load_percent", "ddr_used_mb", "hbm_used_mb",
           "single_bit", "double_bit")  # fmt: skip


@dataclass(frozen=True)
class PlannedFault:
    """A fault of the scenario: `card` is an NPU id, None for a fault of the node; in force `after_s` seconds on."""

    name: str
    card: int | None = None
    value: str | None = None
    after_s: float = 0.0


@dataclass(frozen=True)
class ShownProcess:
    """A process that the table lists without running here; `device` is a chip's logic id."""

    device: int
    pid: int
    name: str
    memory_mb: int
    load: int = 0


@dataclass(frozen=True)
class Scenario:
    """One node. Ids of devices are logic ids, one a chip (two a card on an A3 and most 310P); ids of cards are NPU ids.

    `tool`: npu-smi's own version, None: the driver's. `layout` None: the chip's usual one for that driver.
    `npu_ids` None: 0, 1, 2, …. `addresses`: of the ports by device, None: of their own network; an address may
    be None (not set). `number`: which node of the cluster, for the addresses. `cann`, `nnae`: None: not installed.
    `components`: versions in version.cfg that differ from CANN's own, `build`: the builds' own number there, None: of
    the usual build. `fixed`: readings by device that do not follow
    the processes (names: FIXABLE).
    """

    chip: str = "910B3"
    cards: int = 8
    npu_ids: tuple[int, ...] | None = None
    driver: str = "24.1.rc2"
    tool: str | None = None
    firmware: str = "7.3.0.1.231"
    is_compatible: bool = True
    is_complete: bool = True
    cann: str | None = "8.0.RC3"
    components: Mapping[str, str] = field(default_factory=dict)
    build: str | None = None
    nnae: str | None = None
    arch: str = "aarch64"
    layout: str | None = None
    number: int = 0
    addresses: tuple[str | None, ...] | None = None
    netmask: str = "255.255.0.0"
    gateway: str | None = "29.1.0.1"
    has_tls: bool = False
    cpus: int = 192
    processes: tuple[ShownProcess, ...] = ()
    fixed: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    faults: tuple[PlannedFault, ...] = ()

    @property
    def family(self) -> Family:
        return FAMILIES[self.chip]

    @property
    def cards_ids(self) -> tuple[int, ...]:
        return self.npu_ids if self.npu_ids is not None else tuple(range(self.cards))


def make_node(scenario: Scenario, *, now_s: float) -> Node:
    """Raises InvalidInputError for a scenario that no node can be."""
    check_scenario(scenario)
    dies = scenario.family.dies
    chips = [
        _chip(scenario, npu_id, chip_id, place * dies + chip_id)
        for place, npu_id in enumerate(scenario.cards_ids)
        for chip_id in range(dies)
    ]
    rows = [Row(one.device, one.pid, one.name, one.memory_mb, one.load, 3600.0) for one in scenario.processes]
    return Node(
        chip=scenario.chip,
        layout=scenario.layout or _usual_layout(scenario),
        tool_version=scenario.tool or scenario.driver,
        driver_version=scenario.driver,
        firmware_version=scenario.firmware,
        is_compatible=scenario.is_compatible,
        booted_s=now_s - BOOTED_AGO_S,
        cpus=scenario.cpus,
        chips=tuple(chips),
        rows=tuple(rows),
    )


def make_faults(scenario: Scenario, *, now_s: float) -> list[Fault]:
    return [Fault(one.name, one.card, now_s + one.after_s, one.value) for one in scenario.faults]


def _usual_layout(scenario: Scenario) -> str:
    layouts = scenario.family.layouts
    first = (scenario.tool or scenario.driver).split(".")[0]
    major = int(first) if first.isdigit() else FIRST_WIDE_DRIVER - 1
    if "L3a" in layouts:
        return "L3a" if major <= LAST_OLD_310_DRIVER else "L3"
    return layouts[-1] if major >= FIRST_WIDE_DRIVER else layouts[0]


def _chip(scenario: Scenario, npu_id: int, chip_id: int, device: int) -> Chip:
    """Return a chip. Power, memory and temperature differ a little by chip, as on real hardware."""
    family = scenario.family
    turn = device % 8
    ddr_mb = (13553, 15567, 15567, 15567)[turn % 4] if family.name == "910A" else family.ddr_mb
    has_port = family.speed_mbit > 0
    address: str | None = f"29.1.{1 + scenario.number % 250}.{10 + device}"
    if scenario.addresses is not None:
        address = scenario.addresses[device]
    bus = family.buses[device % len(family.buses)] if family.buses else None
    return Chip(
        npu_id=npu_id,
        chip_id=chip_id,
        logic_id=device,
        bus_id=f"0000:{bus}:00.0" if bus else "NA",
        hbm_mb=family.hbm_mb,
        hbm_idle_mb=family.hbm_idle_mb + (turn if family.hbm_idle_mb else 0),
        ddr_mb=ddr_mb,
        ddr_used_mb=920 + 200 * turn if ddr_mb else 0,
        hugepages_total=0,
        hugepages_used=0,
        idle_w=round(family.idle_w + 0.7 * turn, 1),
        idle_c=family.idle_c + turn % 4,
        address=address if has_port else None,
        netmask=scenario.netmask if has_port else None,
        gateway=scenario.gateway if has_port else None,
        netdetect=scenario.gateway if has_port else None,
        vnic=f"192.168.{scenario.number % 250}.{199 + device % 50}" if family.dies == 2 and has_port else None,
        has_tls=scenario.has_tls,
        serial=f"SIM{scenario.number:04d}{npu_id:05d}",
        fixed=dict(scenario.fixed.get(device, {})),
    )


def check_scenario(scenario: Scenario, *, file: str = "scenario") -> None:
    """Raises InvalidInputError with everything that is wrong."""
    problems = _problems(scenario)
    if problems:
        raise InvalidInputError([Problem(file, None, None, message, hint) for message, hint in problems])


def _problems(scenario: Scenario) -> list[tuple[str, Text | str | None]]:
    if scenario.chip not in FAMILIES:
        return [(f"chip: {scenario.chip} is unknown", suggestion(scenario.chip, list(FAMILIES)))]
    found: list[tuple[str, Text | str | None]] = []
    layouts = scenario.family.layouts
    devices = len(scenario.cards_ids) * scenario.family.dies
    if scenario.layout is not None and scenario.layout not in layouts:
        found.append((f"layout: {scenario.layout} is not one of a {scenario.chip}", f"known: {', '.join(layouts)}"))
    if scenario.npu_ids is not None and len(set(scenario.npu_ids)) != len(scenario.npu_ids):
        found.append(("npu_ids: duplicate id", None))
    if scenario.addresses is not None and len(scenario.addresses) != devices:
        found.append((f"addresses: {len(scenario.addresses)} for {devices} devices", None))
    found += [(f"fixed: there is no device {one}", None) for one in scenario.fixed if not 0 <= one < devices]
    names = {name for reading in scenario.fixed.values() for name in reading}
    found += [(f"fixed: {name} is unknown", suggestion(name, FIXABLE)) for name in sorted(names - set(FIXABLE))]
    found += [
        (f"processes: there is no device {one.device}", None)
        for one in scenario.processes
        if not 0 <= one.device < devices
    ]
    places = [(one.device, one.pid) for one in scenario.processes]
    found += [
        (f"processes: duplicate pid {pid} on device {device}", None)
        for device, pid in sorted({place for place in places if places.count(place) > 1})
    ]
    return found + [problem for fault in scenario.faults for problem in fault_problems(fault, scenario.cards_ids)]


def fault_problems(fault: PlannedFault, npu_ids: Sequence[int]) -> list[tuple[str, Text | str | None]]:
    """What is wrong with a fault on a node of these cards."""
    kind = KINDS.get(fault.name)
    if kind is None:
        return [(f"fault {fault.name} is unknown", suggestion(fault.name, list(KINDS)))]
    found: list[tuple[str, Text | str | None]] = []
    if kind.of == OF_CARD and fault.card not in npu_ids:
        cards = ", ".join(str(npu_id) for npu_id in npu_ids)
        found.append((f"fault {fault.name}: there is no card {fault.card}", f"cards: {cards}"))
    if kind.of != OF_CARD and fault.card is not None:
        found.append((f"fault {fault.name} affects the node, not a card", "remove the card"))
    if fault.value is not None and kind.default is None:
        found.append((f"fault {fault.name} does not accept a value", None))
    if fault.value is not None and kind.is_number:
        if not _NUMBER.fullmatch(fault.value) or not float(fault.value):
            found.append((f"fault {fault.name}: {fault.value} must be a number above 0", "for example 5 or 0.5"))
    return found


def load_scenario(path: Path) -> Scenario:
    """From a file of YAML or JSON. Raises InvalidInputError, OSError."""
    return read_scenario(path.read_bytes(), str(path))


def read_scenario(text: str | bytes, file: str) -> Scenario:
    """Return the scenario. Raises InvalidInputError with every problem found."""
    from ascendrun.core.reader.yaml_source import MappingNode, read_yaml, to_plain

    source = read_yaml(text, file)
    if source.problems:
        raise InvalidInputError(source.problems)
    if not isinstance(source.root, MappingNode):
        raise InvalidInputError([Problem(file, None, None, "expected a mapping of a scenario's fields")])
    problems: list[Problem] = []
    values = _known(Scenario, to_plain(source.root), file, problems, "")
    values["faults"] = _items(PlannedFault, values.get("faults", ()), file, problems, "faults: ")
    values["processes"] = _items(ShownProcess, values.get("processes", ()), file, problems, "processes: ")
    values["fixed"] = {
        int(device): reading for device, reading in values.get("fixed", {}).items() if str(device).isdigit()
    }
    if problems:
        raise InvalidInputError(problems)
    try:
        scenario = Scenario(**values)
        check_scenario(scenario, file=file)
    except (TypeError, AttributeError, ValueError) as error:
        raise InvalidInputError(
            [Problem(file, None, None, f"a field has a value of the wrong kind: {error}")]
        ) from error
    return scenario


def _known(kind: type[Any], raw: Mapping[str, Any], file: str, problems: list[Problem], where: str) -> dict[str, Any]:
    names = [one.name for one in fields(kind)]
    for name in raw:
        if name not in names:
            problems.append(Problem(file, None, None, f"{where}{name} is unknown", suggestion(name, names)))
    values = {name: value for name, value in raw.items() if name in names}
    if "value" in values and values["value"] is not None:
        values["value"] = str(values["value"])
    return values


def _items(kind: type[T], raw: Any, file: str, problems: list[Problem], where: str) -> tuple[T, ...]:
    items = []
    for one in raw if isinstance(raw, tuple) else ():
        values = _known(kind, one if isinstance(one, dict) else {"name": str(one)}, file, problems, where)
        try:
            items.append(kind(**values))
        except TypeError as error:
            problems.append(Problem(file, None, None, f"{where}{error}"))
    return tuple(items)
