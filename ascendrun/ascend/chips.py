"""Facts about each Ascend chip: memory, dies, links, device sets that HCCL supports, bf16.

chip_of("910B3") -> Chip | None       device_faults(chip, ids) -> ["..."]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ascendrun.ascend.tables import load_table
from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text


@dataclass(frozen=True)
class Chip:
    """One row of tables/chips.json; None where no source states it. `family`: A1, A2, A3, 310P, 310 or 950.

    `hbm_mb` is per die. `device_counts`: numbers of devices (on the A3: dies) that a job may use on one
    server. `verified` False: the values come from third parties; `doubt` names them.
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


@lru_cache(maxsize=256)
def chip_of(name: str) -> Chip | None:
    """Return the chip of a name that npu-smi or torch_npu prints, with or without "Ascend"; None if unknown."""
    plain = " ".join(name.split())
    spellings = (plain, re.sub(r"^Ascend ?(?=.)", "", plain))
    for pattern, chip in _rows():
        if any(pattern.fullmatch(spelling) for spelling in spellings):
            return chip
    return None


def device_faults(chip: Chip, device_ids: Sequence[int]) -> tuple[Text, ...]:
    """Return why HCCL rejects these devices of one server together; () if it accepts them or it is unknown."""
    ids = sorted(set(device_ids))
    faults: list[Text] = []
    if chip.device_counts is not None and len(ids) not in chip.device_counts:
        faults.append(
            Text(
                "chip.device-count",
                "{chip} supports {allowed} devices per server, got {count}",
                chip=chip.name,
                allowed=chip.device_counts,
                count=len(ids),
            )
        )
    if chip.topology == "rings2x4" and len(ids) in (2, 4) and len({number // 4 for number in ids}) > 1:
        faults.append(Text("chip.ring", "2 or 4 devices must be in one ring (0-3 or 4-7), got {ids:ranks}", ids=ids))
    if chip.dies_per_npu == 2 and len(ids) > 1:
        halves = [number for number in ids if number ^ 1 not in ids]
        if halves:
            faults.append(
                Text(
                    "chip.dies",
                    "devices must include both dies of an NPU (0 and 1, 2 and 3, …), got only {ids:ranks}",
                    ids=halves,
                )
            )
    return tuple(faults)


@lru_cache(maxsize=1)
def _rows() -> tuple[tuple[re.Pattern[str], Chip], ...]:
    rows = []
    for row in load_table("chips")["rows"]:
        values = dict(row)
        pattern = re.compile(values.pop("pattern"))
        counts = values.pop("device_counts")
        rows.append((pattern, Chip(**values, device_counts=None if counts is None else tuple(counts))))
    return tuple(rows)
