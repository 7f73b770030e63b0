"""What is known of each Ascend chip: memory, dies, links, which device sets HCCL takes, bf16, peak.

chip_of("910B3") -> Chip | None       device_faults(chip, ids) -> ["..."]        peak_fp16_tflops(chip) -> Peak
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ascendrun.ascend.tables import load_table


@dataclass(frozen=True)
class Chip:
    """One row of tables/chips.json; None where no source says. `family`: A1, A2, A3, 310P, 310 or 950.

    `hbm_mb` is of one die. `device_counts`: the numbers of devices (on the A3: dies) that a job may take of one
    server. `verified` False: the figures come from third parties; `doubt` says which.
    """

    name: str
    family: str
    product: str
    hbm_mb: int | None
    dies_per_npu: int
    npus_per_server: int | None
    has_bf16: bool
    topology: str
    device_counts: tuple[int, ...] | None
    aicore_count: int | None
    aicore_mhz: int | None
    roce_mbit_per_s: int | None
    verified: bool
    source: str
    doubt: str | None


@dataclass(frozen=True)
class Peak:
    """FP16 matrix throughput of one die; `measured` says whether core count and clock came from the node itself."""

    fp16_tflops: float
    measured: bool
    source: str
    doubt: str | None


@lru_cache(maxsize=256)
def chip_of(name: str) -> Chip | None:
    """The chip that npu-smi (or torch_npu) names so, with or without Ascend before it; None when unknown."""
    plain = " ".join(name.split())
    spellings = (plain, re.sub(r"^Ascend ?(?=.)", "", plain))
    for pattern, chip in _rows():
        if any(pattern.fullmatch(spelling) for spelling in spellings):
            return chip
    return None


def device_faults(chip: Chip, device_ids: Sequence[int]) -> tuple[str, ...]:
    """Why HCCL will not take these devices of one server together; () when it will or nobody knows."""
    ids = sorted(set(device_ids))
    faults = []
    if chip.device_counts is not None and len(ids) not in chip.device_counts:
        allowed = ", ".join(str(count) for count in chip.device_counts)
        faults.append(f"{len(ids)} devices: {chip.name} takes {allowed} of one server")
    if chip.topology == "rings2x4" and len(ids) in (2, 4) and len({number // 4 for number in ids}) > 1:
        faults.append(f"devices {_joined(ids)}: 2 or 4 must lie in one ring, 0-3 or 4-7")
    if chip.dies_per_npu == 2 and len(ids) > 1:
        halves = [number for number in ids if number ^ 1 not in ids]
        if halves:
            faults.append(f"devices {_joined(halves)}: take both dies of an NPU, 0 with 1, 2 with 3 and so on")
    return tuple(faults)


def peak_fp16_tflops(
    chip: Chip | None, *, aicore_count: int | None = None, aicore_mhz: int | None = None
) -> Peak | None:
    """cores x clock x 8192; counts from `npu-smi info -t common` come before the table's; None when neither knows."""
    table = load_table("chips")
    measured = aicore_count is not None and aicore_mhz is not None
    cores = aicore_count if measured else (chip.aicore_count if chip else None)
    mhz = aicore_mhz if measured else (chip.aicore_mhz if chip else None)
    if cores is None or mhz is None:
        return None
    tflops = cores * mhz * 1e6 * table["flop_per_core_cycle"] / 1e12
    doubt = None if measured or chip is None else chip.doubt
    return Peak(tflops, measured, table["flop_about"], doubt)


def _joined(ids: Sequence[int]) -> str:
    return ",".join(str(number) for number in ids)


@lru_cache(maxsize=1)
def _rows() -> tuple[tuple[re.Pattern[str], Chip], ...]:
    rows = []
    for row in load_table("chips")["rows"]:
        said = dict(row)
        pattern = re.compile(said.pop("pattern"))
        counts = said.pop("device_counts")
        rows.append((pattern, Chip(**said, device_counts=None if counts is None else tuple(counts))))
    return tuple(rows)
