"""Which ships are for training, which for choosing the model, which for the final word; never one ship in two."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ascendrun.programs.trajectory.points.tracks import SPLITS, InvalidDataError
from ascendrun.programs.trajectory.records import Record

Parts = dict[str, list[Record]]


def split_records(records: Sequence[Record], *, val: float, test: float, seed: int, use_column: bool = True) -> Parts:
    """Records by split name. The data's own split is kept where every track has one; else ships are dealt by hash.

    Raises InvalidDataError when one ship is in two splits, a split stays empty, or the data names another one.
    """
    own = use_column and all(record.split for record in records)
    strange = sorted({str(record.split) for record in records} - set(SPLITS)) if own else []
    if strange:
        raise InvalidDataError(
            f"the data's split column says {', '.join(strange[:8])}; {', '.join(SPLITS)} are known: rename "
            "them, or use --use_split_column=false"
        )
    parts: Parts = {name: [] for name in SPLITS}
    for record in records:
        name = record.split if own and record.split else deal(record.ship, val=val, test=test, seed=seed)
        parts[name].append(record)
    check_disjoint(parts)
    empty = [name for name in SPLITS if not parts[name]]
    if empty:
        raise InvalidDataError(
            f"no ship in split {', '.join(empty)} ({len({record.ship for record in records})} ships in all); "
            "give more ships or larger --val_size and --test_size"
        )
    return parts


def deal(ship: str, *, val: float, test: float, seed: int) -> str:
    """The split of a ship: the same on every machine, whatever other ships there are."""
    digest = hashlib.sha256(f"{seed}:{ship}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < test:
        return "test"
    return "val" if place < test + val else "train"


def check_disjoint(parts: Parts) -> None:
    """Raises InvalidDataError when a ship stands in two splits: the report would be about memory, not about motion."""
    homes: dict[str, str] = {}
    shared: list[tuple[str, str, str]] = []
    for name, records in parts.items():
        for ship in {record.ship for record in records}:
            if homes.setdefault(ship, name) != name:
                shared.append((ship, homes[ship], name))
    if shared:
        ship, one, other = shared[0]
        raise InvalidDataError(
            f"{len(shared)} ship(s) stand in two splits, such as {ship} in {one} and {other}; "
            "mend the split column or use --use_split_column=false"
        )
