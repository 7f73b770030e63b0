"""Numbers of devices and names of interfaces that a rank printed, and whether it trains, as facts for its hint.

    facts_in(["set device=8, valid device range is [0, 8)"], [], 8)
    {"NUMBERED": "beyond", "DEVICE": "8", "LAST": "7", "SEEN": "", "work": ""}

A number is judged only with the count of devices, or the list, that the same message has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ascendrun.ascend.vocabularies import read_table
from ascendrun.text.format import numbers_in


def facts_in(told: Sequence[str], printed: Sequence[str], ranks: int) -> Mapping[str, str]:
    """Return what is known of the device that was requested (NUMBERED: physical, a number of the node in place of one
    of the process; beyond; shared, the rank reports that of another), and the interfaces that a library uses (USED,
    VIRTUAL: of containers, REAL); work: train or inference, "": not known, or both. `told`: the message, `printed`: all
    lines, `ranks`: of the host."""
    tables = read_table("hints")["output"]
    text = "\n".join((*told, *printed))
    work = [name for name, pattern in tables["work"].items() if re.search(pattern, text)]
    devices = next(_devices_in("\n".join(told), text, tables["devices"], ranks), {})
    return {**devices, **_interfaces_in(text, tables), "work": work[0] if len(work) == 1 else ""}


def _devices_in(told: str, text: str, patterns: Mapping[str, str], ranks: int) -> Iterator[Mapping[str, str]]:
    for found in re.finditer(patterns["requested"], text):
        seen, number = (
            numbers_in(found["seen"] or found["seen2"] or ""),
            int(found["number"] or found["number2"] or found["number3"]),
        )
        count = len(seen) or int(found["count"] or 0)
        if number >= count > 0:
            kind = "physical" if number in seen else "beyond"
            shown = ", ".join(map(str, seen))
            yield {"NUMBERED": kind, "DEVICE": str(number), "LAST": str(count - 1), "SEEN": shown}
    for found in re.finditer(patterns["reported"], told):
        if ranks > 1 and int(found["device"]) != int(found["rank"]) % ranks:
            yield {"NUMBERED": "shared", "DEVICE": found["device"], "REPORTER": found["rank"]}


def _interfaces_in(text: str, tables: Mapping[str, str]) -> Mapping[str, str]:
    used = [*dict.fromkeys(re.findall(tables["interface"], text))]
    virtual = [one for one in used if re.match(tables["of_containers"], one)]
    real = [one for one in used if one not in virtual]
    if not virtual or not real:
        return {}
    return {"USED": str(len(used)), "VIRTUAL": ", ".join(virtual[:3]), "REAL": real[0]}
