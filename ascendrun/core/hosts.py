"""Hosts and the hostfile that lists them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple

from ascendrun.core.errors import InvalidInputError, NotFoundError, Problem
from ascendrun.core.jobfile.source_text import decode_text
from ascendrun.core.message_format import MAX_PROBLEMS, closest, in_order, is_hidden, shown, suggestion
from ascendrun.core.names import MAX_NAMES, InvalidNamesError, expand_names, fold_names, is_name, split_list

LOCAL_ADDRESS = "local"
"""`addr=local` in a hostfile: this very machine, reached without SSH, with a node root of its own."""

MAX_BYTES = 1_000_000
MAX_LINE = 10_000
MAX_SLOTS = 1024
KEYS = ("slots", "addr", "user", "port", "devices", "groups", "max_slots")

# Open MPI writes `slots = 4` as well as `slots=4`; everything else is one word.
_WORD = re.compile(r"(?:slots|max[_-]slots)[ \t]*=[ \t]*[0-9]+(?=[ \t]|$)|\S+")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Host:
    """One machine as the hostfile names it.

    `slots`: how many ranks it takes, None: not said (the job's `devices.per_node` decides).
    `addr`: what to dial, None: the name (through `~/.ssh/config`); "local": this machine, no SSH.
    `devices`: the device ids that ascendrun may use there, None: all.
    `line`: its line in the hostfile, from 1; 0 when it came from elsewhere.
    """

    name: str
    slots: int | None = None
    addr: str | None = None
    user: str | None = None
    port: int | None = None
    devices: tuple[int, ...] | None = None
    groups: tuple[str, ...] = ()
    line: int = 0

    @property
    def is_local(self) -> bool:
        return self.addr == LOCAL_ADDRESS


class _Word(NamedTuple):
    text: str
    column: int


class _InvalidHostError(ValueError):
    """A value does not parse: what is wrong, and the way out."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def parse_hostfile(text: str | bytes, file: str) -> tuple[Host, ...]:
    """The hosts in the order of the file. Raises InvalidInputError with every problem of the file, each at line
    and column.

    DeepSpeed's and Open MPI's files (`host slots=N [max_slots=M]`) are read as they are.
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
                Problem(
                    file,
                    number,
                    1,
                    f"more than {MAX_NAMES} hosts up to this line",
                    "split the file; one job never needs that many",
                )
            )
            break
        hosts.extend(found)
    problems.extend(_duplicates(hosts, file))
    if not hosts and not problems:
        problems.append(Problem(file, 1, 1, "names no host", "one host a line: npu01 slots=8"))
    if problems:
        raise InvalidInputError(in_order(problems))
    return tuple(hosts)


def select_hosts(hosts: Sequence[Host], wanted: str) -> tuple[Host, ...]:
    """Those of `hosts` that `wanted` names, in the order of the file: `npu[01-03],gpu7`, or `@group`.

    Raises NotFoundError for a name or group that the file does not have, InvalidInputError for a text that is no
    set of names.
    """
    names: dict[str, None] = {}
    for piece in split_list(wanted):
        names.update(dict.fromkeys(_names_of(piece.strip(), hosts, wanted)))
    known = {host.name for host in hosts}
    missing = [name for name in names if name not in known]
    if missing:
        near = closest(missing[0], known)
        raise NotFoundError(
            f"the hostfile has no {fold_names(missing)}",
            hint=f"did you mean {near}?" if near else f"it has {fold_names(known)}",
        )
    return tuple(host for host in hosts if host.name in names)


def _names_of(piece: str, hosts: Sequence[Host], wanted: str) -> Sequence[str]:
    if piece.startswith("@"):
        members = [host.name for host in hosts if piece[1:] in host.groups]
        if not members:
            groups = sorted({group for host in hosts for group in host.groups})
            raise NotFoundError(
                f"no host of the hostfile is in the group {shown(piece[1:])}", hint=suggestion(piece[1:], groups)
            )
        return members
    try:
        return expand_names(piece)
    except InvalidNamesError as error:
        raise InvalidInputError(
            [Problem(wanted, None, None, f"{shown(piece)}: {error}", "npu[01-03],npu07 or @group")]
        ) from error


def _parse_line(line: str, number: int, file: str, problems: list[Problem]) -> Sequence[Host]:
    """The hosts of one line; what is wrong goes to `problems`. Empty for a comment, a blank and a bad name."""
    if len(line) > MAX_LINE:
        problems.append(
            Problem(
                file,
                number,
                1,
                f"line of {len(line)} characters; at most {MAX_LINE} are read",
                "one host a line: npu01 slots=8",
            )
        )
        return ()
    words = [_Word(match.group(), match.start() + 1) for match in _WORD.finditer(line)]
    for index, word in enumerate(words):
        if word.text.startswith("#"):
            words = words[:index]
            break
    if not words:
        return ()
    hidden = next((at for at, character in enumerate(line) if is_hidden(character) and character != "\t"), None)
    if hidden is not None and hidden < words[-1].column + len(words[-1].text):
        problems.append(Problem(file, number, hidden + 1, f"hidden character U+{ord(line[hidden]):04X}", "delete it"))
        return ()
    values = _parse_values(words[1:], number, file, problems)
    try:
        names, user = _parse_names(words[0].text)
    except _InvalidHostError as error:
        problems.append(Problem(file, number, words[0].column, error.message, error.hint))
        return ()
    if user is not None:
        if "user" in values:
            problems.append(Problem(file, number, words[0].column, "the user is named twice", "leave one of the two"))
        values.setdefault("user", user)
    limit = values.pop("max_slots", None)
    if limit is not None:
        values.setdefault("slots", limit)
        if values["slots"] > limit:
            problems.append(
                Problem(
                    file, number, words[0].column, f"slots={values['slots']} is above max_slots={limit}", "lower slots"
                )
            )
    return [replace(Host(name=name, line=number), **values) for name in names]


def _parse_names(word: str) -> tuple[Sequence[str], str | None]:
    user, at, name = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise _InvalidHostError(f"{shown(user)} is no user name", "write user=NAME")
    if name.startswith("-"):
        raise _InvalidHostError(f"{shown(name)} starts with a dash", "ssh would read it as an option")
    if "=" in name:
        raise _InvalidHostError(
            f"{shown(name)} stands where the host's name belongs", "the name comes first: npu01 slots=8"
        )
    head, colon, tail = name.rpartition(":")
    if colon and tail.isdigit() and is_name(head):
        raise _InvalidHostError(
            f"{shown(name)}: is the number slots or a port?", f"write {head} slots={tail} or {head} port={tail}"
        )
    if colon:
        hint = "give an IPv6 address a name: npu01 addr=fe80::1" if ":" in head else "one host a line: npu01 slots=8"
        raise _InvalidHostError(f"{shown(name)} is no host name", hint)
    try:
        names = expand_names(name)
    except InvalidNamesError as error:
        raise _InvalidHostError(f"{shown(name)}: {error}", "npu01, or npu[01-16] for many") from error
    for each in names:
        if re.fullmatch(r"[0-9.]+", each):
            _check_address(each)
    return names, user if at else None


def _parse_values(words: Sequence[_Word], number: int, file: str, problems: list[Problem]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        try:
            key, value = _parse_pair(word.text)
            if key in values:
                raise _InvalidHostError(f"{key} is given twice on this line", "leave one")
            values[key] = value
        except _InvalidHostError as error:
            problems.append(Problem(file, number, word.column, error.message, error.hint))
    return values


def _parse_pair(word: str) -> tuple[str, Any]:
    key, equals, value = (part.strip(" \t") for part in word.partition("="))
    key = "max_slots" if key == "max-slots" else key
    if not equals:
        raise _InvalidHostError(f"{shown(word)} is not key=value", "one host a line; keys: " + ", ".join(KEYS))
    if not key:
        raise _InvalidHostError(f"{shown(word)} has no key before '='", "write it without spaces: slots=8")
    if key not in KEYS:
        raise _InvalidHostError(f"unknown key {shown(key)}", suggestion(key, KEYS))
    if not value:
        raise _InvalidHostError(f"{key}= has no value", f"write {_EXAMPLES[key]} without spaces, or leave it out")
    return key, _READERS[key](value)


def _parse_slots(value: str) -> int:
    return _whole(value, "slots", 1, MAX_SLOTS, "the number of ranks: slots=8")


def _parse_port(value: str) -> int:
    return _whole(value, "port", 1, 65535, "the port of sshd: port=22")


def _whole(value: str, key: str, low: int, high: int, hint: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or not low <= int(value) <= high:
        raise _InvalidHostError(
            f"{key}={value if is_name(value) else shown(value)} is no whole number from {low} to {high}", hint
        )
    return int(value)


def _parse_user(value: str) -> str:
    if not _USER.fullmatch(value):
        raise _InvalidHostError(f"{shown(value)} is no user name", "letters, digits, '.', '_', '-'")
    return value


def _parse_address(value: str) -> str:
    if value == LOCAL_ADDRESS:
        return value
    if value.lower() == LOCAL_ADDRESS:
        raise _InvalidHostError(f"{shown(value)} is no address", "this machine is addr=local, in small letters")
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    _check_address(bare)
    return bare


def _check_address(value: str) -> None:
    if ":" in value or re.fullmatch(r"[0-9.]+", value):
        try:
            ipaddress.ip_address(value.partition("%")[0])
        except ValueError:
            head, _, tail = value.rpartition(":")
            hint = f"write addr={head} port={tail}" if tail.isdigit() and is_name(head) else "addr=10.0.0.3"
            raise _InvalidHostError(f"{shown(value)} is no address", hint) from None
        zone = value.partition("%")[2]
        if "%" in value and not is_name(zone):
            raise _InvalidHostError(f"{shown(value)}: {shown(zone)} is no interface", "addr=fe80::1%eth0")
    elif not is_name(value):
        hint = "one line for each host that has an addr" if "[" in value else "an IP address, a name, or local"
        raise _InvalidHostError(f"{shown(value)} is no address", hint)


def _parse_devices(value: str) -> tuple[int, ...]:
    parts = value.split(",")
    if not all(re.fullmatch(r"0|[1-9][0-9]{0,3}", part) for part in parts):
        raise _InvalidHostError(f"devices={shown(value)} is no list of device ids", "write them out: devices=0,1,2,3")
    ids = tuple(int(part) for part in parts)
    if len(set(ids)) != len(ids):
        raise _InvalidHostError(
            "devices names an id twice", "devices=" + ",".join(str(one) for one in sorted(set(ids)))
        )
    if list(ids) != sorted(ids):
        raise _InvalidHostError(
            "devices must ascend (CANN ignores ids out of order)",
            "devices=" + ",".join(str(one) for one in sorted(ids)),
        )
    return ids


def _parse_groups(value: str) -> tuple[str, ...]:
    groups = tuple(value.split(","))
    for group in groups:
        if not _GROUP.fullmatch(group):
            raise _InvalidHostError(f"{shown(group)} is no group name", "letters, digits, '.', '_', '-': groups=a,b")
    if len(set(groups)) != len(groups):
        raise _InvalidHostError("groups names a group twice", "leave one")
    return groups


_READERS: Mapping[str, Callable[[str], Any]] = {
    "slots": _parse_slots,
    "max_slots": _parse_slots,
    "addr": _parse_address,
    "user": _parse_user,
    "port": _parse_port,
    "devices": _parse_devices,
    "groups": _parse_groups,
}
_EXAMPLES = {
    "slots": "slots=8",
    "max_slots": "max_slots=8",
    "addr": "addr=10.0.0.3",
    "user": "user=train",
    "port": "port=22",
    "devices": "devices=0,1,2,3",
    "groups": "groups=a,b",
}


def _duplicates(hosts: Sequence[Host], file: str) -> list[Problem]:
    """Names that stand twice, and machines that have two names; many of one pair of lines make one problem."""
    by_name: dict[str, Host] = {}
    by_machine: dict[tuple[str, int], Host] = {}
    twice: dict[tuple[int, int], list[str]] = {}
    problems = []
    for host in hosts:
        first = by_name.setdefault(host.name.lower(), host)
        if first is not host:
            twice.setdefault((first.line, host.line), []).append(host.name)
            continue
        if host.is_local:
            continue
        address, port = (host.addr or host.name).lower(), host.port or 22
        other = by_machine.setdefault((address, port), host)
        if other is not host:
            problems.append(
                Problem(
                    file,
                    host.line,
                    1,
                    f"{host.name} and {other.name} (line {other.line}) are one machine: {address} port {port}",
                    "each host once; slots= says how many ranks it takes",
                )
            )
    for (first_line, line), names in twice.items():
        problems.append(
            Problem(
                file,
                line,
                1,
                f"{fold_names(names)} is listed twice: first on line {first_line}",
                "each host once; slots= says how many ranks it takes",
            )
        )
    return problems


def load_hosts(values: Sequence[Mapping[str, Any]]) -> tuple[Host, ...]:
    """Hosts from the JSON values of their dataclass."""
    return tuple(
        Host(
            **{
                **value,
                "groups": tuple(value["groups"]),
                "devices": None if value["devices"] is None else tuple(value["devices"]),
            }
        )
        for value in values
    )
