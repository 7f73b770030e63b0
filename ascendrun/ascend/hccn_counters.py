"""Long answers of `hccn_tool -i N -<item> -g`: packet counters, the optical module, RDMA resources, routes.

parse_stat, parse_hw_stats -> Counters      parse_optical -> Optical      parse_routes -> Routes
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ascendrun.ascend.reading import (
    Reader,
    field_of,
    lines_of,
    once_each,
    read_float,
    read_int,
    read_ip,
    read_word,
    unparsed_of,
)
from ascendrun.ascend.tool_errors import ToolError, split_errors

_NAME = re.compile(r"[a-z][a-z0-9_]{2,60}")
_DEVICE = re.compile(r"\[(?:devid|device) ([0-9]{1,5})\] ?(.*)")
_QUANTITY = re.compile(r"(\S+) (C|mV|mW|mA|dB)")
_NOT_ASKED = ("Tx Bias", "Host SNR", "Media SNR", "xsfp", "vendor org", "manufact", "high power")
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


@dataclass(frozen=True)
class NpuRoute:
    destination: str
    gateway: str | None
    netmask: str
    interface: str


@dataclass(frozen=True)
class Routes:
    routes: tuple[NpuRoute, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


def parse_stat(text: str) -> Counters:
    errors, rest = split_errors(lines_of(text))
    return _counters(None, [line for line in rest if line.strip() != "packet statistics:"], errors)


def parse_hw_stats(text: str) -> Counters:
    """`-hw_stats`: each line names its device; lines of two devices are not told apart, but refused."""
    errors, rest = split_errors(lines_of(text))
    found = [(line, _DEVICE.fullmatch(line)) for line in rest]
    devices = {int(match[1]) for _, match in found if match}
    if len(devices) > 1:
        return Counters(None, {}, errors, unparsed_of(rest))
    odd = [line for line, match in found if not match]
    counters = _counters(devices.pop() if devices else None, [match[2] for _, match in found if match], errors)
    return Counters(counters.device_id, counters.values, errors, unparsed_of(odd) + counters.unparsed)


def _counters(device_id: int | None, lines: list[str], errors: tuple[ToolError, ...]) -> Counters:
    values: dict[str, int] = {}
    seen: dict[str, int] = {}
    odd = []
    for line in lines:
        field = field_of(line)
        number = read_int(field.value, 0, 10**18 - 1) if field and _NAME.fullmatch(field.name) else None
        if field is None or number is None:
            odd.append(line)
        else:
            seen[field.name] = seen.get(field.name, 0) + 1
            values[field.name] = number
    twice = {name for name, times in seen.items() if times > 1}
    odd.extend(f"{name}: printed {seen[name]} times" for name in sorted(twice))
    kept = {name: number for name, number in values.items() if name not in twice}
    return Counters(device_id, kept, errors, unparsed_of(odd))


def parse_optical(text: str) -> Optical:
    errors, rest = split_errors(lines_of(text))
    lines = [line for line in rest if line.strip() not in ("", "optical info:")]
    fields = [field for field in map(field_of, lines) if field]
    by_name = once_each(fields)
    odd = [line for line in lines if field_of(line) is None or by_name is None]
    block = Reader(by_name or {})
    present = block.choice(("present", "not present"), "present")

    def quantity(name: str, unit: str, low: float, high: float) -> float | None:
        value = block.value(name)
        found = _QUANTITY.fullmatch(value or "")
        number = read_float(found[1], low, high) if found and found[2] == unit else None
        if number is None and value not in (None, "NA", "not supported") and by_name:
            odd.append(by_name[name].line)
        return number

    def lanes(name: str) -> tuple[float | None, ...]:
        there = [lane for lane in range(16) if f"{name}{lane}" in (by_name or {})]
        return tuple(quantity(f"{name}{lane}", "mW", 0, 1000) for lane in range(max(there, default=-1) + 1))

    for name in by_name or {}:
        if name.startswith(_NOT_ASKED):
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
        block.word("vendor name"),
        block.word("vendor part number"),
        block.word("vendor serial number"),
        errors,
        (),
    )
    return replace(optical, unparsed=unparsed_of(odd + block.unread()))


def parse_routes(text: str) -> Routes:
    """`-route`: the device's own routing table; a gateway of None means directly attached."""
    errors, rest = split_errors(lines_of(text))
    routes, odd = [], []
    for line in rest:
        words = line.split()
        if words[:1] in (["Routing"], ["Destination"]) or not words:
            continue
        ok = len(words) == 8 and (words[0] == "default" or read_ip(words[0])) and read_ip(words[2])
        gateway = read_ip(words[1]) if ok else None
        interface = read_word(words[7]) if ok else None
        if ok and interface and (gateway or words[1] == "*"):
            routes.append(NpuRoute(words[0], gateway, words[2], interface))
        else:
            odd.append(line)
    return Routes(tuple(routes), errors, unparsed_of(odd))


def optical_faults(optical: Optical) -> tuple[str, ...]:
    """What is outside the module's own thresholds, by the rules of Huawei's fault diagnosis; () when nothing is."""
    faults = ["not present"] if optical.is_present is False else []
    for name, lanes, low, high in (
        ("Tx Power", optical.tx_power_mw, optical.tx_power_low_mw, optical.tx_power_high_mw),
        ("Rx Power", optical.rx_power_mw, optical.rx_power_low_mw, optical.rx_power_high_mw),
    ):
        for lane, power in enumerate(lanes):
            if power is not None and low is not None and high is not None and not low <= power <= high:
                faults.append(f"{name}{lane} {power} mW outside {low}-{high} mW")
    faults.extend(f"{name} {flag:#x}" for name, flag in optical.flags.items() if flag)
    return tuple(faults)
