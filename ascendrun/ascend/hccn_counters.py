"""Parsers of long output of `hccn_tool -i N -<item> -g`: packet counters, the optical module.

parse_stat -> Counters      parse_optical -> Optical
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ascendrun.ascend.reading import Reader, field_of, lines_of, once_each, read_float, read_int, unparsed_of
from ascendrun.ascend.tool_errors import ToolError, split_errors
from ascendrun.core.dataclass import dataclass

_NAME = re.compile(r"[a-z][a-z0-9_]{2,60}")
_POWER = re.compile(r"(\S+) mW")
_NOT_READ = (
    "temperature", "Temp ", "Vcc", "Tx Power", "TxPower", "RxPower High", "Tx Bias", "Host SNR", "Media SNR", "xsfp",
    "vendor", "manufact", "high power",
)  # fmt: skip
FLAGS = ("Tx Los Flag", "Rx Los Flag", "Tx LoL Flag", "Rx LoL Flag")


@dataclass(frozen=True)
class Counters:
    """Counters by the tool's names. Duplicate names, or names without a number, are omitted and reported."""

    values: Mapping[str, int]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class Optical:
    """The optical module. `flags` by name: 0 is healthy, None is printed as NA; received power by lane."""

    is_present: bool | None
    rx_power_mw: tuple[float | None, ...]
    rx_power_low_mw: float | None
    flags: Mapping[str, int | None]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


def parse_stat(text: str) -> Counters:
    errors, rest = split_errors(lines_of(text))
    values: dict[str, int] = {}
    seen: dict[str, int] = {}
    unread = []
    for line in rest:
        if line.strip() == "packet statistics:":
            continue
        field = field_of(line)
        number = read_int(field.value, 0, 10**18 - 1) if field and _NAME.fullmatch(field.name) else None
        if field is None or number is None:
            unread.append(line)
        else:
            seen[field.name] = seen.get(field.name, 0) + 1
            values[field.name] = number
    twice = {name for name, times in seen.items() if times > 1}
    unread.extend(f"{name}: printed {seen[name]} times" for name in sorted(twice))
    kept = {name: number for name, number in values.items() if name not in twice}
    return Counters(kept, errors, unparsed_of(unread))


def parse_optical(text: str) -> Optical:
    errors, rest = split_errors(lines_of(text))
    lines = [line for line in rest if line.strip() not in ("", "optical info:")]
    fields = [field for field in map(field_of, lines) if field]
    by_name = once_each(fields)
    unread = [line for line in lines if field_of(line) is None or by_name is None]
    block = Reader(by_name or {})
    present = block.choice(("present", "not present"), "present")

    def milliwatts(name: str) -> float | None:
        value = block.value(name)
        found = _POWER.fullmatch(value or "")
        number = read_float(found[1], 0, 1000) if found else None
        if number is None and value not in (None, "NA", "not supported") and by_name:
            unread.append(by_name[name].line)
        return number

    lanes = [lane for lane in range(16) if f"Rx Power{lane}" in (by_name or {})]
    for name in by_name or {}:
        if name.startswith(_NOT_READ):
            block.value(name)
    optical = Optical(
        None if present is None else present == "present",
        tuple(milliwatts(f"Rx Power{lane}") for lane in range(max(lanes, default=-1) + 1)),
        milliwatts("RxPower Low Thres"),
        {name: block.hexadecimal(name) for name in FLAGS if name in (by_name or {})},
        errors,
        (),
    )
    return replace(optical, unparsed=unparsed_of(unread + block.unread()))
