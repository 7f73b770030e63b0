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
    """The two lines of heads, and how a chip's two rows and a process are formatted. `title`: width of the tool
    version."""

    title: int
    heads: tuple[str, str]
    power: str
    load: str
    foot_head: str
    process: str
    die_rule: str = "dashes"  # between dies of one NPU: "dashes" (one cell) or "cells"
    is_foot_ruled: bool = False  # the line after an NPU has the cells of the process table

    @property
    def cells(self) -> tuple[int, ...]:
        return tuple(len(cell) for cell in self.heads[1].split("|")[1:-1])

    @property
    def foot_cells(self) -> tuple[int, ...]:
        first, second, *rest = (len(cell) for cell in self.foot_head.split("|")[1:-1])
        return first, second, sum(rest) + len(rest) - 1


_L1 = Layout(
    24,
    ("| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
     "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |"),
    "| {npu:<5} {name:<20}| {health:<13} | {watts:<11} {heat:<17} {huge:<5}/ {pages:<13} |",
    "| {chip:<26}| {bus:<13} | {load:<11} {ddr:<5}/ {ddrs:<10} {hbm:<5}/ {hbms:<13} |",
    "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |",
    "| {npu:<7} {chip:<18}| {pid:<13} | {name:<24} | {mb:<23} |",
)  # fmt: skip
_L1B = Layout(
    24,
    (_L1.heads[0][:-1] + " |", _L1.heads[1][:-1] + " |"),
    "| {npu:<5} {name:<20}| {health:<13} | {watts:<11} {heat:<17} {huge:<6}/ {pages:<13} |",
    "| {chip:<26}| {bus:<13} | {load:<11} {ddr:<5}/ {ddrs:<10} {hbm:<6}/ {hbms:<13} |",
    _L1.foot_head[:-1] + " |",
    "| {npu:<7} {chip:<18}| {pid:<13} | {name:<24} | {mb:<24} |",
)
_L1C = Layout(
    35,
    ("| NPU   Name                | Health        | Power(W)             Temp(C)                 "
     "Hugepages-Usage(page)   |",
     "| Chip                      | Bus-Id        | AICore(%)            Memory-Usage(MB)        "
     "HBM-Usage(MB)           |"),
    "| {npu:<5} {name:<20}| {health:<13} | {watts:<20} {heat:<23} {huge:<5}/ {pages:<16} |",
    "| {chip:<26}| {bus:<13} | {load:<20} {ddr:<5}/ {ddrs:<16} {hbm:<5}/ {hbms:<16} |",
    "| NPU     Chip              | Process id    | Process name       | Process memory(MB)    "
    "| Process id in container |",
    "| {npu:<7} {chip:<18}| {pid:<13} | {name:<18} | {mb:<21} | {inner:<23} |",
)  # fmt: skip


def _of_a3(layout: Layout) -> Layout:
    first, second = layout.heads
    return layout._replace(
        heads=(first, second.replace("| Chip        ", "| Chip  Phy-ID", 1)),
        load=layout.load.replace("{chip:<26}", "{chip:<5} {phy:<20}"),
    )


_L3 = Layout(
    40,
    ("| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |",
     "| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |"),
    "| {npu:<7} {name:<22}| {health:<15} | {watts:<12} {heat:<17} {huge:<6}/ {pages:<13} |",
    "| {chip:<7} {logic:<22}| {bus:<15} | {load:<12} {ddr:<5}/ {ddrs:<32} |",
    "| NPU     Chip                  | Process id      | Process name             | Process memory(MB)        |",
    "| {npu:<7} {chip:<22}| {pid:<15} | {name:<24} | {mb:<25} |",
    die_rule="cells",
)  # fmt: skip
_L3A = _L3._replace(
    heads=("| NPU     Name                  | Health          | Power(W)     Temp(C)     Hugepages-Usage(page)     |",
           _L3.heads[1]),
    power="| {npu:<7} {name:<22}| {health:<15} | {watts:<12} {heat:<17} {huge:<5}/ {pages:<14} |",
)  # fmt: skip
_L4 = Layout(
    40,
    ("| NPU ID | Name             | Health        | Power(W)    Temp(C)           Hugepages-Usage(page) |",
     "|        |                  | Bus-Id        | NPU Util(%) Memory-Usage(MB)  HBM-Usage(MB)         |"),
    "| {npu:<6} | {name:<16} | {health:<13} | {watts:<11} {heat:<17} {huge:<6}/ {pages:<13} |",
    "|        |                  | {bus:<13} | {load:<11} {ddr:<5}/ {ddrs:<10} {hbm:<6}/ {hbms:<13} |",
    "| NPU ID                    | Process id    | Process name             | Process memory(MB)       |",
    "| {npu:<25} | {pid:<13} | {name:<24} | {mb:<24} |",
)  # fmt: skip
_L4C = Layout(
    40,
    ("| NPU ID | Name             | Health        | Power(W)              Temp(C)                  "
     "Hugepages-Usage(page) |",
     "|        |                  | Bus-Id        | NPU Util(%)           Memory-Usage(MB)         "
     "HBM-Usage(MB)         |"),
    "| {npu:<6} | {name:<16} | {health:<13} | {watts:<21} {heat:<24} {huge:<6}/ {pages:<13} |",
    "|        |                  | {bus:<13} | {load:<21} {ddr:<6}/ {ddrs:<16} {hbm:<6}/ {hbms:<13} |",
    "| NPU ID                    | Process id    | Process name       | Process memory(MB)    "
    "| Process id in container |",
    "| {npu:<25} | {pid:<13} | {name:<18} | {mb:<21} | {inner:<23} |",
    is_foot_ruled=True,
)  # fmt: skip
LAYOUTS: dict[str, Layout] = {
    "L1": _L1, "L1b": _L1B, "L1c": _L1C, "L2": _of_a3(_L1), "L2c": _of_a3(_L1C), "L3": _L3, "L3a": _L3A,
    "L4": _L4, "L4c": _L4C,
}  # fmt: skip


def render_table(node: Node, readings: Sequence[Reading], *, is_complete: bool = True) -> str:
    """The whole output of `npu-smi info`; `readings` are those of the chips that respond, in order."""
    layout = LAYOUTS[node.layout]
    width = sum(layout.cells) + len(layout.cells) - 1
    lines = [_rule(width)]
    left, right = layout.title, width - 20 - layout.title
    lines.append(f"| npu-smi {node.tool_version:<{left}} Version: {node.driver_version:<{right}} |")
    lines += [_rule(*layout.cells), *layout.heads, _rule(*layout.cells, mark="=")]
    for number, reading in enumerate(readings):
        if number and readings[number - 1].chip.npu_id == reading.chip.npu_id:
            lines.append(_rule(*layout.cells) if layout.die_rule == "cells" else lines[0])
        values = _values(node, reading)
        lines += [layout.power.format(**values), layout.load.format(**values)]
        if number + 1 == len(readings) or readings[number + 1].chip.npu_id != reading.chip.npu_id:
            lines.append(_rule(*(layout.foot_cells if layout.is_foot_ruled else layout.cells), mark="="))
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
        "npu": chip.npu_id, "chip": chip.chip_id, "phy": chip.logic_id, "logic": chip.logic_id, "bus": chip.bus_id,
        "name": node.family.name, "health": reading.health, "watts": shown_power(node, reading),
        "heat": reading.temperature_c, "load": reading.load_percent, "huge": chip.hugepages_used,
        "pages": chip.hugepages_total, "ddr": reading.ddr_used_mb, "ddrs": chip.ddr_mb, "hbm": reading.hbm_used_mb,
        "hbms": reading.hbm_mb,
    }  # fmt: skip


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
