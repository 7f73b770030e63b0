"""The rows of the table that `npu-smi info` prints: its headers, and the values of one row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ascendrun.ascend.reading import read_bus_id, read_choice, read_float, read_int, read_percent, read_text
from ascendrun.core.dataclass import dataclass

HEALTH_STATES = ("OK", "Warning", "Alarm", "Critical", "UNKNOWN")

Cells = tuple[str, ...]
Values = Mapping[str, Any]
MAX_MB = 4 * 2**20

_PAIR = r"([^\s/]+)\s*/\s*([^\s/]+)"
_POWER_ROW = re.compile(r"(\S+)\s+(\S+)\s+" + _PAIR)
_POWER_ROW_SHORT = re.compile(r"(\S+)\s+(\S+)")
_LOAD_ROW = re.compile(r"(\S+)\s+" + _PAIR)
_LOAD_ROW_HBM = re.compile(r"(\S+)\s+" + _PAIR + r"\s+" + _PAIR)
_ABSENT = ("NA", "-")

POWER_HEADERS = (("NPU Name", "Health"), ("NPU ID", "Name", "Health"))
"""The first header without its last cell."""
POWER_COLUMNS = ("Power(W) Temp(C) Hugepages-Usage(page)", "Power(W) Temp(C)")
"""Its last cell; npu-smi 1.8 to 21.0.3 does not print hugepages."""
ID_HEADERS = ("Chip", "Chip Phy-ID", "Chip Device", "")
LOAD_HEADERS = (
    "AICore(%) Memory-Usage(MB) HBM-Usage(MB)",
    "AICore(%) Memory-Usage(MB)",
    "NPU Util(%) Memory-Usage(MB) HBM-Usage(MB)",
)
PROCESS_HEADERS = (
    ("NPU Chip", "Process id", "Process name", "Process memory(MB)"),
    ("NPU ID", "Process id", "Process name", "Process memory(MB)"),
)


@dataclass(frozen=True)
class Row:
    """The values of one row by the names of NpuChip; `is_whole`: all values were read."""

    values: Values
    is_whole: bool


# Many nodes print the same rows repeatedly, so parsed rows are cached.
@lru_cache(maxsize=4096)
def cells_of(line: str) -> Cells:
    """Return the cells of a row; () if it does not end like a row."""
    stripped = line.strip()
    if len(stripped) < 2 or not stripped.endswith("|"):
        return ()
    return tuple(" ".join(cell.split()) for cell in stripped[1:-1].split("|"))


@lru_cache(maxsize=4096)
def power_row(cells: Cells, has_hugepages: bool) -> Row | None:
    """Parse the first row of a chip; None if invalid."""
    ids = cells[:-2] if len(cells) == 4 else cells[0].split(" ", 1)
    npu_id = read_int(ids[0], 0, 65535)
    found = (_POWER_ROW if has_hugepages else _POWER_ROW_SHORT).fullmatch(cells[-1])
    if npu_id is None or len(ids) != 2 or not found:
        return None
    used, total = _used_total(found[3], found[4], 2**40) if has_hugepages else (None, None)
    values = {
        "name": read_text(ids[1]),
        "health": read_choice(cells[-2], HEALTH_STATES),
        "power_w": read_float(found[1], 0, 5000),
        "temperature_c": read_int(found[2], -60, 200),
        "hugepages_used": used,
        "hugepages_total": total,
    }
    is_whole = all_read(tuple(values.values()), (ids[1], cells[-2], *found.groups()))
    return Row({"npu_id": npu_id, **values}, is_whole)


@lru_cache(maxsize=4096)
def load_row(cells: Cells, named: tuple[str, ...], has_hbm: bool) -> Row | None:
    """Parse the second row of a chip; `named`: the ids in its first cell. None if invalid."""
    found = (_LOAD_ROW_HBM if has_hbm else _LOAD_ROW).fullmatch(cells[-1])
    ids = cells[0].split(" ") if len(cells) == 3 else []
    numbers = [read_int(text, 0, 65535) for text in ids]
    bus = cells[-2]
    if not found or len(ids) != len(named) or None in numbers or (len(cells) == 4 and any(cells[:2])):
        return None
    by_name = dict(zip(named, numbers))
    ddr_used, ddr_total = _used_total(found[2], found[3], MAX_MB)
    hbm_used, hbm_total = _used_total(found[4], found[5], MAX_MB) if has_hbm else (None, None)
    values = {
        "chip_id": by_name.get("Chip"),
        "phy_id": by_name.get("Phy-ID"),
        "logic_id": by_name.get("Device"),
        "bus_id": read_bus_id(bus),
        "load_percent": read_percent(found[1]),
        "ddr_used_mb": ddr_used,
        "ddr_total_mb": ddr_total,
        "hbm_used_mb": hbm_used,
        "hbm_total_mb": hbm_total,
    }
    memory = (ddr_used, ddr_total, hbm_used, hbm_total) if has_hbm else (ddr_used, ddr_total)
    return Row(values, all_read((values["bus_id"], values["load_percent"], *memory), (bus, *found.groups())))


def _used_total(used: str, total: str, high: int) -> tuple[int | None, int | None]:
    """Return both numbers; None for both if used exceeds total, since then one of them is wrong."""
    numbers = read_int(used, 0, high), read_int(total, 0, high)
    if numbers[0] is not None and numbers[1] is not None and numbers[0] > numbers[1]:
        return None, None
    return numbers


def all_read(values: Sequence[object], texts: Sequence[str]) -> bool:
    """Return whether each value was read or is printed as absent."""
    return all(value is not None or text in _ABSENT for value, text in zip(values, texts))
