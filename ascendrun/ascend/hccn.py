"""Parsers of the output of `hccn_tool -i N -<item> -g`: the network port of one NPU.

    parse_link, parse_ip, parse_net_health, parse_tls, parse_ping, parse_fec, parse_stat, parse_optical,
    parse_link_history, parse_mtu

The output names the NPU only where `device_id` is printed; the caller knows which NPU it queried.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from functools import partial
from typing import Any

from ascendrun.ascend import reading
from ascendrun.core.dataclass import dataclass

NET_HEALTH_STATES = (
    "Success", "Socket fail", "Socket failed", "Receive timeout", "Unreachable", "Time exceeded", "Fault", "Init",
    "Thread error", "Detect ip set", "Unknown",
)  # fmt: skip
FEC_MODES = ("rs FEC mode", "no FEC mode", "auto FEC mode")
FLAGS = ("Tx Los Flag", "Rx Los Flag", "Tx LoL Flag", "Rx LoL Flag")

_PLAIN_IP = re.compile(r"ipaddr:([0-9.]{7,15})\nnetmask:([0-9.]{7,15})\n+")
_TLS = re.compile(r"dev_id:([0-9]{1,5}), ?tls switch\[([01])\]")
_ALARM = re.compile(r"tls alarm time threshold\[([0-9]{1,5})\]days")
_PING_HEAD = re.compile(r"device ([0-9]{1,5}) PING6? (\S+)")
_PING_SUM = re.compile(r"([0-9]{1,9}) packets transmitted, ([0-9]{1,9}) received, [0-9.]{1,9}% packets? loss.*")
_PING_TIME = re.compile(
    r"recv seq[ =][0-9]{1,9}, ?time ?= ?[0-9.]{1,20}(?:ms|us)(?:, L1 plane check result = 0x[0-9a-f]+)?"
    r"|(?:max|min|average|TP[0-9]+) time .*"
)
_COUNTER = re.compile(r"[a-z][a-z0-9_]{2,60}")
_COUNTERS = re.compile(rf"(?:packet statistics:\n)?(?:{_COUNTER.pattern}:[0-9]{{1,18}}\n)+\n*")
_POWER = re.compile(r"(\S+) mW")
_NOT_KEPT = (
    "temperature", "Temp ", "Vcc", "Tx Power", "TxPower", "RxPower High", "Tx Bias", "Host SNR", "Media SNR", "xsfp",
    "vendor", "manufact", "high power",
)  # fmt: skip
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ASCTIME = re.compile(r"[A-Z][a-z]{2} ([A-Z][a-z]{2}) {1,2}([0-9]{1,2}) ([0-9]{2}):([0-9]{2}):([0-9]{2}) ([0-9]{4})")
_DEVICE = re.compile(r"\s*\[(?:devid|device) ([0-9]{1,5})\]\s?(.*)", re.DOTALL)


class Link(reading.Answer):
    is_up: bool | None = reading.printed("link status", read=reading.switch("UP", "DOWN"))


class NetHealth(reading.Answer):
    """One of NET_HEALTH_STATES; `Init` is normal while no address to detect is configured."""

    status: str | None = reading.printed("net health status", read=reading.choice(*NET_HEALTH_STATES))


class Fec(reading.Answer):
    """One of FEC_MODES; `no FEC mode` is a fault on a training port."""

    mode: str | None = reading.printed("fec mode", read=reading.choice(*FEC_MODES))


class Mtu(reading.Answer):
    """The largest packet of the port in bytes. Only the tool's own format string is known; no output was recorded."""

    mtu: int | None = reading.printed("mtu", read=reading.whole(65536, 68))


class Address(reading.Answer):
    """Output of `-ip`: `is_set` is False if the output is empty, None after an error or an unreadable line."""

    is_set: bool | None = None
    address: str | None = reading.printed("ipaddr", "ipv6_address", read=reading.read_ip)
    netmask: str | None = reading.printed("netmask", read=reading.read_ip)


class Tls(reading.Answer):
    """All ranks of a job must have the same `is_enabled`."""

    device_id: int | None = None
    is_enabled: bool | None = None
    alarm_days: int | None = None


class Ping(reading.Answer):
    device_id: int | None = None
    address: str | None = None
    sent: int | None = None
    received: int | None = None


class Counters(reading.Answer):
    """Counters by the tool's names. Duplicate names, or names without a number, are omitted and reported."""

    values: Mapping[str, int] = field(default_factory=dict)


def _milliwatts(text: str) -> float | None:
    found = _POWER.fullmatch(text)
    return reading.read_float(found[1], 0, 1000) if found else None


class Optical(reading.Answer):
    """The optical module. `flags` by name: 0 is healthy, None is printed as NA; received power by lane."""

    is_present: bool | None = reading.printed("present", read=reading.switch("present", "not present"))
    rx_power_low_mw: float | None = reading.printed("RxPower Low Thres", read=_milliwatts)
    rx_power_mw: tuple[float | None, ...] = ()
    flags: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkChange:
    """Time at which the link went up or down, by the device's clock, in its time zone."""

    at: datetime
    is_up: bool


class LinkHistory(reading.Answer):
    """Output of `-link_stat`: `changes` newest first; () if the tool prints NA, None if it prints nothing.

    `down_count` is printed by newer drivers only.
    """

    device_id: int | None = None
    now: datetime | None = None
    up_count: int | None = None
    down_count: int | None = None
    changes: tuple[LinkChange, ...] | None = None


parse_link = partial(reading.read_answer, Link)
parse_net_health = partial(reading.read_answer, NetHealth)
parse_fec = partial(reading.read_answer, Fec)
parse_mtu = partial(reading.read_answer, Mtu)


def parse_ip(text: str) -> Address:
    plain = _PLAIN_IP.fullmatch(text)  # nearly every port prints this form
    if plain and reading.read_ip(plain[1]) and reading.read_ip(plain[2]):
        return Address(is_set=True, address=plain[1], netmask=plain[2])
    errors, rest = reading.split_errors(reading.lines_of(text))
    block = reading.Block(rest)
    found = {} if {"ipaddr", "ipv6_address"} <= set(block.fields) else block.fill(Address)
    block.take(("prefix_length",), reading.whole(128))
    unparsed = reading.unparsed_of(block.rest())
    is_set = True if found.get("address") else None if errors or block.fields or unparsed else False
    return Address(errors=errors, unparsed=unparsed, is_set=is_set, **found)


def parse_tls(text: str) -> Tls:
    """Parse the switch on the first line. The certificates below are ignored, and not reported as unparsed."""
    errors, rest = reading.split_errors(reading.lines_of(text))
    heads = [line for line in rest if line.startswith("dev_id:")]
    head = _TLS.match(heads[0]) if len(heads) == 1 else None
    if not head:
        return Tls(errors, reading.unparsed_of(heads or rest))
    alarm = _ALARM.search(heads[0])
    return Tls(errors, (), int(head[1]), head[2] == "1", int(alarm[1]) if alarm else None)


def parse_ping(text: str) -> Ping:
    errors, rest = reading.split_errors(reading.lines_of(text))
    heads, sums, unread = [], [], []
    for line in rest:
        head, total = _PING_HEAD.fullmatch(line), _PING_SUM.fullmatch(line)
        if head and reading.read_ip(head[2]):
            heads.append(head)
        elif total and int(total[2]) <= int(total[1]):
            sums.append(total)
        elif not _PING_TIME.fullmatch(line):
            unread.append(line)
    device, address = (int(heads[0][1]), heads[0][2]) if len(heads) == 1 else (None, None)
    sent, received = (int(sums[0][1]), int(sums[0][2])) if len(sums) == 1 else (None, None)
    return Ping(errors, reading.unparsed_of(unread), device, address, sent, received)


def parse_stat(text: str) -> Counters:
    if _COUNTERS.fullmatch(text):  # nearly every port prints this form
        pairs = [line.split(":") for line in text.split("\n") if line and line != "packet statistics:"]
        known = {name: int(number) for name, number in pairs}
        if len(known) == len(pairs):
            return Counters(values=known)
    errors, rest = reading.split_errors(reading.lines_of(text))
    values: dict[str, int] = {}
    seen: Counter[str] = Counter()
    unread = []
    for line in rest:
        one = reading.field_of(line)
        number = reading.read_int(one.value, 0, 10**18 - 1) if one and _COUNTER.fullmatch(one.name) else None
        if one is not None and number is not None:
            seen[one.name] += 1
            values[one.name] = number
        elif line.strip() != "packet statistics:":
            unread.append(line)
    twice = sorted(name for name, times in seen.items() if times > 1)
    unread += [f"{name}: printed {seen[name]} times" for name in twice]
    return Counters(errors, reading.unparsed_of(unread), {name: values[name] for name in values if name not in twice})


def parse_optical(text: str) -> Optical:
    errors, rest = reading.split_errors(reading.lines_of(text))
    block = reading.Block(line for line in rest if line.strip() != "optical info:")
    lanes = [lane for lane in range(16) if f"Rx Power{lane}" in block.fields]
    power = tuple(block.take((f"Rx Power{lane}",), _milliwatts) for lane in range(max(lanes, default=-1) + 1))
    flags = {name: block.take((name,), reading.read_hex) for name in FLAGS if name in block.fields}
    values = block.fill(Optical)
    block.skip(name for name in block.fields if name.startswith(_NOT_KEPT))
    return Optical(errors=errors, unparsed=reading.unparsed_of(block.rest()), rx_power_mw=power, flags=flags, **values)


@reading.once
def parse_link_history(text: str) -> LinkHistory:
    errors, rest = reading.split_errors(reading.lines_of(text))
    readers = {"current time": _asctime, "link up count": reading.whole(2**40), "link down count": reading.whole(2**40)}
    devices, seen = set(), set()
    values: dict[str, Any] = dict.fromkeys(readers)
    changes: list[LinkChange] | None = None
    unread = []
    for line in rest:
        found = _DEVICE.fullmatch(line)
        if not found:
            unread.append(line)
            continue
        devices.add(int(found[1]))
        one, change = reading.field_of(found[2]), _link_change(found[2])
        if change and changes is not None:
            changes.append(change)
        elif one and one.name == "link change records":
            changes = []
            unread += [line] if one.value not in ("", "NA") else []
        elif one and one.name in readers and one.name not in seen:
            seen.add(one.name)
            values[one.name] = readers[one.name](one.value)
            unread += [line] if values[one.name] is None and one.value != "NA" else []
        else:
            unread.append(line)
    if len(devices) != 1 or (changes and any(a.at < b.at for a, b in zip(changes, changes[1:]))):
        return LinkHistory(errors, reading.unparsed_of(rest))
    records = None if changes is None else tuple(changes)
    now, ups, downs = values.values()
    return LinkHistory(errors, reading.unparsed_of(unread), devices.pop(), now, ups, downs, records)


def _link_change(text: str) -> LinkChange | None:
    stamp, _, change = text.strip().partition("    ")
    at, state = _asctime(stamp), reading.read_choice(change, ("LINK UP", "LINK DOWN"))
    return LinkChange(at, state == "LINK UP") if at and state else None


def _asctime(text: str) -> datetime | None:
    """Parse C's asctime without its weekday, which is often wrong on devices; None if invalid."""
    found = _ASCTIME.fullmatch(text.strip())
    if not found or found[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = (int(found[n]) for n in range(2, 7))
    try:
        return datetime(year, _MONTHS.index(found[1]) + 1, day, hour, minute, second)
    except ValueError:
        return None
