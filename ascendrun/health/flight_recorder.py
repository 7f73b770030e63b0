"""Dumps of torch's and torch_npu's flight recorder: the last collectives of each rank, and where ranks differ.

torch writes them when its watchdog sees a timeout, as a pickle or as JSON; that torch_npu writes the same form is not
verified. They are read without torch, and without running what a pickle names.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ascendrun.core.dataclass import dataclass
from ascendrun.text.format import numbers_in

MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Recorded:
    """One collective, or message to one rank (`is_p2p`). `group`: as in torch's logs, NUMBER(DESCRIPTION); `members`:
    its ranks, (): not stated. `state`: scheduled, started or completed; None: not stated. `sizes`: shapes of the inputs
    and of the outputs. `frame`: the innermost frame of the program outside torch, as FILE:LINE; None: not recorded."""

    group: str
    seq: int
    op: str
    state: str | None
    sizes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    is_p2p: bool = False
    frame: str | None = None
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class FlightRecording:
    """`collectives`: the oldest first. `last`: by group id the last sequence numbers that were enqueued, started and
    completed, None inside: none."""

    version: str | None
    collectives: tuple[Recorded, ...]
    last: Mapping[str, tuple[int | None, int | None, int | None]]


class _Plain(pickle.Unpickler):
    """Numbers, texts, lists and dictionaries only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_dump(data: bytes) -> FlightRecording | None:
    """Return the recording; None: it is truncated, too large, or no dump. Never raises."""
    if len(data) > MOST_BYTES:
        return None
    try:
        raw = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        groups = raw.get("pg_config") or {}
        groups = groups if "" not in groups else {**groups, "0": groups[""]}  # the first group may lack its name there
        entries = tuple(_entry(one, groups) for one in raw.get("entries") or ())
        last = {str(group): _last(status) for group, status in (raw.get("pg_status") or {}).items()}
        return FlightRecording(str(raw["version"]) if "version" in raw else None, entries, last)
    except Exception:  # a damaged pickle raises anything
        return None


def _entry(raw: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> Recorded:
    is_p2p = bool(raw.get("is_p2p"))
    name, described = (*raw.get("process_group", ("", "")), "", "")[:2]
    return Recorded(
        group=f"{name}({described})" if described else str(name),
        seq=int(raw["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        op=str(raw["profiling_name"]),
        state=raw.get("state"),
        sizes=(_shapes(raw.get("input_sizes")), _shapes(raw.get("output_sizes"))),
        is_p2p=is_p2p,
        frame=next(map(_place, filter(_is_of_program, raw.get("frames") or ())), None),
        members=tuple(numbers_in(str(groups.get(str(name), {}).get("ranks", "")))),
    )


def _shapes(raw: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, shape)) for shape in raw or ())


def _is_of_program(frame: Mapping[str, Any]) -> bool:
    return not any(part in str(frame["filename"]) for part in ("/torch/", "/torch_npu/"))


def _place(frame: Mapping[str, Any]) -> str:
    return f"{frame['filename']}:{frame['line']}"


def _last(status: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    numbers = (int(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "started", "completed"))
    enqueued, started, completed = (number if number >= 0 else None for number in numbers)
    return enqueued, started, completed


# ---------------------------------------------------------------- where the ranks of a group differ


class Difference(NamedTuple):
    """A collective at which the few `ranks` differ from all others of their group. `field`: op, sizes, or seq: they had
    not called it. `own`, `theirs`: of the few and of the others, None: not called."""

    ranks: tuple[int, ...]
    field: str
    own: Recorded | None
    theirs: Recorded


_EQUAL_SIZES = re.compile(r"all_?reduce\b|broadcast|all_?gather_into|_allgather_base|reduce_scatter_tensor|:reduce\b")
"""Collectives that every rank of a group calls with equal sizes."""


def first_difference(recordings: Mapping[int, Sequence[Recorded]]) -> Difference | None:
    """Return where the fewer ranks called another collective or other sizes, or else were behind the others of a group
    although no other group kept them; None: the ranks do not differ, or it is not known which are the fewer."""
    groups: dict[str, dict[int, dict[int, Recorded]]] = {}
    for rank, entries in recordings.items():
        for one in (one for one in entries if not one.is_p2p):
            groups.setdefault(one.group, {}).setdefault(rank, {})[one.seq] = one
    shared = [rows for rows in groups.values() if len(rows) > 1]
    found = next((one for rows in shared for one in _other_calls(rows)), None)
    if found is not None:
        return found
    late = [(rows, one) for rows in shared for one in (_behind(rows),) if one is not None]
    kept = {rank for rows, one in late for rank in rows if rank not in one.ranks}
    first = (one._replace(ranks=tuple(rank for rank in one.ranks if rank not in kept)) for _, one in late)
    return next((one for one in first if one.ranks), None)


def _other_calls(rows: Mapping[int, Mapping[int, Recorded]]) -> Iterator[Difference]:
    """Yield the collectives that all ranks called, and some in another way; the buffer of a rank has its last ones."""
    for seq in sorted(set.intersection(*({*entries} for entries in rows.values()))):
        calls = {rank: entries[seq] for rank, entries in rows.items()}
        for field in ("op", "sizes"):
            values: dict[int, Hashable] = {rank: getattr(one, field) for rank, one in calls.items()}
            counts = Counter(values.values()).most_common()
            if len(counts) > 1 and counts[0][1] > len(rows) / 2 and (field == "op" or _is_equal(calls)):
                few = tuple(rank for rank, value in values.items() if value != counts[0][0])
                theirs = next(one for rank, one in calls.items() if rank not in few)
                yield Difference(few, field, calls[few[0]], theirs)


def _is_equal(calls: Mapping[int, Recorded]) -> bool:
    return all(_EQUAL_SIZES.search(one.op) for one in calls.values())


def _behind(rows: Mapping[int, Mapping[int, Recorded]]) -> Difference | None:
    """Return the ranks that called fewer collectives than the others, which wait for them."""
    last = {rank: max(entries) for rank, entries in rows.items()}
    least = min(last.values())
    more = (one for entries in rows.values() for one in entries.values() if one.seq > least)
    waits = min((one for one in more if one.state != "completed"), key=lambda one: one.seq, default=None)
    few = tuple(rank for rank in rows if waits is not None and last[rank] < waits.seq)
    return Difference(few, "seq", None, waits) if waits is not None and 2 * len(few) <= len(rows) else None
