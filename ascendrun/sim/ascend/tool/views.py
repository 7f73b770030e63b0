"""The views `npu-smi info -t TYPE -i CARD [-c CHIP]`: blocks of `name : value` lines, one block a chip."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

from ascendrun.sim.ascend.tool.live import Reading, memory_of, percent
from ascendrun.sim.ascend.tool.model import Chip, Node
from ascendrun.sim.ascend.tool.table import NAME_LENGTH, shown_power

# Texts of -t health for a code; those of the tool are longer and differ by version.
_CODE_WORDS = {
    "A4025021": "ascend_monitor adda heart beat lost error",
    "8C03A000": "node type=process-manager, sensor type=General Software, "
    "event state=The process start failed or exit abnormally",
    "8C084E00": "node type=adda, sensor type=Heartbeat Sensor, event state=Heartbeat Lost.",
    "81078603": "node type=network, sensor type=Link, event state=Network port link status change",
    "80E01801": "node type=HBM, sensor type=Memory, event state=Multi Bit ECC",
    "80E18402": "node type=SOC, sensor type=Temperature, event state=Upper Critical",
}


class View(NamedTuple):
    """Input of a view: the readings of one card. `chip_id`: the chip that -c named, or None."""

    node: Node
    readings: Sequence[Reading]
    chip_id: int | None
    is_privileged: bool
    is_compatible: bool


def line(name: str, value: object, width: int = 30) -> str:
    return f"\t{name:<{width}} : {value}"


def render_view(kind: str, view: View) -> str:
    """The card's head, then a block a chip with its id first or last; the 950 has neither chips nor their ids. Raises
    KeyError for a kind that these chips do not have (`product` and others)."""
    if kind == "product" and not view.node.chip.startswith("310"):
        raise KeyError(kind)
    block, first, width = VIEWS[kind], view.readings[0], 40 if kind == "ecc" else 30
    if kind in ("board", "product") or (kind == "health" and view.chip_id is not None):
        lines = block(view, first)
    elif view.node.chip.startswith("Ascend950"):
        lines = [line("NPU ID", first.chip.npu_id, width), *block(view, first)]
    else:
        lines = [line("NPU ID", first.chip.npu_id, width), line("Chip Count", view.node.family.dies, width)]
        for reading in view.readings:
            chip = [line("Chip ID", reading.chip.chip_id, width)]
            lines += ["", *chip, *block(view, reading)] if kind == "common" else ["", *block(view, reading), *chip]
    if kind == "common" and view.node.family.has_mcu and view.chip_id is None:
        coolest = min(reading.temperature_c for reading in view.readings)
        lines += ["", line("Chip Name", "mcu"), line("Temperature(C)", coolest - 8)]
    return "\n".join(lines) + "\n"


def _usages(view: View, reading: Reading) -> list[str]:
    node, chip, load = view.node, reading.chip, reading.load_percent
    has_hbm = chip.hbm_mb > 0
    ddr, ram = ("DDR ", "DDR") if has_hbm else ("", "Memory")
    lines = [
        line(f"{ram} Capacity(MB)", chip.ddr_mb),
        line(f"{ram} Usage Rate(%)", percent(reading.ddr_used_mb, chip.ddr_mb)),
        line(f"{ddr}Hugepages Total(page)", chip.hugepages_total),
        line(f"{ddr}Hugepages Usage Rate(%)", percent(chip.hugepages_used, chip.hugepages_total)),
    ]
    if has_hbm:
        lines.append(line("HBM Capacity(MB)", reading.hbm_mb))
        lines.append(line("HBM Usage Rate(%)", percent(reading.hbm_used_mb, reading.hbm_mb)))
    lines.append(line("Aicore Usage Rate(%)", load))
    if node.family.has_vector:
        lines.append(line("Aivector Usage Rate(%)", load * 43 // 100))
    lines.append(line("Aicpu Usage Rate(%)", 0))
    lines.append(line("Ctrlcpu Usage Rate(%)", 3 if load else 0))
    lines.append(line(f"{ram} Bandwidth Usage Rate(%)", 0 if has_hbm else load // 3))
    if has_hbm:
        lines.append(line("HBM Bandwidth Usage Rate(%)", load * 38 // 100))
    if node.is_new and node.family.has_vector:
        lines.append(line("NPU Utilization(%)", load))
        lines.append(line("Aicube Usage Rate(%)", load * 97 // 100))
    return lines


def _common(view: View, reading: Reading) -> list[str]:
    used, total = memory_of(reading)
    lines = [line("Memory Usage Rate(%)", percent(reading.ddr_used_mb, reading.chip.ddr_mb))]
    if reading.chip.hbm_mb:
        lines.append(line("HBM Usage Rate(%)", percent(used, total)))
    lines += [
        line("Aicore Usage Rate(%)", reading.load_percent),
        line("Aicore Freq(MHZ)", reading.rated_mhz),
        line("Aicore curFreq(MHZ)", reading.aicore_mhz),
        line("Aicore Count", view.node.family.cores),
        line("Temperature(C)", reading.temperature_c),
    ]
    if not view.node.chip.startswith("310P") and not (view.node.family.dies == 2 and reading.chip.chip_id):
        lines.append(line("NPU Real-time Power(W)", f"{reading.power_w:.1f}"))
    return lines


def _power(view: View, reading: Reading) -> list[str]:
    if view.node.chip.startswith("310P"):
        return [line("Rated Power Dissipation(W)", "72.0")]
    name = "Power Dissipation(W)" if view.node.chip.startswith("310") else "NPU Real-time Power(W)"
    return [line(name, f"{reading.power_w:.1f}")]


def _temp(view: View, reading: Reading) -> list[str]:
    name = "NPU Temperature (C)" if view.node.chip.startswith("910") else "Temperature (C)"
    return [line(name, reading.temperature_c)]


def _memory(view: View, reading: Reading) -> list[str]:
    chip = reading.chip
    if not chip.hbm_mb:
        return [line("Capacity(MB)", chip.ddr_mb), line("Clock Speed(MHz)", 2133)]
    return [
        line("DDR Capacity(MB)", chip.ddr_mb),
        line("DDR Clock Speed(MHz)", 2400 if chip.ddr_mb else 0),
        line("HBM Capacity(MB)", reading.hbm_mb),
        line("HBM Clock Speed(MHz)", 1600),
        line("HBM Temperature(C)", reading.temperature_c + 2),
        line("HBM Manufacturer ID", "0x56"),
    ]


def _ecc(view: View, reading: Reading) -> list[str]:
    has_hbm = view.readings[0].chip.hbm_mb > 0
    has_ddr_totals = view.readings[0].chip.ddr_mb > 0
    hbm = (reading.single_bit, reading.double_bit)
    return [
        line(f"{ram} {bits} {what}", count if ram == "HBM" or not has_hbm else 0, 40)
        for ram in (("DDR", "HBM") if has_hbm else ("DDR",))
        for what, counts in (
            ("Error Count", hbm),
            ("Aggregate Total Err Cnt", hbm),
            ("Isolated Pages Count", (0, reading.double_bit)),
        )
        if ram == "HBM" or has_ddr_totals or not what.startswith("Aggregate")
        for bits, count in zip(("Single Bit", "Double Bit"), counts)
    ]


def _health(view: View, reading: Reading) -> list[str]:
    label = "Health" if view.chip_id is None else "Health Status"
    words = [_CODE_WORDS.get(code, f"fault event {code}") for code in reading.error_codes] or ["NA"]
    lines = [line(label, reading.health), line("Error Code", " ".join(reading.error_codes) or "NA")]
    lines.append(line("Error Information", words[0]))
    for word in words[1:]:
        lines += ["", line("", word)]
    return lines


def _processes(view: View, reading: Reading) -> list[str]:
    rows = [
        f"\tProcess id:{row.pid:<7} Process name:{row.name[:NAME_LENGTH]:<17} Process memory(MB):{row.memory_mb}"
        for row in reading.rows
    ]
    return rows or ["\tNo process in device."]


def _board(view: View, reading: Reading) -> list[str]:
    return _card_board(view, reading.chip) if view.chip_id is None else _chip_board(view.node, reading.chip)


def _card_board(view: View, chip: Chip) -> list[str]:
    node = view.node
    is_a1 = node.chip in ("910A", "910ProB")
    maker = () if is_a1 else (
        line("Product Name", node.family.product), line("Model", "NA"), line("Manufacturer", "NA"),
        line("Serial Number", chip.serial),
    )  # fmt: skip
    match = ("OK" if view.is_compatible else "NOK") if view.is_privileged else "NOT SUPPORT"
    subsystem = (0x0200, 0x0100) if is_a1 else (0x19E5, 0x4000)
    return [
        line("NPU ID", chip.npu_id),
        *maker,
        line("Software Version", node.driver_version),
        line("Firmware Version", node.firmware_version),
        line("Compatibility", match),
        line("Board ID", "0x02" if is_a1 else "0x65"),
        line("PCB ID", "A"),
        line("BOM ID", 1),
        line("PCIe Bus Info", chip.bus_id),
        line("Slot ID", chip.npu_id),
        line("Class ID", "NA"),
        line("PCI Vendor ID", "0x19E5"),
        line("PCI Device ID", f"0x{node.family.pci_device:04X}"),
        line("Subsystem Vendor ID", f"0x{subsystem[0]:04X}"),
        line("Subsystem Device ID", f"0x{subsystem[1]:04X}"),
        line("Chip Count", node.family.dies),
    ]


def _chip_board(node: Node, chip: Chip) -> list[str]:
    return [
        line("NPU ID", chip.npu_id),
        line("Chip ID", chip.chip_id),
        line("Chip Type", "Ascend"),
        line("Chip Name", node.family.name),
        line("Chip Version", "V1"),
        line("Board ID", "0x02" if node.chip in ("910A", "910ProB") else "0x65"),
        line("PCB ID", "NA"),
        line("BOM ID", 1),
        line("VDie ID", _die_id(chip.logic_id, 0x42C711D4)),
        line("NDie ID", _die_id(chip.logic_id, 0x27216594)),
        line("Chip Position ID", chip.logic_id),
        line("PCIe Bus Info", chip.bus_id),
        line("Firmware Version", node.firmware_version),
    ]


def _die_id(logic_id: int, seed: int) -> str:
    """Five words of hex digits, other for each chip."""
    words = [(seed + 0x01000193 * (5 * logic_id + part)) & 0xFFFFFFFF for part in range(5)]
    return " ".join(f"{word:08X}" for word in words)


def _product(view: View, reading: Reading) -> list[str]:
    chip = reading.chip
    return [line("NPU ID", chip.npu_id), line("Product Name", view.node.family.product),
            line("Serial Number", chip.serial)]  # fmt: skip


VIEWS: dict[str, Callable[[View, Reading], list[str]]] = {
    "board": _board,
    "usages": _usages,
    "common": _common,
    "temp": _temp,
    "power": _power,
    "memory": _memory,
    "ecc": _ecc,
    "health": _health,
    "proc-mem": _processes,
    "product": _product,
}

# The types that the help lists and that ask for a card; those without a view here say that they are not supported.
TYPES: tuple[str, ...] = (
    "board", "flash", "memory", "usages", "sensors", "temp", "power", "volt", "mac-addr", "common", "health", "product",
    "ecc", "ip", "sys-time", "i2c_check", "work-mode", "ecc-enable", "p2p-enable", "ssh-enable", "license",
    "customized-info", "device-share", "nve-level", "aicpu-config", "pcie-err", "mcu-monitor", "err-count", "boot-area",
    "vnpu-mode", "info-vnpu", "vnpu-svm", "cpu-num-cfg", "first-power-on-date", "proc-mem", "phyid-remap",
    "vnpu-cfg-recover", "key-manage", "template-info", "pkcs-enable", "p2p-mem-cfg", "pwm-mode", "pwm-duty-ratio",
    "boot-select", "topo",
)  # fmt: skip


USAGE = "Usage: npu-smi info <watch|proc|-h|-m|-l|-t type> [Options...]"
_TYPES_A_LINE = (9, 8, 5, 5, 6, 5, 5, 2)


def render_cards(node: Node, readings: Sequence[Reading]) -> str:
    """`info -l`; product and serial number only where the chips sit on cards."""
    npu_ids = list(dict.fromkeys(reading.chip.npu_id for reading in readings))
    has_chips = not node.chip.startswith("Ascend950")
    lines = [line("Card Count" if node.chip == "310" else "Total Count", len(npu_ids)), ""]
    for npu_id in npu_ids:
        lines.append(line("NPU ID", npu_id))
        if not node.chip.startswith("910"):
            serial = next(reading.chip.serial for reading in readings if reading.chip.npu_id == npu_id)
            lines += [line("Product Name", node.family.product), line("Serial Number", serial)]
        lines += [line("Chip Count", node.family.dies)] if has_chips else []
        lines.append("")
    return "\n".join(lines) + "\n"


def render_mapping(node: Node, readings: Sequence[Reading]) -> str:
    """`info -m`; A3 and 950 name the physical id too; a board's controller is after its chips."""
    has_phy = node.family.layouts[0] in ("L2", "L4")
    heads = ["NPU ID", "Chip ID", "Chip Logic ID", *(["Chip Phy-ID"] if has_phy else []), "Chip Name"]
    lines = ["\t" + " ".join(f"{head:<30}" for head in heads)]
    for number, reading in enumerate(readings):
        chip = reading.chip
        ids = [chip.npu_id, chip.chip_id, chip.logic_id, *([chip.logic_id] if has_phy else [])]
        lines.append("\t" + " ".join(f"{one:<30}" for one in ids) + f" {node.family.map_name}")
        is_last = number + 1 == len(readings) or readings[number + 1].chip.npu_id != chip.npu_id
        if is_last and node.family.has_mcu:
            cells = [chip.npu_id, node.family.dies, *("-" for _ in ids[2:]), "Mcu"]
            lines.append("\t" + " ".join(f"{cell:<30}" for cell in cells))
    return "\n".join(lines) + "\n"


def render_topology(node: Node, readings: Sequence[Reading]) -> str:
    """`info -t topo`: who reaches whom over what, and the CPUs near each; ARM servers with A3 name no CPUs."""
    chips = [reading.chip for reading in readings]
    is_a3 = node.family.layouts[0] == "L2"
    label = "Phy-ID" if is_a3 else "NPU"
    names = [f"{label}{chip.logic_id}" for chip in chips]
    head = "".join(f"{name:<11}" for name in names)
    lines = [f"{'':<11}{head}" if is_a3 else f"\t   {head}CPU Affinity"]
    for name, chip in zip(names, chips):
        cells = "".join(f"{link(node, chip, other):<11}" for other in chips)
        lines.append(f"{name:<11}{cells}" + ("" if is_a3 else cpus_of(node, chip)))
    return "\n".join([*lines, "", "Legend:", "", *_legend(node)]) + "\n"


def link(node: Node, one: Chip, other: Chip) -> str:
    """How two chips are joined: 910A in two rings of four, 910B each with each, A3 through a switch."""
    if one.logic_id == other.logic_id:
        return "X"
    if node.chip in ("910A", "910ProB"):
        return "HCCS" if one.npu_id // 4 == other.npu_id // 4 else "SYS"
    if node.chip == "910_93":
        return "SIO" if one.npu_id == other.npu_id else "HCCS_SW"
    if node.chip.startswith("910"):
        return "HCCS"
    if node.chip.startswith("Ascend950"):
        return "UB"
    return "PIX" if one.npu_id == other.npu_id else "SYS"


def cpus_of(node: Node, chip: Chip) -> str:
    """Each pair of cards has its own range, in the order of an 800T A2."""
    share = max(1, node.cpus // 8)
    slot = (6, 4, 0, 2)[chip.npu_id // 2 % 4]
    return f"{slot * share}-{slot * share + share - 1}"


def _legend(node: Node) -> list[str]:
    return [
        "  X    = Self",
        "  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.",
        "  PHB  = Path traversing PCIe and the PCIe host bridge of a CPU.",
        "  PIX  = Path traversing a single PCIe switch",
        "  PXB  = Path traversing multiple PCIe switches",
        *([] if node.chip.startswith("Ascend950") else ["  HCCS = Connection traversing HCCS."]),
        *(["  SIO  = Path traversing the SIO bus"] if node.family.layouts[0] in ("L2", "L4") else []),
        *(["  HCCS_SW = Connection traversing HCCS through a switch"] if node.chip == "910_93" else []),
        *(["  UB   = Connection traversing UB."] if node.chip.startswith("Ascend950") else []),
        "  NA   = Unknown relationship.",
    ]


def watch_head(node: Node) -> str:
    return "".join(f"{column:<12}" for column in _watch_columns(node)).rstrip() + "\n"


def watch_rows(node: Node, readings: Sequence[Reading]) -> str:
    return "".join("".join(f"{cell:<12}" for cell in _watch_row(node, reading)) + "\n" for reading in readings)


def _watch_columns(node: Node) -> tuple[str, ...]:
    columns = ("NpuID(Idx)", "ChipId(Idx)", "Pwr(W)", "Temp(C)", "AI Core(%)", "AI Cpu(%)", "Ctrl Cpu(%)",
               "Memory(%)", "Memory BW(%)")  # fmt: skip
    return (*columns, "NPU Util(%)", "AI Cube(%)") if node.is_new and node.family.has_vector else columns


def _watch_row(node: Node, reading: Reading) -> list[object]:
    load, chip = reading.load_percent, reading.chip
    power = shown_power(node, reading)
    row: list[object] = [chip.npu_id, chip.chip_id, "NA" if power == "-" else power, reading.temperature_c, load, 0,
                         3 if load else 0, percent(*memory_of(reading)), load * 38 // 100]  # fmt: skip
    return [*row, load, load * 97 // 100][: len(_watch_columns(node))]


def render_help() -> str:
    """`info -h`."""
    lines = [USAGE, "", "Commands:"]
    for name, meaning in (
        ("watch", "Show all device's status in scrolling format"),
        ("proc", "Show device's matrix process status in scrolling format"),
        ("-h, --help", "Show this help text and exit"),
        ("-m", "Show all device's mapping information"),
        ("-l", "Show all device's topology information"),
        ("-t type", "Show information for type"),
    ):
        lines.append(f"       {name:<15}{meaning}")
    lines += _type_lines()
    lines += ["", "Options:"]
    for name, meaning in (("-i %d", "Card ID"), ("-c %d", "Chip ID"), ("-p %d", "Chip Physical ID")):
        lines.append(f"       {name:<15}{meaning}")
    return "\n".join(lines) + "\n"


def _type_lines() -> list[str]:
    """The types, as many a line as the tool's own help has them."""
    rest = list(TYPES)
    lines: list[str] = []
    for count in _TYPES_A_LINE:
        words, rest = rest[:count], rest[count:]
        lines.append(" " * 22 + ("type: " if not lines else " " * 6) + ", ".join(words) + ("," if rest else "."))
    return lines
