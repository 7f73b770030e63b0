"""Sets of devices of one server that HCCL supports, by the links of the chip.

A1: two HCCS rings, devices 0-3 and 4-7, joined by PCIe. A2: a full mesh. A3: each NPU has two dies, joined by SIO.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascendrun.facts.chips import Chip
from ascendrun.text import Text

DEVICE_COUNTS = {"A1": (1, 2, 4, 8), "A2": tuple(range(1, 9)), "A3": (1, *range(2, 17, 2))}
"""Numbers of devices (on the A3: dies) that a job may use on one server, by family."""


def device_faults(chip: Chip, device_ids: Sequence[int]) -> tuple[Text, ...]:
    """Return why HCCL rejects these devices of one server together; () if it accepts them or it is unknown."""
    ids = sorted(set(device_ids))
    faults: list[Text] = []
    counts = DEVICE_COUNTS.get(chip.family)
    if counts is not None and len(ids) not in counts:
        faults.append(
            Text(
                "chip.device-count",
                "{chip} supports {allowed} devices per server, got {count}",
                chip=chip.name,
                allowed=counts,
                count=len(ids),
            )
        )
    if chip.family == "A1" and len(ids) in (2, 4) and len({number // 4 for number in ids}) > 1:
        faults.append(Text("chip.ring", "2 or 4 devices must be in one ring (0-3 or 4-7), got {ids:ranks}", ids=ids))
    if chip.family == "A3" and len(ids) > 1:
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
