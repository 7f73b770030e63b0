"""Assignment of ships to train, val and test, and what a split cannot support."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import SPLITS
from ascendrun.text import Text


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
        raise InvalidDataError(
            "program.unknown-split",
            "the split column of the data has {found}; expected {known}\n"
            "hint: rename them, or set --use_split_column=false",
            found=list(strange[:8]),
            known=list(SPLITS),
        )
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
            "program.empty-split",
            "nothing in split {splits} ({ships} ships in total)\n"
            "hint: add ships, raise --val_size and --test_size, or set --split=segment "
            "to try the program (leaky: its scores are not valid for other ships)",
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


def fold_ships(records: Sequence[Any], *, folds: int, seed: int) -> list[frozenset[str]]:
    """Return the ships of each fold: those of each class are dealt in turn, in the order of a hash."""
    kind = {record.ship: str(record.label) for record in reversed(records)}
    order = sorted(kind, key=lambda ship: (kind[ship], hashlib.sha256(f"{seed}:fold:{ship}".encode()).digest()))
    return [frozenset(order[i::folds]) for i in range(folds)]


LEAKY = Text(
    "program.leaky-split",
    "leaky: split by segment, so ships are in several splits; the scores are not valid for other ships",
)
LEAST_SHIPS = 30
"""Ships below which a test split says little: an interval is then as wide as the differences of interest."""
DOMINATING = 0.2


def doubts(parts: Mapping[str, Sequence[Any]]) -> list[Text]:
    """Return what a split cannot support: few test ships, classes without any, a ship with many of the pieces."""
    found = []
    ships = {name: {piece.ship for piece in parts[name]} for name in SPLITS}
    if len(ships["test"]) < LEAST_SHIPS:
        found.append(
            Text(
                "program.few-test-ships",
                "the test split has {ships:plural ship ships}; below {least} the scores are hardly known",
                ships=len(ships["test"]),
                least=LEAST_SHIPS,
            )
        )
    classes = {piece.label for piece in parts["train"]}
    for name in ("val", "test"):
        absent = sorted(map(str, classes - {piece.label for piece in parts[name]}))
        if absent:
            found.append(
                Text("program.class-without-ships", "no {split} ship of class {names}", split=name, names=absent)
            )
    for name in SPLITS:
        ship, count = Counter(piece.ship for piece in parts[name]).most_common(1)[0]
        share = count / len(parts[name])
        if share > DOMINATING and len(ships[name]) > 1:
            found.append(
                Text(
                    "program.ship-dominates",
                    "ship {ship} has {share:percent} of the pieces of split {split} ({count} of {pieces})",
                    ship=ship,
                    share=share,
                    split=name,
                    count=count,
                    pieces=len(parts[name]),
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
            "program.ship-in-two-splits",
            "{count:plural ship ships} in two splits, such as {ship} in {first} and {second}\n"
            "hint: fix the split column, or set --use_split_column=false",
            count=len(shared),
            ship=ship,
            first=one,
            second=other,
        )
