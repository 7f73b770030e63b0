"""Which limit ended a wait: the option or variable that sets it, and its value, by messages of libraries; in which call
ranks waited, and for whom.

limit_in(["Timed out after 601 seconds waiting for clients. 1/2 clients joined."], frames="")
{"LIMITED": "init_process_group(timeout=...)", "AFTER": "10 min 1 s"}
call_in([(2, message), (3, message)], range(4))
{"WAIT": "one", "CALL": "ALLREDUCE 19", "GROUP": "", "SHOWN": "2-3", "ABSENT": "0-1"}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ascendrun.ascend.peer_messages import PeerMessage
from ascendrun.ascend.vocabularies import read_table
from ascendrun.text import Text, listed
from ascendrun.text.format import fold_numbers, format_duration

_SECONDS = {"s": 1.0, "ms": 0.001, "min": 60.0}
_EARLY_CALLS = 10
"""So many calls of a group are before or at the start of training, if they carry one element."""
_SHORT_S = 600.0
"""The limit of NCCL in torch: who set a lower one expected no work of a single rank."""
_NAME, _OF_ALL = re.compile(r"\d+\((?P<name>.+)\)|.*"), ("", "0", "0(default_pg)")
"""The name of a group, and the groups of all ranks: with older versions of torch a number."""


def limit_in(texts: Iterable[str], frames: str, variables: Mapping[str, object] | None = None) -> Mapping[str, str]:
    """Return what set the limit that a text reports (LIMITED), and its value (AFTER, "": unknown); {}: no text does.
    `frames`: of the ranks that waited; `variables`: of their environment."""
    lines, table = tuple(texts), read_table("wait_limits")
    found = [(row, hit) for row in table["limits"] for text in lines for hit in re.finditer(row["message"], text)]
    if not found:
        return {}
    known = {row["set"]: hit for row, hit in found if any(hit.groups())}
    row = found[0][0]
    hit = known.get(row["set"])
    values = ((unit.rstrip("0123456789"), value) for unit, value in hit.groupdict().items() if value) if hit else ()
    given = (variables or {}).get(row.get("variable", ""), "")
    after = next((float(value) * _SECONDS[unit] for unit, value in values), None)
    after = float(str(given)) if after is None and str(given).isdigit() else after
    options = (
        name for pattern, name in table["of_group"].items() if row.get("is_of_group") and re.search(pattern, frames)
    )
    short = {"SHORT": "yes"} if row.get("is_of_group") and after is not None and after < _SHORT_S else {}
    return {"LIMITED": next(options, row["set"]), "AFTER": "" if after is None else format_duration(after), **short}


def calls_in(messages: Iterable[tuple[int, PeerMessage]]) -> Mapping[tuple[str, str, str], set[int]]:
    """Return group, number and operation of each call that watchdogs report, with the ranks that waited. An output
    with this report of several ranks is that of all of them."""
    calls: dict[tuple[str, str, str], set[int]] = {}
    named: dict[tuple[int, object], set[int]] = {}
    for rank, one in messages:
        if one.wait is not None and "op" in one.values:
            call = (one.values.get("group", ""), one.values.get("seq", ""), one.values["op"])
            calls.setdefault(call, set()).add(rank)
            named.setdefault((rank, call), set()).update(map(int, filter(None, [one.values.get("by")])))
            calls[call] |= named[rank, call] if len(named[rank, call]) > 1 else set()
    return calls


def call_in(messages: Iterable[tuple[int, PeerMessage]], ranks: Collection[int]) -> Mapping[str, str]:
    """Return the only call that watchdogs report (CALL), the name of its group (GROUP, "": of all ranks), who reports
    it (SHOWN) and who does not (ABSENT, "": unknown or none), and what it is (WAIT): of `all` ranks; of one element,
    `early` or not (`one`); the `first` of its group; else `many`. {}: none, or several calls."""
    told = tuple(messages)
    calls = [*calls_in(told).items()]
    if len(calls) != 1:
        return {}
    ((group, seq, op), shown) = calls[0]
    found = _NAME.match(group)
    name = "" if found is None or found[0] in _OF_ALL else found["name"] or found[0]
    absent = "" if name else fold_numbers({*ranks} - shown)
    is_one = {one.values["elements"] for _, one in told if "elements" in one.values} == {"1"}
    wait = "first" if seq == "1" else "many"
    if is_one:
        wait = "early" if seq and int(seq) <= _EARLY_CALLS else "one"
    wait = "all" if not (absent or name) and len(shown) > 1 else wait
    call = f"{op} {seq}".strip()
    return {"WAIT": wait, "CALL": call, "GROUP": name, "SHOWN": fold_numbers(shown), "ABSENT": absent}


def report_of(given: Mapping[str, str]) -> list[Text]:
    """Return in which call which ranks waited, and of whom that is not known."""
    name = "all" if given.get("WAIT") == "all" else "group" if given.get("GROUP") else "some"
    values = {key.lower(): given[key] for key in ("CALL", "GROUP", "SHOWN", "ABSENT") if "WAIT" in given}
    return [listed(f"diagnosis.waited-in.{name}", **values)] if values else []


def peers_in(messages: Iterable[tuple[int, PeerMessage]]) -> str:
    """Return whom the messages of ranks that waited name: ranks, else addresses, else how many came; "": none. Each is
    with the rank that wrote it."""
    told = [(rank, message) for rank, message in messages if message.wait is not None]
    ranks = sorted({rank for own, message in told for rank in message.ranks if rank != own})
    hosts = dict.fromkeys(address for _, message in told for address, _ in message.addresses)
    joined = dict.fromkeys("{joined}/{expected}".format_map(one.values) for _, one in told if "joined" in one.values)
    return f"rank {', '.join(map(str, ranks))}" if ranks else ", ".join(hosts or joined)
