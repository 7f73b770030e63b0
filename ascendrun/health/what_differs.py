"""What two ranks do unlike: the field of a collective that differs, with both values, and ranks that share a device;
and what hosts have that no other has.

differing_in("collective mismatch error, local size 4096 remote size 512")
{"FIELD": "size", "OWN": "4096", "THEIRS": "512"}
crowd_in("Process 71 has 9.00 GiB memory in use … this process has …", rank, ranks)    {"CROWD": "2"}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from ascendrun.ascend.vocabularies import alike, read_table, wording

MOST_CHARACTERS = 60
CROWD_FROM = 3
"""Ranks of a host from which on as many processes on one device are these, also where a container has other numbers."""


def differing_in(text: str) -> Mapping[str, str]:
    """Return the first field whose values differ, by what a library prints of both sides; {}: none is known."""
    for field, patterns in read_table("hints")["fields"].items():
        for found in filter(None, (re.search(pattern, text, re.S) for pattern in patterns)):
            own, theirs = (found[side].strip()[:MOST_CHARACTERS] for side in ("own", "theirs"))
            if own != theirs:
                return {"FIELD": field, "OWN": own, "THEIRS": theirs}
    return {}


class Called(Protocol):
    """A message with the collective that its rank waited in (ascend.peer_messages)."""

    @property
    def kind(self) -> str: ...
    @property
    def values(self) -> Mapping[str, str]: ...


def unlike_in(messages: Iterable[tuple[int, Called]], size: int = 0) -> tuple[Mapping[str, str], Mapping[int, str]]:
    """Return the first field that differs between ranks in one call of a group, with the call and both values, and the
    value of each rank in that call; {}: none differs. `size`: of the job. What NCCL logs of its calls is compared only
    of the one communicator that has all ranks, as its name is another on each rank."""
    told = tuple(messages)
    calls: dict[tuple[str, str], dict[int, Mapping[str, str]]] = {}
    comms: dict[int, set[str]] = {}
    for rank, one in told:
        if one.kind == "called" and one.values["size"] == str(size):
            comms.setdefault(rank, set()).add(one.values["comm"])
    for rank, one in told:
        is_of_all = one.kind == "called" and one.values["size"] == str(size) and len(comms[rank]) == 1
        if one.kind == "sequence" or is_of_all:
            call = (one.kind + one.values.get("group", ""), one.values["seq"])
            calls.setdefault(call, {}).setdefault(rank, one.values)
    for (_, number), waiting in calls.items():
        for name, field in (("op", "op"), ("in", "elements"), ("out", "elements")):
            row = {rank: values[name] for rank, values in waiting.items() if name in values}
            both = list(dict.fromkeys(row.values()))
            if len(both) > 1:
                own, other = (str(next(rank for rank in row if row[rank] == value)) for value in both[:2])
                sides = {"OWN": both[0], "THEIRS": both[1], "FIRST": own, "OTHER": other}
                return {"FIELD": field, "CALL": f"{waiting[int(own)].get('op', '')} {number}".strip(), **sides}, row
    return {}, {}


def minority(row: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks with the rarer of exactly two values; () if they are equally frequent."""
    counts = Counter(row.values()).most_common()
    if len(counts) != 2 or counts[0][1] == counts[1][1]:
        return ()
    return tuple(rank for rank, value in row.items() if value == counts[1][0])


def lowest(row: Mapping[int, float], *, by: float = 0.0, within: float = 0.0, times: int = 2) -> tuple[int, ...]:
    """Return the ranks with the lowest numbers, +`within`, if the highest is larger by more than `by`; () if these are
    not few: all must be more than `times` as many."""
    low, high = min(row.values(), default=0.0), max(row.values(), default=0.0)
    late = tuple(rank for rank, number in row.items() if number <= low + within)
    return late if high - low > by and times * len(late) < len(row) else ()


class Unlike(NamedTuple):
    """A fact of a host that no other host of its role has, and the value of all of these."""

    host: str
    key: str
    own: str
    others: str

    @property
    def kind(self) -> str:
        return self.key.partition(".")[0]


def unlike_hosts(
    known: Mapping[str, Mapping[str, object]], roles: Mapping[str, str], hosts: Collection[str]
) -> Iterator[Unlike]:
    """Yield what each of the hosts has and no other host of its role. `known`: the facts of each host."""
    for host in (host for host in hosts if host in known):
        like_it = [one for one in known if one not in hosts and roles.get(one, "") == roles.get(host, "")]
        for key, own in known[host].items():
            theirs = {known[other].get(key, "-") for other in like_it}
            if len(theirs) == 1 and own not in theirs and alike("of-each-host").isdisjoint(key.split(".")):
                yield Unlike(host, key, str(own), str(theirs.pop()))


class Started(Protocol):
    """A rank that was started."""

    @property
    def pid(self) -> int | None: ...


def crowd_in(text: str, own: Started | None, ranks: Collection[Started]) -> Mapping[str, str]:
    """Return how many processes of the job hold memory of one device, by what an allocator lists: it names its own
    apart or among them. `own`: the rank, `ranks`: all of its host."""
    listed = {int(pid) for pid in wording("holds-memory").findall(text)}
    count = len(listed) + ("this process has" in text)
    others = listed - {own.pid if own is not None else None}
    is_own = not others.isdisjoint({one.pid for one in ranks}) or CROWD_FROM <= len(ranks) <= count
    return {"CROWD": str(count)} if count > 1 and len(ranks) > 1 and is_own else {}
