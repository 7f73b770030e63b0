"""Parsers of `nvidia-smi --query-… --format=csv`, to monitor nodes with GPUs like nodes with NPUs.

    parse_gpus(text) -> Gpus        of  nvidia-smi --query-gpu=GPU_FIELDS --format=csv
    parse_apps(text) -> GpuApps     of  nvidia-smi --query-compute-apps=APP_FIELDS --format=csv

Columns are found by their names in the first line. The unit follows each number (with `nounits`: it is
in the first line). A placeholder instead of a value ([N/A], [Not Supported], …) is None.
Megabytes are the tool's MiB: 2**20 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from ascendrun.ascend import reading
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
T = TypeVar("T")


def _word(text: str) -> str | None:
    return None if not text or _ABSENT.fullmatch(text) else text


def _amount(high: int, low: int = 0) -> reading.Read:
    return lambda text: reading.read_int(text.partition(" ")[0], low, high)


@dataclass(frozen=True)
class Gpu:
    """One GPU. None: not queried, not supported, or unreadable. `ecc_errors`: uncorrected, since the last reset."""

    index: int = reading.printed("index", read=_amount(9999))
    bus_id: str | None = reading.printed("pci.bus_id", read=_word)
    name: str | None = reading.printed("name", read=_word)
    utilisation_percent: int | None = reading.printed("utilization.gpu", read=_amount(100))
    memory_used_mb: int | None = reading.printed("memory.used", read=_amount(_MOST_MIB))
    memory_total_mb: int | None = reading.printed("memory.total", read=_amount(_MOST_MIB))
    power_w: float | None = reading.printed(
        "power.draw", read=lambda text: reading.read_float(text.partition(" ")[0], 0.0, 5000.0)
    )
    temperature_c: int | None = reading.printed("temperature.gpu", read=_amount(300))
    sm_mhz: int | None = reading.printed("clocks.sm", read=_amount(100_000))
    ecc_errors: int | None = reading.printed("ecc.errors.uncorrected.volatile.total", read=_amount(2**62))


class Gpus(reading.Answer):
    """All GPUs. `gpus` None: the output is not such a table; `unparsed` has its lines."""

    gpus: tuple[Gpu, ...] | None = None


@dataclass(frozen=True)
class GpuApp:
    """One process that computes on the GPU at `bus_id`."""

    bus_id: str = reading.printed("gpu_bus_id", read=_word)
    pid: int = reading.printed("pid", read=_amount(2**22, 1))
    memory_mb: int | None = reading.printed("used_memory", read=_amount(_MOST_MIB))


class GpuApps(reading.Answer):
    """All processes. `apps` None: the output is not such a table; (): no process."""

    apps: tuple[GpuApp, ...] | None = None


def parse_gpus(text: str) -> Gpus:
    """Parse the GPUs; never raises."""
    rows, unread = _rows(Gpu, text, "index", needed=("index",))
    if rows is None:
        return Gpus(unparsed=reading.unparsed_of(unread))
    gpus: dict[int, Gpu] = {}
    for line, gpu in rows:
        if gpus.setdefault(gpu.index, gpu) is not gpu:
            unread.append(line)
    return Gpus(unparsed=reading.unparsed_of(unread), gpus=tuple(gpus.values()))


def parse_apps(text: str) -> GpuApps:
    """Parse the processes; never raises."""
    rows, unread = _rows(GpuApp, text, "pid", needed=("bus_id", "pid"))
    return GpuApps(unparsed=reading.unparsed_of(unread), apps=None if rows is None else tuple(app for _, app in rows))


def _rows(
    kind: type[T], text: str, column: str, *, needed: Sequence[str]
) -> tuple[list[tuple[str, T]] | None, list[str]]:
    """Return each line below the header with its values, and the lines without those of `needed`; None: no header has
    `column`."""
    lines = [line for line in reading.lines_of(text) if line.strip()]
    header = next((place for place, line in enumerate(lines) if column in _columns(line)), None)
    if header is None:
        return None, lines
    columns = _columns(lines[header])
    rows: list[tuple[str, T]] = []
    unread = lines[:header]
    for line in lines[header + 1 :]:
        values = [value.strip() for value in line.split(",")]
        is_whole = (
            len(values) == len(columns) and reading.shown(line) == line
        )  # truncated: its last value may be incomplete
        found = reading.Block(map(reading.Field, [line] * len(values), columns, values)).fill(kind) if is_whole else {}
        if all(name in found for name in needed):
            rows.append((line, kind(**found)))
        else:
            unread.append(line)
    return rows, unread


def _columns(line: str) -> Sequence[str]:
    matches = [_NAME.fullmatch(part.strip()) for part in reading.shown(line).split(",")]
    if not all(matches):
        return ()
    return [_RENAMED.get(match[1], match[1]) for match in matches if match]
