"""Which ships are for training, which for choosing the model, which for the final word; never one ship in two."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import SPLITS
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
    """The split of a ship: the same on every machine, whatever other ships there are."""
    digest = hashlib.sha256(f"{seed}:{ship}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < test:
        return "test"
    return "val" if place < test + val else "train"


def check_disjoint(parts: Parts) -> None:
    """Raises InvalidDataError when a ship is in two splits: the report would measure memory, not motion."""
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
