"""Assignment of ships to the splits train, val and test; a ship is never in two splits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import SPLITS
from ascendrun.programs.trajectory.records import Record

Parts = dict[str, list[Record]]


def split_records(records: Sequence[Record], *, val: float, test: float, seed: int, use_column: bool = True) -> Parts:
    """Return records by split. The data's own split is used if every track has it; else a hash of the ship selects it.

    Raises InvalidDataError if a ship is in two splits, a split is empty, or the data has an unknown split.
    """
    own = use_column and all(record.split for record in records)
    strange = sorted({str(record.split) for record in records} - set(SPLITS)) if own else []
    if strange:
        raise InvalidDataError(
            "program.unknown-split",
            "the split column of the data has {found}; expected {known}\n"
            "hint: rename them, or set --use_split_column=false",
            found=list(strange[:8]),
            known=list(SPLITS),
        )
    parts: Parts = {name: [] for name in SPLITS}
    for record in records:
        name = record.split if own and record.split else deal(record.ship, val=val, test=test, seed=seed)
        parts[name].append(record)
    check_disjoint(parts)
    empty = [name for name in SPLITS if not parts[name]]
    if empty:
        raise InvalidDataError(
            "program.empty-split",
            "no ship in split {splits} ({ships} ships in total)\nhint: add ships, or raise --val_size and --test_size",
            splits=list(empty),
            ships=len({record.ship for record in records}),
        )
    return parts


def deal(ship: str, *, val: float, test: float, seed: int) -> str:
    """Return the split of a ship: the same on every machine, independent of other ships."""
    digest = hashlib.sha256(f"{seed}:{ship}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < test:
        return "test"
    return "val" if place < test + val else "train"


def check_disjoint(parts: Parts) -> None:
    """Raise InvalidDataError if a ship is in two splits: the report would measure memory, not motion."""
    homes: dict[str, str] = {}
    shared: list[tuple[str, str, str]] = []
    for name, records in parts.items():
        for ship in {record.ship for record in records}:
            if homes.setdefault(ship, name) != name:
                shared.append((ship, homes[ship], name))
    if shared:
        ship, one, other = shared[0]
        raise InvalidDataError(
            "program.ship-in-two-splits",
            "{count:plural ship ships} in two splits, such as {ship} in {first} and {second}\n"
            "hint: fix the split column, or set --use_split_column=false",
            count=len(shared),
            ship=ship,
            first=one,
            second=other,
        )
