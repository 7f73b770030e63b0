"""Assignment of ships to train, val and test, and what a split cannot support."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import SPLITS
from ascendrun.text import Text, listed


def split_records(
    records: Sequence[Any],
    *,
    val: float,
    test: float,
    seed: int,
    use_column: bool = True,
    folds: int = 0,
    fold: int = 0,
    by_ship: bool = True,
) -> dict[str, list[Any]]:
    """Return tracks or texts by split. Their own split is used if each has it; else a hash of the ship selects it.
    With `folds`, the ships of one fold are the test ships, whatever the data says. Without `by_ship`, a hash of each
    piece selects its split: the scores are those of ships that the model knows.

    Raises InvalidDataError if a ship is in two splits, a split is empty, or the data has an unknown split.
    """
    tested = fold_ships(records, folds=folds, seed=seed)[fold] if folds else frozenset()
    own = use_column and not folds and all(record.split for record in records)
    strange = sorted({str(record.split) for record in records} - set(SPLITS)) if own else []
    if strange:
        raise InvalidDataError(listed("program.unknown-split", found=list(strange[:8]), known=list(SPLITS)))
    parts: dict[str, list[Any]] = {name: [] for name in SPLITS}
    for record in records:
        if record.ship in tested:
            name = "test"
        elif own:
            name = str(record.split)
        else:
            key = record.ship if by_ship else record.id
            name = deal(key, val=val, test=0.0 if folds else test, seed=seed)
        parts[name].append(record)
    if by_ship or own:
        check_disjoint(parts)
    empty = [name for name in SPLITS if not parts[name]]
    if empty:
        raise InvalidDataError(
            listed("program.empty-split", splits=list(empty), ships=len({record.ship for record in records}))
        )
    return parts


def deal(ship: str, *, val: float, test: float, seed: int) -> str:
    """Return the split of a ship: the same on every machine, independent of other ships."""
    digest = hashlib.sha256(f"{seed}:{ship}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < test:
        return "test"
    return "val" if place < test + val else "train"


def fold_ships(records: Sequence[Any], *, folds: int, seed: int) -> list[frozenset[str]]:
    """Return the ships of each fold: those of each class are dealt in turn, in the order of a hash."""
    kind = {record.ship: str(record.label) for record in reversed(records)}
    order = sorted(kind, key=lambda ship: (kind[ship], hashlib.sha256(f"{seed}:fold:{ship}".encode()).digest()))
    return [frozenset(order[i::folds]) for i in range(folds)]


LEAKY = listed("program.leaky-split")
LEAST_SHIPS = 30
"""Ships below which a test split says little: an interval is then as wide as the differences of interest."""
DOMINATING = 0.2


def doubts(parts: Mapping[str, Sequence[Any]]) -> list[Text]:
    """Return what a split cannot support: few test ships, classes without any, a ship with many of the pieces."""
    found = []
    ships = {name: {piece.ship for piece in parts[name]} for name in SPLITS}
    if len(ships["test"]) < LEAST_SHIPS:
        found.append(listed("program.few-test-ships", ships=len(ships["test"]), least=LEAST_SHIPS))
    classes = {piece.label for name in SPLITS for piece in parts[name]}
    for name in SPLITS:
        absent = sorted(map(str, classes - {piece.label for piece in parts[name]}))
        if absent:
            found.append(listed("program.class-without-ships", split=name, names=absent))
    for name in SPLITS:
        ship, count = Counter(piece.ship for piece in parts[name]).most_common(1)[0]
        share = count / len(parts[name])
        if share > DOMINATING and len(ships[name]) > 1:
            found.append(
                listed(
                    "program.ship-dominates", ship=ship, share=share, split=name, count=count, pieces=len(parts[name])
                )
            )
    return found


def check_disjoint(parts: Mapping[str, Sequence[Any]]) -> None:
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
            listed("program.ship-in-two-splits", count=len(shared), ship=ship, first=one, second=other)
        )
