"""Assignment of ships to train, val and test, and checks that a good score can only result from how ships move."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import SPLITS
from ascendrun.programs.trajectory.tokens import Words
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


class LabelLeakError(InvalidDataError):
    """The text contains the label, or the same text is in two splits; any score would be meaningless."""


def check_leak(texts: Sequence[Words], labels: Sequence[str]) -> None:
    """Raise LabelLeakError if a token of the texts names a class, or if every class has a separate token.

    In the second case, each class has a token that is in all of its texts and in no other's, so the
    token is the label under another name.
    """
    classes = sorted(set(labels))
    vocabulary = {word for words in texts for word in words.all()}
    class_words = [plain(name) for name in classes if len(plain(name)) > 2]
    in_plain = {word: plain(word) for word in vocabulary}
    named = sorted(word for word, letters in in_plain.items() if any(name in letters for name in class_words))
    if named:
        raise LabelLeakError(
            "program.leak-named",
            "the text names the class: {tokens}; class names must not be in the text",
            tokens=list(named[:5]),
        )
    own = {name: own_words(texts, labels, name) for name in classes}
    if len(classes) > 1 and min(labels.count(name) for name in classes) > 1 and all(own.values()):
        shown = ", ".join(f"{sorted(words)[0]} = {name}" for name, words in own.items())
        raise LabelLeakError(
            "program.leak-token",
            "one token identifies each class: {shown}; a column derived from the class is in the text",
            shown=shown,
        )


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def own_words(texts: Sequence[Words], labels: Sequence[str], name: str) -> set[str]:
    """Return the tokens in every text of this class and in no text of another."""
    inside = [set(words.all()) for words, label in zip(texts, labels) if label == name]
    common: set[str] = set.intersection(*inside)
    for words, label in zip(texts, labels):
        if not common:
            break
        if label != name:
            common -= set(words.all())
    return common


def check_same_segments(parts: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Raise LabelLeakError if two splits share a fingerprint, as for one track under two names in copied files.
    `parts`: (name, fingerprint) of every segment by split."""
    home: dict[str, tuple[str, str]] = {}
    shared: list[Text] = []
    for split, rows in parts.items():
        for name, mark in rows:
            first_split, first = home.setdefault(mark, (split, name))
            if first_split != split:
                shared.append(
                    Text(
                        "program.copied-segment",
                        "{first} in {first_split} = {second} in {second_split}",
                        first=first,
                        first_split=first_split,
                        second=name,
                        second_split=split,
                    )
                )
    if shared:
        raise LabelLeakError(
            "program.leak-copies",
            "{count:plural segment segments} in two splits under other names, such as {example}\n"
            "hint: remove the copies, or give both the same ship",
            count=len(shared),
            example=shared[0],
        )


def fingerprint(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
