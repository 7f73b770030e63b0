"""NPU fault codes, each with its class (Huawei's eight) and fix: fault_of("80E18402")."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from ascendrun.ascend.tables import load_table
from ascendrun.core.dataclass import dataclass
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
