"""NPU fault codes: which of Huawei's eight classes, what to do, and what the code itself tells.

fault_of("80E18402") -> Fault       read_class_file(text) -> {code: class} of a site's own MindCluster
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ascendrun.ascend.tables import load_table

_KEYS = {
    "NotHandleFaultCodes": "NotHandle",
    "SubHealthFaultCodes": "SubHealth",
    "RestartRequestCodes": "RestartRequest",
    "RestartBusinessCodes": "RestartBusiness",
    "FreeRestartNPUCodes": "FreeRestartNPU",
    "RestartNPUCodes": "RestartNPU",
    "PreSeparateNPUCodes": "PreSeparate",
    "SeparateNPUCodes": "Separate",
}
_CODE = re.compile(r"(?:0[xX])?([0-9A-Fa-f]{8})")


@dataclass(frozen=True)
class FaultClass:
    """One of the eight, mildest first: `rank` 0 has no effect on work, 7 cannot recover."""

    name: str
    rank: int
    says: str
    hint: str


@dataclass(frozen=True)
class Fault:
    """One code. `fault_class`, `part` and `says` are None when our table does not have it: unknown, not harmless.

    `node_type`, `sensor_type` and `state` are parts of the code, so laid out in 124 of Huawei's own published codes;
    they hold for codes of that kind (0x80..., 0x81..., 0x8C...) and are None for others.
    """

    code: str
    fault_class: FaultClass | None
    part: str | None
    says: str | None
    node_type: int | None
    sensor_type: int | None
    state: int | None
    source: str | None


def fault_classes() -> tuple[FaultClass, ...]:
    rows = load_table("fault_codes")["classes"]
    return tuple(FaultClass(row["name"], rank, row["says"], row["hint"]) for rank, row in enumerate(rows))


def fault_of(code: str, site: Mapping[str, str] | None = None) -> Fault | None:
    """What is known of a code, with or without 0x; None when it is no code of eight hex digits.

    `site`: classes by code from read_class_file, which come before ours.
    """
    found = _CODE.fullmatch(code.strip())
    if not found:
        return None
    name = found[1].upper()
    row = _rows().get(name, {})
    class_name = (site or {}).get(name, row.get("class"))
    of_class = {one.name: one for one in fault_classes()}.get(class_name or "")
    from_site = site is not None and name in site
    source = "the site's own fault configuration" if from_site else load_table("fault_codes")["source"] if row else None
    node, sensor, state = _parts(int(name, 16))
    return Fault(name, of_class, row.get("part"), row.get("says"), node, sensor, state, source)


def read_class_file(text: str) -> Mapping[str, str]:
    """The class of each code in MindCluster's faultCode.json, for sites that have one; {} when it is none.

    A code that stands in two classes gets the graver one.
    """
    try:
        top = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    ranks = {one.name: one.rank for one in fault_classes()}
    classes: dict[str, str] = {}
    for key, codes in top.items() if isinstance(top, dict) else ():
        name = _KEYS.get(key, "")
        if name not in ranks or not isinstance(codes, list):
            continue
        for code in codes:
            found = _CODE.fullmatch(code.strip()) if isinstance(code, str) else None
            if found and ranks[name] >= ranks.get(classes.get(found[1].upper(), ""), -1):
                classes[found[1].upper()] = name
    return classes


def _parts(number: int) -> tuple[int | None, int | None, int | None]:
    if number >> 24 not in (0x80, 0x81, 0x8C):
        return None, None, None
    return number >> 17 & 0x7FF, number >> 9 & 0xFF, number & 0x1FF


@lru_cache(maxsize=1)
def _rows() -> Mapping[str, Mapping[str, str]]:
    return {row["code"]: row for row in load_table("fault_codes")["rows"]}
