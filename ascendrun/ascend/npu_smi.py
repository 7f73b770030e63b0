"""Parser of the table of `npu-smi info`, in every known layout of its versions and chips.

    parse_info(text) -> NpuSmiInfo(layout, chips: NpuChip..., processes: NpuProcess..., errors, unparsed)

The columns are found by the table's header, so that a layout between two known ones can be parsed. Megabytes are
the tool's: 2**20 bytes. Layouts: L1 910A/910B (98 columns), L1b (99), L1c (116), L2 A3 (two chips an NPU),
L3 310/310P (no HBM), L4 950 (the NPU's id in a separate cell). Tools before 22 print no hugepages.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from ascendrun.ascend.npu_smi_rows import (
    ID_HEADERS,
    LOAD_HEADERS,
    MAX_MB,
    POWER_COLUMNS,
    POWER_HEADERS,
    PROCESS_HEADERS,
    Cells,
    Values,
    all_read,
    cells_of,
    load_row,
    power_row,
)
from ascendrun.ascend.reading import lines_of, read_int, read_text, unparsed_of
from ascendrun.ascend.tool_errors import ToolError, split_errors
from ascendrun.core.dataclass import dataclass

_MAX_PID = 2**22
_TITLE = re.compile(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)")
_IDLE = re.compile(r"No running processes found in NPU ([0-9]{1,6})")
_WIDTHS = {98: "L1", 99: "L1b", 116: "L1c"}


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
    """One process on a chip. None: `chip_id` on the 950, `pid_in_container` if not printed."""

    npu_id: int
    chip_id: int | None
    pid: int
    name: str | None
    memory_mb: int | None
    pid_in_container: int | None = None


@dataclass(frozen=True)
class NpuSmiInfo:
    """The output of one `npu-smi info`. `processes` and `idle_npus` are None if the process table is missing.

    `driver_incomplete`: the tool warned that the driver package may not be completely installed.
    """

    layout: str | None
    tool_version: str | None
    driver_version: str | None
    chips: tuple[NpuChip, ...]
    processes: tuple[NpuProcess, ...] | None
    idle_npus: tuple[int, ...] | None
    driver_incomplete: bool
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


def parse_info(text: str) -> NpuSmiInfo:
    """Parse the output of `npu-smi info`; never raises."""
    reading = _Table()
    outside = []
    for line in lines_of(text):
        if line.lstrip()[:1] in ("|", "+"):
            reading.take(line)
        else:
            reading.interrupt()
            outside.append(line)
    errors, other = split_errors(outside)
    warned = [line for line in other if "driver package may not be completely installed" in line]
    return NpuSmiInfo(
        layout=reading.layout,
        tool_version=reading.tool_version,
        driver_version=reading.driver_version,
        chips=reading.chips(),
        processes=tuple(reading.processes) if reading.process_cells else None,
        idle_npus=tuple(reading.idle) if reading.process_cells else None,
        driver_incomplete=bool(warned),
        errors=errors,
        unparsed=unparsed_of([line for line in other if line not in warned] + reading.unparsed()),
    )


def npu_ids(info: NpuSmiInfo) -> tuple[int, ...]:
    """Return the NPUs of the table, each once, in the table's order."""
    return tuple(dict.fromkeys(chip.npu_id for chip in info.chips))


class _Table:
    """The part of the table read so far: headers, then a pair of rows per chip, then the processes."""

    def __init__(self) -> None:
        self.tool_version: str | None = None
        self.driver_version: str | None = None
        self.processes: list[NpuProcess] = []
        self.idle: list[int] = []
        self.process_cells = 0
        self._width: int | None = None
        self._cells = 0  # of a chip's rows, once both headers were seen
        self._second: tuple[str, ...] = ()  # column names in the second header's first cell
        self._has_hbm = False
        self._has_hugepages = False
        self._first: tuple[str, Values] | None = None  # a first row without its second yet
        self._chips: list[tuple[NpuChip, tuple[str, ...]]] = []
        self._lines: list[str] = []
        self._bad: set[int] = set()

    @property
    def layout(self) -> str | None:
        if not self._has_second_header:
            return None
        if self._cells == 4:
            return "L4"
        if "Device" in self._second:
            return "L3"
        if "Phy-ID" in self._second:
            return "L2"
        return _WIDTHS.get(self._width or 0, "L1")

    @property
    def _has_second_header(self) -> bool:
        return self._cells > 0 and self._has_load

    _has_load = False

    def take(self, line: str) -> None:
        self._lines.append(line)
        if line.lstrip().startswith("+"):
            stripped = line.strip()
            self._width = self._width or len(stripped)
            self._close()
            if stripped.strip("+-="):
                self._reject()
            return
        cells = cells_of(line)
        if not cells:
            self._reject()
            self._close()
            return
        if self._title(cells) or self._header(cells):
            self._close()
        elif not self._row(cells):
            self._reject()

    def interrupt(self) -> None:
        """Handle a line outside the table: later lines belong to no earlier row."""
        self._close()

    def _reject(self) -> None:
        """Keep the current line for the report."""
        self._bad.add(len(self._lines) - 1)

    def unparsed(self) -> list[str]:
        self._close()
        doubled = {line for one in self._doubled() for line in one}
        return [line for n, line in enumerate(self._lines) if n in self._bad or line in doubled]

    def _title(self, cells: Cells) -> bool:
        found = _TITLE.fullmatch(cells[0]) if len(cells) == 1 else None
        if not found:
            return False
        self.tool_version, self.driver_version = found[1], found[2]
        return True

    def _header(self, cells: Cells) -> bool:
        if "Health" in cells:
            known = cells[:-1] in POWER_HEADERS and cells[-1] in POWER_COLUMNS
            self._cells = len(cells) if known else 0
            self._has_hugepages = "Hugepages" in cells[-1]
            return self._cells > 0
        if "Bus-Id" in cells:
            load = cells[-1].split(" ")
            self._has_hbm = load[-1] == "HBM-Usage(MB)"
            self._second = tuple(cells[0].split(" "))
            self._has_load = cells[-1] in LOAD_HEADERS and len(cells) == self._cells and cells[0] in ID_HEADERS
            return self._has_load
        if "Process id" in cells:
            known = cells[:4] in PROCESS_HEADERS and cells[4:] in ((), ("Process id in container",))
            self.process_cells = len(cells) if known else 0
            return known
        return False

    def _row(self, cells: Cells) -> bool:
        idle = _IDLE.fullmatch(cells[0]) if len(cells) == 1 else None
        if idle and self.process_cells:
            self.idle.append(int(idle[1]))
            return True
        if self.process_cells:
            return len(cells) == self.process_cells and self._process(cells)
        if not self._has_second_header or len(cells) != self._cells:
            self._close()
            return False
        if self._first is not None:
            line, values = self._first
            second = self._second_row(cells)
            if second is not None:
                self._first = None
                self._chips.append((NpuChip(**values, **second), (line, self._lines[-1])))
                return True
        self._close()
        return self._first_row(cells)

    def _close(self) -> None:
        """Keep a first row without a second row as a chip with fewer values."""
        if self._first is not None:
            line, values = self._first
            self._first = None
            self._chips.append((NpuChip(**values), (line,)))

    def _first_row(self, cells: Cells) -> bool:
        row = power_row(cells, self._has_hugepages)
        if row is None:
            return False
        self._first = (self._lines[-1], row.values)
        return row.is_whole or self._note()

    def _second_row(self, cells: Cells) -> Values | None:
        """Return the values of a second row; None if invalid."""
        row = load_row(cells, self._second if self._cells == 3 else (), self._has_hbm)
        if row is not None and not row.is_whole:
            self._reject()
        return None if row is None else row.values

    def _note(self) -> bool:
        self._reject()
        return True

    def _process(self, cells: Cells) -> bool:
        ids = [read_int(text, 0, 65535) for text in cells[0].split(" ")]
        pid = read_int(cells[1], 1, _MAX_PID)
        if not ids or ids[0] is None or pid is None or None in ids or len(ids) > 2:
            return False
        memory_mb = read_int(cells[3], 0, MAX_MB)
        inner = read_int(cells[4], 1, _MAX_PID) if len(cells) == 5 else None
        one = NpuProcess(ids[0], ids[1] if len(ids) == 2 else None, pid, read_text(cells[2]), memory_mb, inner)
        same = [n for n, other in enumerate(self.processes) if _place(other) == _place(one)]
        if not same:
            self.processes.append(one)
        elif self.processes[same[0]] != one:
            self.processes[same[0]] = NpuProcess(one.npu_id, one.chip_id, pid, None, None)
            return False
        read = (one.name, memory_mb) + ((inner,) if cells[4:] not in ((), ("",), ("0",)) else ())
        return all_read(read, cells[2:]) or self._note()

    def chips(self) -> tuple[NpuChip, ...]:
        """Return the chips in the table's order; of a chip listed twice, the values equal in both rows."""
        self._close()
        kept: dict[tuple[int, int | None], NpuChip] = {}
        for chip, _ in self._chips:
            key = (chip.npu_id, chip.chip_id)
            kept[key] = _agreed(kept[key], chip) if key in kept else chip
        return tuple(kept.values())

    def _doubled(self) -> list[tuple[str, ...]]:
        """Return the rows of chips that are listed twice and differ."""
        first: dict[tuple[int, int | None], NpuChip] = {}
        doubled: list[tuple[str, ...]] = []
        for chip, lines in self._chips:
            if first.setdefault((chip.npu_id, chip.chip_id), chip) != chip:
                doubled.append(lines)
        return doubled


def _place(one: NpuProcess) -> tuple[int, int | None, int]:
    return one.npu_id, one.chip_id, one.pid


def _agreed(one: NpuChip, other: NpuChip) -> NpuChip:
    differ: dict[str, Any] = {f.name: None for f in fields(NpuChip) if getattr(one, f.name) != getattr(other, f.name)}
    return replace(one, **differ)
