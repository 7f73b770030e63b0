"""Parsers of short output of `hccn_tool -i N -<item> -g`: the network port of one NPU.

    parse_link, parse_ip, parse_net_health, parse_tls, parse_ping, parse_fec

Each returns its own frozen dataclass with `errors` and `unparsed`. The output names the NPU only where `device_id` is
printed; the caller knows which NPU it queried.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ascendrun.ascend.reading import Field, field_of, lines_of, read_choice, read_float, read_int, read_ip, unparsed_of
from ascendrun.ascend.tool_errors import ToolError, split_errors
from ascendrun.core.dataclass import dataclass

NET_HEALTH_STATES = (
    "Success", "Socket fail", "Socket failed", "Receive timeout", "Unreachable", "Time exceeded", "Fault", "Init",
    "Thread error", "Detect ip set", "Unknown",
)  # fmt: skip
FEC_MODES = ("rs FEC mode", "no FEC mode", "auto FEC mode")

_PLAIN_IP = re.compile(r"ipaddr:([0-9.]{7,15})\nnetmask:([0-9.]{7,15})\n+")
_TLS = re.compile(r"dev_id:([0-9]{1,5}), ?tls switch\[([01])\]")
_ALARM = re.compile(r"tls alarm time threshold\[([0-9]{1,5})\]days")
_PING_HEAD = re.compile(r"device ([0-9]{1,5}) PING6? (\S+)")
_PING_SUM = re.compile(r"([0-9]{1,9}) packets transmitted, ([0-9]{1,9}) received, ([0-9.]{1,9})% packets? loss.*")
_PING_ONE = re.compile(
    r"recv seq[ =]([0-9]{1,9}), ?time ?= ?([0-9.]{1,20})(ms|us)(?:, L1 plane check result = 0x[0-9a-f]+)?"
)


@dataclass(frozen=True)
class Link:
    is_up: bool | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class Address:
    """Output of `-ip`: `is_set` is False if the output is empty, None after an error or an unreadable line."""

    is_set: bool | None
    address: str | None
    netmask: str | None
    prefix_length: int | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class NetHealth:
    """One of NET_HEALTH_WORDS; `Init` is normal while no address to detect is configured."""

    status: str | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class Tls:
    """All ranks of a job must have the same `is_enabled`."""

    device_id: int | None
    is_enabled: bool | None
    alarm_days: int | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class Ping:
    """Round trips in the order of their replies; `loss_percent` as the tool counted it."""

    device_id: int | None
    address: str | None
    sent: int | None
    received: int | None
    loss_percent: float | None
    round_trips_ms: tuple[float, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class Fec:
    """One of FEC_WORDS; `no FEC mode` is a fault on a training port."""

    mode: str | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


def parse_link(text: str) -> Link:
    errors, unread, field = _sole_field(text, "link status")
    state = read_choice(field.value, ("UP", "DOWN")) if field else None
    return Link(None if state is None else state == "UP", errors, _report(unread, field, state))


def parse_ip(text: str) -> Address:
    plain = _PLAIN_IP.fullmatch(text)  # nearly every port prints this form
    if plain and read_ip(plain[1]) and read_ip(plain[2]):
        return Address(True, plain[1], plain[2], None, (), ())
    errors, rest = split_errors(lines_of(text))
    found, unread = _fields(rest, ("ipaddr", "netmask", "ipv6_address", "prefix_length"))
    address = read_ip(found.get("ipaddr", found.get("ipv6_address", "")))
    netmask = read_ip(found.get("netmask", ""))
    prefix = read_int(found.get("prefix_length", ""), 0, 128)
    if "ipaddr" in found and "ipv6_address" in found:
        address = netmask = prefix = None
    is_set = True if address else (None if errors or found or unparsed_of(unread) else False)
    lost = [f"{name}:{value}" for name, value in found.items() if _unread(name, address, netmask, prefix)]
    return Address(is_set, address, netmask, prefix, errors, unparsed_of(unread + lost))


def _unread(name: str, address: str | None, netmask: str | None, prefix: int | None) -> bool:
    return {"netmask": netmask, "prefix_length": prefix}.get(name, address) is None


def parse_net_health(text: str) -> NetHealth:
    errors, unread, field = _sole_field(text, "net health status")
    status = read_choice(field.value, NET_HEALTH_STATES) if field else None
    return NetHealth(status, errors, _report(unread, field, status))


def parse_tls(text: str) -> Tls:
    """Parse the switch on the first line. The certificates below are ignored, and not reported as unparsed."""
    errors, rest = split_errors(lines_of(text))
    heads = [line for line in rest if line.startswith("dev_id:")]
    switch = _TLS.match(heads[0]) if len(heads) == 1 else None
    alarm = _ALARM.search(heads[0]) if switch else None
    unread = [line for line in rest if line.strip() and not heads] + ([] if switch else heads)
    if not switch:
        return Tls(None, None, None, errors, unparsed_of(unread))
    return Tls(int(switch[1]), switch[2] == "1", int(alarm[1]) if alarm else None, errors, unparsed_of(unread))


def parse_ping(text: str) -> Ping:
    errors, rest = split_errors(lines_of(text))
    heads, sums, trips, unread = [], [], [], []
    for line in rest:
        head, total, one = _PING_HEAD.fullmatch(line), _PING_SUM.fullmatch(line), _PING_ONE.fullmatch(line)
        milliseconds = read_float(one[2], 0, 1e7) if one else None
        if head and read_ip(head[2]):
            heads.append(head)
        elif total:
            sums.append(total)
        elif one and milliseconds is not None:
            trips.append(milliseconds if one[3] == "ms" else milliseconds / 1000)
        elif not re.match(r"(?:max|min|average|TP[0-9]+) time ", line):
            unread.append(line)
    sent, received, loss = None, None, None
    if len(sums) == 1:
        sent, received, loss = int(sums[0][1]), int(sums[0][2]), read_float(sums[0][3], 0, 100)
        if received > sent:
            sent = received = loss = None
            unread.append(sums[0][0])
    device = int(heads[0][1]) if len(heads) == 1 else None
    address = heads[0][2] if len(heads) == 1 else None
    return Ping(device, address, sent, received, loss, tuple(trips), errors, unparsed_of(unread))


def parse_fec(text: str) -> Fec:
    errors, unread, field = _sole_field(text, "fec mode")
    mode = read_choice(field.value, FEC_MODES) if field else None
    return Fec(mode, errors, _report(unread, field, mode))


def _sole_field(text: str, name: str) -> tuple[tuple[ToolError, ...], list[str], Field | None]:
    """Return the errors, the other lines, and the field of that name; None if missing or duplicated."""
    errors, rest = split_errors(lines_of(text))
    fields = [field for field in map(field_of, rest) if field and field.name == name]
    if len(fields) != 1:
        return errors, list(rest), None
    return errors, [line for line in rest if line != fields[0].line], fields[0]


def _report(unread: list[str], field: Field | None, read: object) -> tuple[str, ...]:
    return unparsed_of(unread + ([field.line] if field and read is None else []))


def _fields(lines: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the known names, and all other lines, including those of duplicate names."""
    found_lines: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        name, separator, value = line.partition(":")
        name = name.strip(" \t")
        if separator and name in names:
            found_lines.setdefault(name, []).append((line, value.strip(" \t")))
    once = {name: many[0] for name, many in found_lines.items() if len(many) == 1}
    known = {line for line, _ in once.values()}
    return {name: value for name, (_, value) in once.items()}, [line for line in lines if line not in known]
