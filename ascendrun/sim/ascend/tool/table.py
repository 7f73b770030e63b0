"""The table of `npu-smi info`, in each layout, as printf makes it: a value too wide for its field moves the rest."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from ascendrun.sim.ascend.tool.live import Reading
from ascendrun.sim.ascend.tool.model import Chip, Node, Row

MAX_ROWS = 8  # a chip: npu-smi prints no more
NAME_LENGTH = 15
INCOMPLETE = (
    "[WARNING]The driver package may not be completely installed, which may cause function abnormal. "
    "Please reinstall it."  # voice: ok text of npu-smi
)


class Layout(NamedTuple):
    """The cells' widths, the two lines of heads, and how a chip's two rows and a process are formatted."""

    cells: tuple[int, ...]
    title: tuple[int, int]
    heads: tuple[str, str]
    power: str
    load: str
    foot_cells: tuple[int, ...]
    foot_head: str
    process: str
    die_rule: str = "dashes"  # between dies of one NPU: "dashes" (one cell) or "cells"
    npu_rule: tuple[int, ...] = ()  # cells of the line after an NPU, where they are not `cells`


_L1 = Layout(
    cells=(27, 15, 52),
    title=(24, 52),
    heads=(
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
        "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |",
    ),
    power="| {npu:<5} {name:<20}| {health:<13} | {watts:<11} {heat:<17} {huge:<5}/ {pages:<13} |",
    load="| {chip:<26}| {bus:<13} | {load:<11} {ddr:<5}/ {ddrs:<10} {hbm:<5}/ {hbms:<13} |",
    foot_cells=(27, 15, 52),
    foot_head="| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |",
    process="| {npu:<7} {chip:<18}| {pid:<13} | {name:<24} | {mb:<23} |",
)
_L1B = _L1._replace(
    cells=(27, 15, 53),
    title=(24, 53),
    heads=(_L1.heads[0][:-1] + " |", _L1.heads[1][:-1] + " |"),
    power="| {npu:<5} {name:<20}| {health:<13} | {watts:<11} {heat:<17} {huge:<6}/ {pages:<13} |",
    load="| {chip:<26}| {bus:<13} | {load:<11} {ddr:<5}/ {ddrs:<10} {hbm:<6}/ {hbms:<13} |",
    foot_cells=(27, 15, 53),
    foot_head=_L1.foot_head[:-1] + " |",
    process="| {npu:<7} {chip:<18}| {pid:<13} | {name:<24} | {mb:<24} |",
)
_L1C = _L1._replace(
    cells=(27, 15, 70),
    title=(35, 59),
    heads=(
        "| NPU   Name                | Health        | Power(W)             Temp(C)                 "
        "Hugepages-Usage(page)   |",
        "| Chip                      | Bus-Id        | AICore(%)            Memory-Usage(MB)        "
        "HBM-Usage(MB)           |",
    ),
    power="| {npu:<5} {name:<20}| {health:<13} | {watts:<20} {heat:<23} {huge:<5}/ {pages:<16} |",
    load="| {chip:<26}| {bus:<13} | {load:<20} {ddr:<5}/ {ddrs:<16} {hbm:<5}/ {hbms:<16} |",
    foot_cells=(27, 15, 70),
    foot_head="| NPU     Chip              | Process id    | Process name       | Process memory(MB)    "
    "| Process id in container |",
    process="| {npu:<7} {chip:<18}| {pid:<13} | {name:<18} | {mb:<21} | {inner:<23} |",
)


def _of_a3(layout: Layout) -> Layout:
    first, second = layout.heads
    return layout._replace(
        heads=(first, second.replace("| Chip        ", "| Chip  Phy-ID", 1)),
        load=layout.load.replace("{chip:<26}", "{chip:<5} {phy:<20}"),
    )


_L3 = Layout(
    cells=(31, 17, 54),
    title=(40, 44),
    heads=(
        "| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |",
        "| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |",
    ),
    power="| {npu:<7} {name:<22}| {health:<15} | {watts:<12} {heat:<17} {huge:<6}/ {pages:<13} |",
    load="| {chip:<7} {logic:<22}| {bus:<15} | {load:<12} {ddr:<5}/ {ddrs:<32} |",
    foot_cells=(31, 17, 54),
    foot_head="| NPU     Chip                  | Process id      | Process name             "
    "| Process memory(MB)        |",
    process="| {npu:<7} {chip:<22}| {pid:<15} | {name:<24} | {mb:<25} |",
    die_rule="cells",
)
_L3A = _L3._replace(
    heads=(
        "| NPU     Name                  | Health          | Power(W)     Temp(C)     Hugepages-Usage(page)     |",
        _L3.heads[1],
    ),
    power="| {npu:<7} {name:<22}| {health:<15} | {watts:<12} {heat:<17} {huge:<5}/ {pages:<14} |",
)
_L4 = Layout(
    cells=(8, 18, 15, 53),
    title=(40, 37),
    heads=(
        "| NPU ID | Name             | Health        | Power(W)    Temp(C)           Hugepages-Usage(page) |",
        "|        |                  | Bus-Id        | NPU Util(%) Memory-Usage(MB)  HBM-Usage(MB)         |",
    ),
    power="| {npu:<6} | {name:<16} | {health:<13} | {watts:<11} {heat:<17} {huge:<6}/ {pages:<13} |",
    load="|        |                  | {bus:<13} | {load:<11} {ddr:<5}/ {ddrs:<10} {hbm:<6}/ {hbms:<13} |",
    foot_cells=(27, 15, 53),
    foot_head="| NPU ID                    | Process id    | Process name             | Process memory(MB)       |",
    process="| {npu:<25} | {pid:<13} | {name:<24} | {mb:<24} |",
)
_L4C = _L4._replace(
    cells=(8, 18, 15, 70),
    title=(40, 54),
    heads=(
        "| NPU ID | Name             | Health        | Power(W)              Temp(C)                  "
        "Hugepages-Usage(page) |",
        "|        |                  | Bus-Id        | NPU Util(%)           Memory-Usage(MB)         "
        "HBM-Usage(MB)         |",
    ),
    power="| {npu:<6} | {name:<16} | {health:<13} | {watts:<21} {heat:<24} {huge:<6}/ {pages:<13} |",
    load="|        |                  | {bus:<13} | {load:<21} {ddr:<6}/ {ddrs:<16} {hbm:<6}/ {hbms:<13} |",
    foot_cells=(27, 15, 70),
    foot_head="| NPU ID                    | Process id    | Process name       | Process memory(MB)    "
    "| Process id in container |",
    process="| {npu:<25} | {pid:<13} | {name:<18} | {mb:<21} | {inner:<23} |",
    npu_rule=(27, 15, 70),
)
LAYOUTS: dict[str, Layout] = {
    "L1": _L1, "L1b": _L1B, "L1c": _L1C, "L2": _of_a3(_L1), "L2c": _of_a3(_L1C), "L3": _L3, "L3a": _L3A,
    "L4": _L4, "L4c": _L4C,
}  # fmt: skip


def render_table(node: Node, readings: Sequence[Reading], *, is_complete: bool = True) -> str:
    """The whole answer of `npu-smi info`; `readings` are those of the chips that answer, in order."""
    layout = LAYOUTS[node.layout]
    lines = [_rule(sum(layout.cells) + len(layout.cells) - 1)]
    left, right = layout.title
    lines.append(f"| npu-smi {node.tool_version:<{left}} Version: {node.driver_version:<{right}} |")
    lines += [_rule(*layout.cells), *layout.heads, _rule(*layout.cells, mark="=")]
    for number, reading in enumerate(readings):
        if number and readings[number - 1].chip.npu_id == reading.chip.npu_id:
            lines.append(_rule(*layout.cells) if layout.die_rule == "cells" else lines[0])
        values = _values(node, reading)
        lines += [layout.power.format(**values), layout.load.format(**values)]
        if number + 1 == len(readings) or readings[number + 1].chip.npu_id != reading.chip.npu_id:
            lines.append(_rule(*(layout.npu_rule or layout.cells), mark="="))
    if not node.chip.startswith("310B"):
        lines += _foot(layout, readings)
    if not is_complete:
        lines.append(INCOMPLETE)
    return "\n".join(lines) + "\n"


def _rule(*cells: int, mark: str = "-") -> str:
    return "+" + "+".join(mark * cell for cell in cells) + "+"


def _values(node: Node, reading: Reading) -> dict[str, object]:
    chip = reading.chip
    return {
        "npu": chip.npu_id,
        "name": node.family.name,
        "health": reading.health,
        "watts": shown_power(node, reading),
        "heat": reading.temperature_c,
        "huge": chip.hugepages_used,
        "pages": chip.hugepages_total,
        "chip": chip.chip_id,
        "phy": chip.logic_id,
        "logic": chip.logic_id,
        "bus": chip.bus_id,
        "load": reading.load_percent,
        "ddr": reading.ddr_used_mb,
        "ddrs": chip.ddr_mb,
        "hbm": reading.hbm_used_mb,
        "hbms": reading.hbm_mb,
    }


def shown_power(node: Node, reading: Reading) -> str:
    """310P cards measure no power of a chip; the second die of an A3 leaves it to the first."""
    if node.chip.startswith("310P"):
        return "NA"
    return "-" if node.family.dies == 2 and reading.chip.chip_id else f"{reading.power_w:.1f}"


def _foot(layout: Layout, readings: Sequence[Reading]) -> list[str]:
    lines = [_rule(*layout.foot_cells), layout.foot_head, _rule(*layout.foot_cells, mark="=")]
    width = sum(layout.foot_cells) + len(layout.foot_cells) + 1
    for npu_id in dict.fromkeys(reading.chip.npu_id for reading in readings):
        mine = [reading for reading in readings if reading.chip.npu_id == npu_id]
        rows = [_process(layout, one.chip, row) for one in mine for row in one.rows[:MAX_ROWS]]
        none = f"| No running processes found in NPU {npu_id}"
        lines += rows or [f"{none:<{width - 2}} |"]
        lines.append(_rule(*layout.foot_cells, mark="="))
    return lines


def _process(layout: Layout, chip: Chip, row: Row) -> str:
    name = row.name[:NAME_LENGTH]
    return layout.process.format(
        npu=chip.npu_id, chip=chip.chip_id, pid=row.pid, name=name, mb=row.memory_mb, inner="NA"
    )
