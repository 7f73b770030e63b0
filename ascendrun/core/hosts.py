"""Hosts and the hostfile that lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.errors import InvalidInputError, NotFoundError, Problem
from ascendrun.core.names import MAX_NAMES, InvalidNamesError, expand_names, is_name, split_list
from ascendrun.core.reader.source_text import MAX_PROBLEMS, REMOVE, decode_text, in_order
from ascendrun.text import Text, TextError, closest, did_you_mean, suggestion, write
from ascendrun.text.format import is_hidden

LOCAL_ADDRESS = "local"
"""`addr=local` in a hostfile: this machine, reached without SSH, with a separate node directory."""

MAX_BYTES = 1_000_000
MAX_LINE = 10_000
MAX_SLOTS = 1024
ONE_HOST = Text("hostfile.one-host", "write one host on each line: npu01 slots=8")
KEYS = ("slots", "addr", "user", "port", "devices", "groups", "max_slots", "bmc")

# Open MPI writes `slots = 4` as well as `slots=4`; no other field contains spaces.
_WORD = re.compile(r"(?:slots|max[_-]slots)[ \t]*=[ \t]*[0-9]+(?=[ \t]|$)|\S+")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Host:
    """One host of the hostfile.

    `slots`: the number of ranks it accepts, None: not set (the job's `devices.per_node` decides).
    `addr`: the address to connect to, None: the name (through `~/.ssh/config`); "local": this machine, no SSH.
    `devices`: the device ids that ascendrun may use there, None: all. `bmc`: the address of its management controller,
    None: its power is never switched.
    `line`: its line in the hostfile, from 1; 0: not from a hostfile.
    `engine`: the type of the engine that granted it, with the engine's id of the `allocation`; None: of a hostfile.
    """

    name: str
    slots: int | None = None
    addr: str | None = None
    user: str | None = None
    port: int | None = None
    devices: tuple[int, ...] | None = None
    groups: tuple[str, ...] = ()
    line: int = 0
    engine: str | None = None
    allocation: str | None = None
    bmc: str | None = None

    @property
    def is_local(self) -> bool:
        return self.addr == LOCAL_ADDRESS

    @property
    def engine_type(self) -> str:
        """How it is reached: a module of backends/."""
        return self.engine or (LOCAL_ADDRESS if self.is_local else "ssh")


def queue_of(spec: Mapping[str, Any]) -> str | None:
    """Return the type of the engine that a job gets its hosts from; None: they are those of its pool."""
    engine = spec.get("engine")
    return engine["type"] if isinstance(engine, Mapping) and engine["type"] != "ssh" else None


class _InvalidHostError(TextError):
    """A value that cannot be parsed."""

    def __init__(self, message: Text, hint: Text | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def parse_hostfile(text: str | bytes, file: str) -> tuple[Host, ...]:
    """Return the hosts in the order of the file. Raises InvalidInputError with every problem of the file, each at line
    and column.

    The formats of DeepSpeed and Open MPI (`host slots=N [max_slots=M]`) are accepted.
    """
    lines, problems = decode_text(text, file, max_bytes=MAX_BYTES)
    hosts: list[Host] = []
    unreadable = {problem.line for problem in problems}
    for number, line in enumerate(lines, start=1):
        if number in unreadable:
            continue
        if len(problems) > MAX_PROBLEMS:
            break
        found = _parse_line(line, number, file, problems)
        if len(hosts) + len(found) > MAX_NAMES:
            problems.append(
                Problem(file, number, 1, Text("hostfile.too-many", "more than {limit} hosts", limit=MAX_NAMES))
            )
            break
        hosts.extend(found)
    problems.extend(_duplicates(hosts, file))
    if not hosts and not problems:
        problems.append(Problem(file, 1, 1, Text("hostfile.empty", "no host found"), ONE_HOST))
    if problems:
        raise InvalidInputError(in_order(problems))
    return tuple(hosts)


def select_hosts(hosts: Sequence[Host], wanted: str) -> tuple[Host, ...]:
    """Return the hosts named by `wanted`, such as `npu[01-03],gpu7` or `@group`, in the order of the file.

    Raises NotFoundError for an unknown name or group, InvalidInputError if `wanted` is not a set of names.
    """
    names: dict[str, None] = {}
    for piece in split_list(wanted):
        names.update(dict.fromkeys(_names_of(piece.strip(), hosts, wanted)))
    known = {host.name for host in hosts}
    missing = [name for name in names if name not in known]
    if missing:
        near = closest(missing[0], known)
        listed = Text("hosts.listed", "the hostfile lists {hosts:hosts}", hosts=sorted(known))
        message = Text("hosts.not-listed", "{hosts:hosts} not found in the hostfile", hosts=missing)
        raise NotFoundError(message, hint=did_you_mean(near) if near else listed)
    return tuple(host for host in hosts if host.name in names)


def _names_of(piece: str, hosts: Sequence[Host], wanted: str) -> Sequence[str]:
    if piece.startswith("@"):
        members = [host.name for host in hosts if piece[1:] in host.groups]
        if not members:
            groups = sorted({group for host in hosts for group in host.groups})
            raise NotFoundError(
                Text("hosts.unknown-group", "unknown group {group:quote} in the hostfile", group=piece[1:]),
                hint=suggestion(piece[1:], groups),
            )
        return members
    try:
        return expand_names(piece)
    except InvalidNamesError as error:
        message = Text("hosts.invalid-set", "invalid hosts {text:quote}: {reason}", text=piece, reason=error.message)
        hint = Text("hosts.set-hint", "write npu[01-03],npu07 or @group")
        raise InvalidInputError([Problem(wanted, None, None, message, hint)]) from error


def _parse_line(line: str, number: int, file: str, problems: list[Problem]) -> Sequence[Host]:
    """Return the hosts of one line; empty for a comment, a blank line and an invalid name. Adds to `problems`."""
    if len(line) > MAX_LINE:
        text = Text(
            "hostfile.long-line", "line too long ({size} characters; at most {limit})", size=len(line), limit=MAX_LINE
        )
        problems.append(Problem(file, number, 1, text, ONE_HOST))
        return ()
    words = [(match.group(), match.start() + 1) for match in _WORD.finditer(line)]
    words = list(takewhile(lambda word: not word[0].startswith("#"), words))
    if not words:
        return ()
    first, column = words[0]
    hidden = next((at for at, character in enumerate(line) if is_hidden(character) and character != "\t"), None)
    if hidden is not None and hidden < words[-1][1] + len(words[-1][0]):
        text = Text("hostfile.hidden", "hidden character {code}", code=f"U+{ord(line[hidden]):04X}")
        problems.append(Problem(file, number, hidden + 1, text, REMOVE))
        return ()
    values = _parse_values(words[1:], number, file, problems)
    try:
        names, user = _parse_names(first)
    except _InvalidHostError as error:
        problems.append(Problem(file, number, column, error.message, error.hint))
        return ()
    if user is not None:
        if "user" in values:
            text = Text("hostfile.user-twice", "user is set twice")
            hint = Text("hostfile.user-twice-hint", "write user@host or user=, not both")
            problems.append(Problem(file, number, column, text, hint))
        values.setdefault("user", user)
    limit = values.pop("max_slots", None)
    if limit is not None:
        values.setdefault("slots", limit)
        if values["slots"] > limit:
            text = Text(
                "hostfile.max-slots", "slots={slots} exceeds max_slots={limit}", slots=values["slots"], limit=limit
            )
            problems.append(Problem(file, number, column, text))
    return [replace(Host(name=name, line=number), **values) for name in names]


def _parse_names(word: str) -> tuple[Sequence[str], str | None]:
    user, at, name = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise _InvalidHostError(Text("hostfile.user", "invalid user name {name:quote}", name=user), write("user=NAME"))
    if name.startswith("-"):
        raise _InvalidHostError(
            Text("hostfile.dash", "invalid host name {name:quote}: must not start with a dash", name=name)
        )
    if "=" in name:
        raise _InvalidHostError(
            Text("hostfile.name-first", "expected a host name, got {field:quote}", field=name), ONE_HOST
        )
    head, colon, tail = name.rpartition(":")
    if colon and tail.isdigit() and is_name(head):
        place = {"host": head, "number": tail}
        raise _InvalidHostError(
            Text("hostfile.ambiguous-number", "{field:quote}: ambiguous number", field=name),
            Text("hostfile.ambiguous-number-hint", "write {host} slots={number} or {host} port={number}", **place),
        )
    if colon:
        ipv6 = Text("hostfile.ipv6", "write an IPv6 address as addr=: npu01 addr=fe80::1")
        invalid = Text("hostfile.name", "invalid host name {name:quote}", name=name)
        raise _InvalidHostError(invalid, ipv6 if ":" in head else ONE_HOST)
    try:
        names = expand_names(name)
    except InvalidNamesError as error:
        message = Text("hostfile.names", "invalid host name {name:quote}: {reason}", name=name, reason=error.message)
        hint = Text("hostfile.names-hint", "write npu01, or npu[01-16] for many hosts")
        raise _InvalidHostError(message, hint) from error
    for each in names:
        if re.fullmatch(r"[0-9.]+", each):
            _check_address(each)
    return names, user if at else None


def _parse_values(words: Sequence[tuple[str, int]], number: int, file: str, problems: list[Problem]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word, column in words:
        try:
            key, value = _parse_pair(word)
            if key in values:
                raise _InvalidHostError(Text("hostfile.duplicate-key", "duplicate key {key} on this line", key=key))
            values[key] = value
        except _InvalidHostError as error:
            problems.append(Problem(file, number, column, error.message, error.hint))
    return values


def _parse_pair(word: str) -> tuple[str, Any]:
    key, equals, value = (part.strip(" \t") for part in word.partition("="))
    key = "max_slots" if key == "max-slots" else key
    if not equals:
        raise _InvalidHostError(
            Text("hostfile.pair", "expected KEY=VALUE, got {field:quote}", field=word),
            Text("hostfile.pair-hint", "write one host on each line, with the keys {keys}", keys=list(KEYS)),
        )
    if not key:
        raise _InvalidHostError(
            Text("hostfile.no-key", "{field:quote}: key missing before =", field=word),
            Text("hostfile.no-spaces", "write {example} without spaces", example="slots=8"),
        )
    if key not in KEYS:
        raise _InvalidHostError(Text("jobfile.unknown-key", "unknown key {key:quote}", key=key), suggestion(key, KEYS))
    if not value:
        raise _InvalidHostError(
            Text("hostfile.no-value", "{key}: value missing", key=key),
            Text("hostfile.no-spaces", "write {example} without spaces", example=_EXAMPLES[key]),
        )
    return key, _READERS[key](value)


def _integer(value: str, key: str, low: int, high: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or not low <= int(value) <= high:
        values = {"key": key, "low": low, "high": high, "value": value}
        text = Text("hostfile.number", "{key}: expected an integer from {low} to {high}, got {value:quote}", **values)
        raise _InvalidHostError(text, write(_EXAMPLES[key]))
    return int(value)


def _parse_user(value: str) -> str:
    if not _USER.fullmatch(value):
        raise _InvalidHostError(
            Text("hostfile.user", "invalid user name {name:quote}", name=value),
            Text("hostfile.user-hint", "use letters, digits, '.', '_' and '-'"),
        )
    return value


def _parse_address(value: str) -> str:
    if value == LOCAL_ADDRESS:
        return value
    if value.lower() == LOCAL_ADDRESS:
        raise _InvalidHostError(_invalid_address(value), Text("hostfile.local", "write addr=local in lower case"))
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    _check_address(bare)
    return bare


def _check_address(value: str) -> None:
    if ":" in value or re.fullmatch(r"[0-9.]+", value):
        import ipaddress

        try:
            ipaddress.ip_address(value.partition("%")[0])
        except ValueError:
            head, _, tail = value.rpartition(":")
            example = f"addr={head} port={tail}" if tail.isdigit() and is_name(head) else "addr=10.0.0.3"
            hint = write(example)
            raise _InvalidHostError(_invalid_address(value), hint) from None
        zone = value.partition("%")[2]
        if "%" in value and not is_name(zone):
            raise _InvalidHostError(
                Text("hostfile.interface", "{address:quote}: invalid interface {name:quote}", address=value, name=zone),
                write("addr=fe80::1%eth0"),
            )
    elif not is_name(value):
        one_each = Text("hostfile.addr-range", "write a separate line for each host with addr=")
        forms = Text("hostfile.addr-forms", "write an IP address, a name, or local")
        raise _InvalidHostError(_invalid_address(value), one_each if "[" in value else forms)


def _parse_devices(value: str) -> tuple[int, ...]:
    parts = value.split(",")
    if not all(re.fullmatch(r"0|[1-9][0-9]{0,3}", part) for part in parts):
        raise _InvalidHostError(
            Text("hostfile.devices", "devices: expected a list of device ids, got {value:quote}", value=value),
            write("devices=0,1,2,3"),
        )
    ids = tuple(int(part) for part in parts)
    right = write("devices=" + ",".join(map(str, sorted(set(ids)))))
    if len(set(ids)) != len(ids):
        raise _InvalidHostError(Text("hostfile.duplicate-device", "devices: duplicate device id"), right)
    if list(ids) != sorted(ids):
        # CANN ignores ids that are out of order.
        raise _InvalidHostError(Text("hostfile.device-order", "devices must be ascending"), right)
    return ids


def _parse_groups(value: str) -> tuple[str, ...]:
    groups = tuple(value.split(","))
    for group in groups:
        if not _GROUP.fullmatch(group):
            raise _InvalidHostError(
                Text("hostfile.group", "invalid group name {name:quote}", name=group),
                Text("hostfile.user-hint", "use letters, digits, '.', '_' and '-'"),
            )
    if len(set(groups)) != len(groups):
        raise _InvalidHostError(Text("hostfile.duplicate-group", "groups: duplicate group"))
    return groups


_READERS: Mapping[str, Callable[[str], Any]] = {
    "slots": lambda value: _integer(value, "slots", 1, MAX_SLOTS),
    "max_slots": lambda value: _integer(value, "slots", 1, MAX_SLOTS),
    "addr": _parse_address,
    "user": _parse_user,
    "port": lambda value: _integer(value, "port", 1, 65535),
    "devices": _parse_devices,
    "groups": _parse_groups,
    "bmc": _parse_address,
}
_VALUES = {"slots": "8", "max_slots": "8", "addr": "10.0.0.3", "user": "train", "port": "22", "groups": "a,b"}
_EXAMPLES = {key: f"{key}={value}" for key, value in {**_VALUES, "devices": "0,1,2,3", "bmc": "10.1.0.3"}.items()}


def _duplicates(hosts: Sequence[Host], file: str) -> list[Problem]:
    """Return duplicate names and machines with two names; the same pair of lines gives one problem."""
    by_name: dict[str, Host] = {}
    by_machine: dict[tuple[str, object], Host] = {}
    twice: dict[tuple[int, int], list[str]] = {}
    problems = []
    hint = Text("hostfile.duplicate-hint", "list each host once; slots= sets its number of ranks")
    for host in hosts:
        first = by_name.setdefault(host.name.lower(), host)
        if first is not host:
            twice.setdefault((first.line, host.line), []).append(host.name)
            continue
        if host.is_local:
            continue
        for address, port in ((host.addr or host.name, host.port or 22), (host.bmc or "", "bmc")):
            other = by_machine.setdefault((address.lower(), port), host) if address else host
            if other is not host:
                values = {"host": host.name, "other": other.name, "line": other.line, "address": address, "port": port}
                text = Text(
                    "hostfile.same-machine",
                    "{host} and {other} (line {line}) have the same address {address}:{port}",
                    **values,
                )
                problems.append(Problem(file, host.line, 1, text, hint))
    for (first_line, line), names in twice.items():
        text = Text(
            "hostfile.duplicate", "duplicate host {hosts:hosts} (first at line {line})", hosts=names, line=first_line
        )
        problems.append(Problem(file, line, 1, text, hint))
    return problems


def _invalid_address(address: str) -> Text:
    return Text("hostfile.address", "invalid address {address:quote}", address=address)


def load_hosts(values: Sequence[Mapping[str, Any]]) -> tuple[Host, ...]:
    """Hosts from the JSON values of their dataclass."""
    return tuple(load_dataclass(Host, value) for value in values)
