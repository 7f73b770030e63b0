"""Output of npu-smi about the entire node: -l, -m, -t topo, watch, -v and the help."""

from __future__ import annotations

from typing import Sequence

from ascendrun.sim.ascend.tool.live import Reading, memory_of, percent
from ascendrun.sim.ascend.tool.model import Chip, Node
from ascendrun.sim.ascend.tool.table import shown_power
from ascendrun.sim.ascend.tool.views import TYPES, line

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


def render_version(node: Node) -> str:
    return f"npu-smi version: {node.tool_version}\n"


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
