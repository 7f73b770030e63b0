"""Facts about devices: fault codes, each with its class (Huawei's eight), and which of a server HCCL takes together.

fault_of("80E18402") -> Fault       device_faults(chip, [0, 1, 2]) -> why HCCL rejects them

A1: two HCCS rings, devices 0-3 and 4-7, joined by PCIe. A2: a full mesh. A3: each NPU has two dies, joined by SIO.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ascendrun.ascend.tables import load_table
from ascendrun.core.dataclass import dataclass
from ascendrun.facts.chips import Chip
from ascendrun.text import Text

_CODE = re.compile(r"(?:0[xX])?([0-9A-Fa-f]{8})")


@dataclass(frozen=True)
class FaultClass:
    """One of the eight, mildest first: `rank` 0 has no effect on work, 7 cannot recover."""

    name: str
    rank: int
    hint: Text


@dataclass(frozen=True)
class Fault:
    """One code. `fault_class`, `part` and `message` are None when the table does not list it: unknown, not harmless."""

    code: str
    fault_class: FaultClass | None
    part: str | None
    message: Text | None
    source: str | None


def fault_classes() -> tuple[FaultClass, ...]:
    rows = load_table("fault_codes")["classes"]
    return tuple(
        FaultClass(row["name"], rank, Text(f"fault-class.{row['name']}.hint", row["hint"]))
        for rank, row in enumerate(rows)
    )


def fault_of(code: str) -> Fault | None:
    """Return the fault of a code, with or without 0x; None if it does not have eight hex digits."""
    found = _CODE.fullmatch(code.strip())
    if not found:
        return None
    name = found[1].upper()
    row = _rows().get(name, {})
    of_class = {fault_class.name: fault_class for fault_class in fault_classes()}.get(row.get("class", ""))
    message = Text(f"fault.{name}.message", row["message"]) if row.get("message") else None
    source = load_table("fault_codes")["source"] if row else None
    return Fault(name, of_class, row.get("part"), message, source)


@lru_cache(maxsize=1)
def _rows() -> Mapping[str, Mapping[str, str]]:
    return {row["code"]: row for row in load_table("fault_codes")["rows"]}


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
