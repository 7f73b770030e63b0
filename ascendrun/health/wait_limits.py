"""Which limit ended a wait: the option or variable that sets it, and its value, by messages of libraries; and whom
ranks waited for.

limit_in(["Timed out after 601 seconds waiting for clients. 1/2 clients joined."], frames="")
{"LIMITED": "init_process_group(timeout=...)", "AFTER": "10 min 1 s"}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ascendrun.ascend.peer_messages import PeerMessage
from ascendrun.ascend.vocabularies import read_table
from ascendrun.text.format import format_duration

_SECONDS = {"s": 1.0, "ms": 0.001, "min": 60.0}


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
    return {"LIMITED": next(options, row["set"]), "AFTER": "" if after is None else format_duration(after)}


def peers_in(messages: Iterable[tuple[int, PeerMessage]]) -> str:
    """Return whom the messages of ranks that waited name: ranks, else addresses, else how many came; "": none. Each is
    with the rank that wrote it."""
    told = [(rank, message) for rank, message in messages if message.wait is not None]
    ranks = sorted({rank for own, message in told for rank in message.ranks if rank != own})
    hosts = dict.fromkeys(address for _, message in told for address, _ in message.addresses)
    joined = dict.fromkeys("{joined}/{expected}".format_map(one.values) for _, one in told if "joined" in one.values)
    return f"rank {', '.join(map(str, ranks))}" if ranks else ", ".join(hosts or joined)
