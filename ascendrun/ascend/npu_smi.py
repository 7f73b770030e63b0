"""Parser of the table of `npu-smi info`, in every known layout of its versions and chips.

    parse_info(text) -> NpuSmiInfo(layout, chips: NpuChip..., processes: NpuProcess..., errors, unparsed)

The columns are found by the table's header, so that a layout between two known ones can be parsed. Megabytes are
the tool's: 2**20 bytes. Layouts: L1 910A/910B (98 columns), L1b (99), L1c (116), L2 A3 (two chips an NPU),
L3 310/310P (no HBM), L4 950 (the NPU's id in a separate cell). Tools before 22 print no hugepages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Optional

from ascendrun.ascend import reading
from ascendrun.core.dataclass import dataclass

HEALTH_STATES = ("OK", "Warning", "Alarm", "Critical", "UNKNOWN")
_MAX_PID, _MAX_MB = 2**22, 4 * 2**20
_TITLE = re.compile(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)")
_IDLE = re.compile(r"No running processes found in NPU [0-9]{1,6}")
_WIDTHS = {98: "L1", 99: "L1b", 116: "L1c"}
_PAIR = r"([^\s/]+)\s*/\s*([^\s/]+)"
_POWER_ROW = re.compile(r"(\S+)\s+(\S+)\s+" + _PAIR)
_POWER_ROW_SHORT = re.compile(r"(\S+)\s+(\S+)")
_LOAD_ROW = re.compile(r"(\S+)\s+" + _PAIR)
_LOAD_ROW_HBM = re.compile(r"(\S+)\s+" + _PAIR + r"\s+" + _PAIR)
_POWER_HEADERS = (("NPU Name", "Health"), ("NPU ID", "Name", "Health"))
"""The first header without its last cell."""
_POWER_COLUMNS = ("Power(W) Temp(C) Hugepages-Usage(page)", "Power(W) Temp(C)")
"""Its last cell; npu-smi 1.8 to 21.0.3 does not print hugepages."""
_ID_HEADERS = ("Chip", "Chip Phy-ID", "Chip Device", "")
_LOAD_HEADERS = (
    "AICore(%) Memory-Usage(MB) HBM-Usage(MB)",
    "AICore(%) Memory-Usage(MB)",
    "NPU Util(%) Memory-Usage(MB) HBM-Usage(MB)",
)
_PROCESS_HEADERS = (
    ("NPU Chip", "Process id", "Process name", "Process memory(MB)"),
    ("NPU ID", "Process id", "Process name", "Process memory(MB)"),
)
Cells = tuple[str, ...]
Row = Optional[tuple[Mapping[str, Any], bool]]
"""The values of one row by the names of NpuChip, and whether all were read; None: not such a row."""


@dataclass(frozen=True)
class NpuChip:
    """One chip (on an A3: one of the NPU's two dies). None: not printed in this layout, printed as NA, or unreadable.

    `chip_id` counts within its NPU. `load_percent`: AI Core use, on the 950 NPU use. `power_w` of an A3 is in
    chip 0 for both. `ddr_*` is 0 where the chip has HBM only.
    """

    npu_id: int
    chip_id: int | None = None
    phy_id: int | None = None
    logic_id: int | None = None
    name: str | None = None
    health: str | None = None
    bus_id: str | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    load_percent: int | None = None
    hugepages_used: int | None = None
    hugepages_total: int | None = None
    ddr_used_mb: int | None = None
    ddr_total_mb: int | None = None
    hbm_used_mb: int | None = None
    hbm_total_mb: int | None = None


@dataclass(frozen=True)
class NpuProcess:
    """One process on a chip. `chip_id` None: on the 950."""

    npu_id: int
    chip_id: int | None
    pid: int
    name: str | None
    memory_mb: int | None


class NpuSmiInfo(reading.Answer):
    """The output of one `npu-smi info`. `processes` None: the process table is missing.

    `driver_incomplete`: the tool warned that the driver package may not be completely installed.
    """

    layout: str | None = None
    tool_version: str | None = None
    driver_version: str | None = None
    chips: tuple[NpuChip, ...] = ()
    processes: tuple[NpuProcess, ...] | None = None
    driver_incomplete: bool = False


def parse_info(text: str) -> NpuSmiInfo:
    """Parse the output of `npu-smi info`; never raises."""
    table = _Table()
    outside = []
    for line in reading.lines_of(text):
        if line.lstrip()[:1] in ("|", "+"):
            table.take(line)
        else:
            table.close()  # later lines belong to no earlier row
            outside.append(line)
    errors, other = reading.split_errors(outside)
    warned = [line for line in other if "driver package may not be completely installed" in line]
    chips, doubled = table.chips()
    return NpuSmiInfo(
        errors=errors,
        unparsed=reading.unparsed_of([line for line in other if line not in warned] + table.unparsed(doubled)),
        layout=table.layout,
        tool_version=table.versions[0],
        driver_version=table.versions[1],
        chips=chips,
        processes=tuple(table.processes) if table.process_cells else None,
        driver_incomplete=bool(warned),
    )


class _Table:
    """The part of the table read so far: headers, then a pair of rows per chip, then the processes."""

    def __init__(self) -> None:
        self.versions: tuple[str | None, str | None] = (None, None)
        self.processes: list[NpuProcess] = []
        self.process_cells = 0
        self._width: int | None = None
        self._cells = 0  # of a chip's rows, once the first header was seen
        self._has_load = False  # the second header was seen
        self._second: Cells = ()  # column names in the second header's first cell
        self._has_hbm = False
        self._has_hugepages = False
        self._first: tuple[str, Mapping[str, Any]] | None = None  # a first row without its second yet
        self._chips: list[tuple[NpuChip, Cells]] = []
        self._lines: list[str] = []
        self._bad: set[int] = set()

    @property
    def layout(self) -> str | None:
        if not (self._cells and self._has_load):
            return None
        if self._cells == 4:
            return "L4"
        if "Device" in self._second:
            return "L3"
        return "L2" if "Phy-ID" in self._second else _WIDTHS.get(self._width or 0, "L1")

    def take(self, line: str) -> None:
        self._lines.append(line)
        stripped = line.strip()
        cells = _cells_of(line)
        if stripped.startswith("+"):
            self._width = self._width or len(stripped)
            self.close()
            is_known = not stripped.strip("+-=")
        elif not cells or self._is_title(cells) or self._is_header(cells):
            self.close()
            is_known = bool(cells)
        else:
            is_known = self._row(cells)
        if not is_known:
            self._bad.add(len(self._lines) - 1)

    def unparsed(self, doubled: set[str]) -> list[str]:
        return [line for n, line in enumerate(self._lines) if n in self._bad or line in doubled]

    def _is_title(self, cells: Cells) -> bool:
        found = _TITLE.fullmatch(cells[0]) if len(cells) == 1 else None
        if found:
            self.versions = found[1], found[2]
        return found is not None

    def _is_header(self, cells: Cells) -> bool:
        if "Health" in cells:
            known = cells[:-1] in _POWER_HEADERS and cells[-1] in _POWER_COLUMNS
            self._cells = len(cells) if known else 0
            self._has_hugepages = "Hugepages" in cells[-1]
            return known
        if "Bus-Id" in cells:
            self._has_hbm = cells[-1].endswith("HBM-Usage(MB)")
            self._second = tuple(cells[0].split(" "))
            self._has_load = cells[-1] in _LOAD_HEADERS and len(cells) == self._cells and cells[0] in _ID_HEADERS
            return self._has_load
        if "Process id" in cells:
            known = cells[:4] in _PROCESS_HEADERS and cells[4:] in ((), ("Process id in container",))
            self.process_cells = len(cells) if known else 0
            return known
        return False

    def _row(self, cells: Cells) -> bool:
        """Take a row of a chip or a process; return whether it was understood completely."""
        if self.process_cells:
            is_idle = len(cells) == 1 and _IDLE.fullmatch(cells[0]) is not None
            return is_idle or (len(cells) == self.process_cells and self._process(cells))
        if not (self._cells and self._has_load) or len(cells) != self._cells:
            self.close()
            return False
        row = None
        if self._first is not None:
            row = _load_row(cells, self._second if self._cells == 3 else (), self._has_hbm)
            if row is not None:
                line, values = self._first
                self._first = None
                self._chips.append((NpuChip(**values, **row[0]), (line, self._lines[-1])))
        if row is None:
            self.close()
            row = _power_row(cells, self._has_hugepages)
            if row is not None:
                self._first = (self._lines[-1], row[0])
        return row is not None and row[1]

    def close(self) -> None:
        """Keep a first row without a second row as a chip with fewer values."""
        if self._first is not None:
            line, values = self._first
            self._first = None
            self._chips.append((NpuChip(**values), (line,)))

    def _process(self, cells: Cells) -> bool:
        ids = [reading.read_int(text, 0, 65535) for text in cells[0].split(" ")]
        pid = reading.read_int(cells[1], 1, _MAX_PID)
        if not ids or ids[0] is None or pid is None or None in ids or len(ids) > 2:
            return False
        one = NpuProcess(
            ids[0],
            ids[1] if len(ids) == 2 else None,
            pid,
            reading.read_text(cells[2]),
            reading.read_int(cells[3], 0, _MAX_MB),
        )
        place = (one.npu_id, one.chip_id, pid)
        same = [n for n, other in enumerate(self.processes) if (other.npu_id, other.chip_id, other.pid) == place]
        if not same:
            self.processes.append(one)
        elif self.processes[same[0]] != one:
            self.processes[same[0]] = NpuProcess(*place, None, None)
            return False
        in_container = () if cells[4:] in ((), ("",), ("0",)) else (reading.read_int(cells[4], 1, _MAX_PID),)
        return _all_read((one.name, one.memory_mb, *in_container), cells[2:])

    def chips(self) -> tuple[tuple[NpuChip, ...], set[str]]:
        """Return the chips in the table's order, and the rows of chips that are listed twice and differ: of such a
        chip the values that are equal in both rows."""
        self.close()
        kept: dict[tuple[int, int | None], NpuChip] = {}
        first: dict[tuple[int, int | None], NpuChip] = {}
        doubled: set[str] = set()
        for chip, lines in self._chips:
            key = (chip.npu_id, chip.chip_id)
            if first.setdefault(key, chip) != chip:
                doubled.update(lines)
            one = kept.setdefault(key, chip)
            if one is chip:
                continue
            differ: dict[str, Any] = {
                each.name: None for each in fields(NpuChip) if getattr(one, each.name) != getattr(chip, each.name)
            }
            kept[key] = replace(one, **differ)
        return tuple(kept.values()), doubled


# Many nodes print the same rows repeatedly, so parsed rows are cached.
@lru_cache(maxsize=4096)
def _cells_of(line: str) -> Cells:
    """Return the cells of a row; () if it does not end like a row."""
    stripped = line.strip()
    if len(stripped) < 2 or not stripped.endswith("|"):
        return ()
    return tuple(" ".join(cell.split()) for cell in stripped[1:-1].split("|"))


@lru_cache(maxsize=4096)
def _power_row(cells: Cells, has_hugepages: bool) -> Row:
    """Parse the first row of a chip."""
    ids = cells[:-2] if len(cells) == 4 else cells[0].split(" ", 1)
    npu_id = reading.read_int(ids[0], 0, 65535)
    found = (_POWER_ROW if has_hugepages else _POWER_ROW_SHORT).fullmatch(cells[-1])
    if npu_id is None or len(ids) != 2 or not found:
        return None
    used, total = _used_total(found[3], found[4], 2**40) if has_hugepages else (None, None)
    values = {
        "name": reading.read_text(ids[1]),
        "health": reading.read_choice(cells[-2], HEALTH_STATES),
        "power_w": reading.read_float(found[1], 0, 5000),
        "temperature_c": reading.read_int(found[2], -60, 200),
        "hugepages_used": used,
        "hugepages_total": total,
    }
    return {"npu_id": npu_id, **values}, _all_read(tuple(values.values()), (ids[1], cells[-2], *found.groups()))


@lru_cache(maxsize=4096)
def _load_row(cells: Cells, named: Cells, has_hbm: bool) -> Row:
    """Parse the second row of a chip; `named`: the ids in its first cell."""
    found = (_LOAD_ROW_HBM if has_hbm else _LOAD_ROW).fullmatch(cells[-1])
    ids = cells[0].split(" ") if len(cells) == 3 else []
    numbers = [reading.read_int(text, 0, 65535) for text in ids]
    if not found or len(ids) != len(named) or None in numbers or (len(cells) == 4 and any(cells[:2])):
        return None
    by_name = dict(zip(named, numbers))
    ddr = _used_total(found[2], found[3], _MAX_MB)
    hbm = _used_total(found[4], found[5], _MAX_MB) if has_hbm else (None, None)
    read = {"bus_id": reading.read_bus_id(cells[-2]), "load_percent": reading.read_int(found[1], 0, 100)}
    read.update(zip(("ddr_used_mb", "ddr_total_mb", "hbm_used_mb", "hbm_total_mb"), (*ddr, *hbm)))
    named_ids = {"chip_id": by_name.get("Chip"), "phy_id": by_name.get("Phy-ID"), "logic_id": by_name.get("Device")}
    return {**named_ids, **read}, _all_read(tuple(read.values()), (cells[-2], *found.groups()))


def _used_total(used: str, total: str, high: int) -> tuple[int | None, int | None]:
    """Return both numbers; None for both if used exceeds total, since then one of them is wrong."""
    numbers = reading.read_int(used, 0, high), reading.read_int(total, 0, high)
    if numbers[0] is not None and numbers[1] is not None and numbers[0] > numbers[1]:
        return None, None
    return numbers


def _all_read(values: Sequence[object], texts: Sequence[str]) -> bool:
    """Return whether each value was read or is printed as absent."""
    return all(value is not None or text in ("NA", "-") for value, text in zip(values, texts))
