"""Parsers of `nvidia-smi --query-… --format=csv`, to monitor nodes with GPUs like nodes with NPUs.

    parse_gpus(text) -> Gpus        of  nvidia-smi --query-gpu=GPU_FIELDS --format=csv
    parse_apps(text) -> GpuApps     of  nvidia-smi --query-compute-apps=APP_FIELDS --format=csv

Columns are found by their names in the first line. The unit follows each number (with `nounits`: it is
in the first line). A placeholder instead of a value ([N/A], [Not Supported], …) is None.
Megabytes are the tool's MiB: 2**20 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ascendrun.ascend.reading import lines_of, read_float, read_int, shown, unparsed_of
from ascendrun.core.dataclass import dataclass

GPU_FIELDS = (
    "index", "pci.bus_id", "name", "utilization.gpu", "memory.used", "memory.total", "power.draw",
    "temperature.gpu", "clocks.sm", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
"""Drivers of the last ten years know all of them. With one unknown field the tool prints no values."""
APP_FIELDS = ("gpu_bus_id", "pid", "used_memory")

_RENAMED = {"clocks.current.sm": "clocks.sm", "used_gpu_memory": "used_memory", "gpu_name": "name"}
"""By name in the first line: the name of the queried field."""
_NAME = re.compile(r"([a-z_.]+)(?: \[([A-Za-z%/]+)\])?")
_ABSENT = re.compile(r"\[.*\]|N/A|Not Supported|Not Found", re.DOTALL)
_MOST_MIB = 4 * 2**20


@dataclass(frozen=True)
class Gpu:
    """One GPU. None: not queried, not supported, or unreadable. `ecc_errors`: uncorrected, since the last reset."""

    index: int
    bus_id: str | None = None
    name: str | None = None
    utilisation_percent: int | None = None
    memory_used_mb: int | None = None
    memory_total_mb: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    sm_mhz: int | None = None
    ecc_errors: int | None = None


@dataclass(frozen=True)
class Gpus:
    """All GPUs. `gpus` None: the output is not such a table; `unparsed` has its lines."""

    gpus: tuple[Gpu, ...] | None
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class GpuApp:
    """One process that computes on the GPU at `bus_id`."""

    bus_id: str
    pid: int
    memory_mb: int | None = None


@dataclass(frozen=True)
class GpuApps:
    """All processes. `apps` None: the output is not such a table; (): no process."""

    apps: tuple[GpuApp, ...] | None
    unparsed: tuple[str, ...]


def parse_gpus(text: str) -> Gpus:
    """Parse the GPUs; never raises."""
    rows, unread = _rows(text, "index")
    if rows is None:
        return Gpus(None, unread)
    gpus: dict[int, Gpu] = {}
    bad: list[str] = []
    for line, row in rows:
        gpu = _gpu(row)
        if gpu is None or gpu.index in gpus:
            bad.append(line)
        else:
            gpus[gpu.index] = gpu
    return Gpus(tuple(gpus.values()), unparsed_of([*unread, *bad]))


def parse_apps(text: str) -> GpuApps:
    """Parse the processes; never raises."""
    rows, unread = _rows(text, "pid")
    if rows is None:
        return GpuApps(None, unread)
    apps: list[GpuApp] = []
    bad: list[str] = []
    for line, row in rows:
        pid, bus_id = read_int(row.get("pid", ""), 1, 2**22), _word(row, "gpu_bus_id")
        if pid is None or bus_id is None:
            bad.append(line)
        else:
            apps.append(GpuApp(bus_id, pid, _whole(row, "used_memory", _MOST_MIB)))
    return GpuApps(tuple(apps), unparsed_of([*unread, *bad]))


def _gpu(row: Mapping[str, str]) -> Gpu | None:
    index = read_int(row.get("index", ""), 0, 9999)
    if index is None:
        return None
    return Gpu(
        index,
        bus_id=_word(row, "pci.bus_id"),
        name=_word(row, "name"),
        utilisation_percent=_whole(row, "utilization.gpu", 100),
        memory_used_mb=_whole(row, "memory.used", _MOST_MIB),
        memory_total_mb=_whole(row, "memory.total", _MOST_MIB),
        power_w=_decimal(row, "power.draw", 1e5),
        temperature_c=_whole(row, "temperature.gpu", 300),
        sm_mhz=_whole(row, "clocks.sm", 100_000),
        ecc_errors=_whole(row, "ecc.errors.uncorrected.volatile.total", 2**62),
    )


def _rows(text: str, key: str) -> tuple[list[tuple[str, Mapping[str, str]]] | None, tuple[str, ...]]:
    """Return (line, {column: value}) of each line below the header; None: no header has the column `key`."""
    lines = [line for line in lines_of(text) if line.strip()]
    places = [place for place, line in enumerate(lines) if key in _columns(line)]
    if not places:
        return None, unparsed_of(lines)
    columns = _columns(lines[places[0]])
    rows: list[tuple[str, Mapping[str, str]]] = []
    unread = list(lines[: places[0]])
    for line in lines[places[0] + 1 :]:
        values = [value.strip() for value in shown(line).split(",")]
        if len(values) != len(columns) or shown(line) != line:  # truncated: its last value may be incomplete
            unread.append(line)
        else:
            rows.append((line, dict(zip(columns, values))))
    return rows, unparsed_of(unread)


def _columns(line: str) -> Sequence[str]:
    matches = [_NAME.fullmatch(part.strip()) for part in shown(line).split(",")]
    if not all(matches):
        return ()
    return [_RENAMED.get(match[1], match[1]) for match in matches if match]


def _word(row: Mapping[str, str], name: str) -> str | None:
    value = row.get(name, "")
    return None if not value or _ABSENT.fullmatch(value) else value


def _whole(row: Mapping[str, str], name: str, high: int) -> int | None:
    return read_int((row.get(name) or "").partition(" ")[0], 0, high)


def _decimal(row: Mapping[str, str], name: str, high: float) -> float | None:
    return read_float((row.get(name) or "").partition(" ")[0], 0.0, high)
