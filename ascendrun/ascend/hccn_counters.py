"""Long answers of `hccn_tool -i N -<item> -g`: packet counters, the optical module, RDMA resources, routes.

parse_stat, parse_hw_stats -> Counters      parse_optical -> Optical      parse_routes -> Routes
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ascendrun.ascend.reading import Reader, field_of, lines_of, once_each, read_float, read_int, unparsed_of
from ascendrun.ascend.tool_errors import ToolError, split_errors

_NAME = re.compile(r"[a-z][a-z0-9_]{2,60}")
_DEVICE = re.compile(r"\[(?:devid|device) ([0-9]{1,5})\] ?(.*)")
_QUANTITY = re.compile(r"(\S+) (C|mV|mW|mA|dB)")
_NOT_READ = ("Tx Bias", "Host SNR", "Media SNR", "xsfp", "vendor org", "manufact", "high power")
FLAGS = ("Tx Los Flag", "Rx Los Flag", "Tx LoL Flag", "Rx LoL Flag")


@dataclass(frozen=True)
class Counters:
    """Counters by the tool's own names; a name that came twice or with no number is missing and reported."""

    device_id: int | None
    values: Mapping[str, int]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class Optical:
    """The optical module. `flags` by name: 0 is well, None printed as NA; powers in mW by lane."""

    is_present: bool | None
    temperature_c: float | None
    temperature_high_c: float | None
    temperature_low_c: float | None
    voltage_mv: float | None
    voltage_high_mv: float | None
    voltage_low_mv: float | None
    tx_power_mw: tuple[float | None, ...]
    rx_power_mw: tuple[float | None, ...]
    tx_power_high_mw: float | None
    tx_power_low_mw: float | None
    rx_power_high_mw: float | None
    rx_power_low_mw: float | None
    flags: Mapping[str, int | None]
    vendor: str | None
    part_number: str | None
    serial_number: str | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


def parse_stat(text: str) -> Counters:
    errors, rest = split_errors(lines_of(text))
    return _counters(None, [line for line in rest if line.strip() != "packet statistics:"], errors)


def _counters(device_id: int | None, lines: list[str], errors: tuple[ToolError, ...]) -> Counters:
    values: dict[str, int] = {}
    seen: dict[str, int] = {}
    unread = []
    for line in lines:
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
    return Counters(device_id, kept, errors, unparsed_of(unread))


def parse_optical(text: str) -> Optical:
    errors, rest = split_errors(lines_of(text))
    lines = [line for line in rest if line.strip() not in ("", "optical info:")]
    fields = [field for field in map(field_of, lines) if field]
    by_name = once_each(fields)
    unread = [line for line in lines if field_of(line) is None or by_name is None]
    block = Reader(by_name or {})
    present = block.choice(("present", "not present"), "present")

    def quantity(name: str, unit: str, low: float, high: float) -> float | None:
        value = block.value(name)
        found = _QUANTITY.fullmatch(value or "")
        number = read_float(found[1], low, high) if found and found[2] == unit else None
        if number is None and value not in (None, "NA", "not supported") and by_name:
            unread.append(by_name[name].line)
        return number

    def lanes(name: str) -> tuple[float | None, ...]:
        there = [lane for lane in range(16) if f"{name}{lane}" in (by_name or {})]
        return tuple(quantity(f"{name}{lane}", "mW", 0, 1000) for lane in range(max(there, default=-1) + 1))

    for name in by_name or {}:
        if name.startswith(_NOT_READ):
            block.value(name)
    optical = Optical(
        None if present is None else present == "present",
        quantity("temperature", "C", -60, 200),
        quantity("Temp High Thres", "C", -60, 200),
        quantity("Temp Low Thres", "C", -60, 200),
        quantity("Vcc", "mV", 0, 20000),
        quantity("Vcc High Thres", "mV", 0, 20000),
        quantity("Vcc Low Thres", "mV", 0, 20000),
        lanes("Tx Power"),
        lanes("Rx Power"),
        quantity("TxPower High Thres", "mW", 0, 1000),
        quantity("TxPower Low Thres", "mW", 0, 1000),
        quantity("RxPower High Thres", "mW", 0, 1000),
        quantity("RxPower Low Thres", "mW", 0, 1000),
        {name: block.hexadecimal(name) for name in FLAGS if name in (by_name or {})},
        block.text("vendor name"),
        block.text("vendor part number"),
        block.text("vendor serial number"),
        errors,
        (),
    )
    return replace(optical, unparsed=unparsed_of(unread + block.unread()))
