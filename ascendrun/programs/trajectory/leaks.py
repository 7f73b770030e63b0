"""What gives away the class of a track without its motion: class names, tokens that are a label under another name,
copies of a segment in two splits. A model that reads any of it scores well on its test ships and nowhere else.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, exp, lgamma

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.tokens import Words
from ascendrun.text import Text, listed

OWN_F1 = {1: 0.95, 2: 0.98}
"""F1, by ship, from which a token, or a pair of them, is taken for the class: one wrong row of 120 leaves it above. Of
thousands of pairs, some of size and speed come close to a class."""
CHANCE = 1e-3
"""Expected number of tokens that are so by chance, above which nothing is said: with few ships some always are."""
TRIED = 64
"""Tokens of a class, the rarest elsewhere, of which each and all pairs are tried."""
ROWS = 4096


class LabelLeakError(InvalidDataError):
    """The text contains the label, or the same text is in two splits; any score would be meaningless."""


def check_leak(
    texts: Sequence[Words], labels: Sequence[str], ships: Sequence[str], *, of_points: bool = False
) -> list[Text]:
    """Return the classes that a token or a pair of tokens identifies alone, each with these and their F1 by ship.

    `of_points`: the tokens were made of points, which have no class, so that only sizes and places could give it away:
    nothing is refused. Else raises LabelLeakError if a token names a class, or if tokens identify all classes but at
    most one: the label is in the text under another name.
    """
    rows = [frozenset(words.all()) for words in texts]
    classes = sorted(set(labels))
    found = identified(rows, labels, ships)
    if of_points:
        return found
    class_words = [plain(name) for name in classes if len(plain(name)) > 2 and not plain(name).isdigit()]
    in_plain = {word: plain(word) for word in frozenset().union(*rows)}
    named = sorted(word for word, letters in in_plain.items() if any(name in letters for name in class_words))
    if named:
        raise LabelLeakError(listed("program.leak-named", tokens=list(named[:5])))
    if len(found) >= max(2, len(classes) - 1):
        raise LabelLeakError(listed("program.leak-token", found=found))
    return found


def identified(rows: Sequence[frozenset[str]], labels: Sequence[str], ships: Sequence[str]) -> list[Text]:
    """Return the best token, else pair of tokens, of each class of OWN_F1. Each ship counts once, by the share of its
    pieces with the tokens."""
    pieces = Counter(ships)
    weights = np.array([1 / pieces[ship] for ship in ships])
    inside: dict[str, Counter[str]] = {name: Counter() for name in labels}
    for row, label, weight in zip(rows, labels, weights):
        inside[label].update(dict.fromkeys(row, weight))  # of shares
    everywhere: Counter[str] = sum(inside.values(), Counter())
    found = []
    for name, hits in sorted(inside.items()):
        is_inside = np.array([label == name for label in labels])
        size = float(is_inside @ weights)
        least = size * OWN_F1[1] / (2 - OWN_F1[1])  # of hits, else no number of calls has this F1
        words = sorted((word for word in hits if hits[word] > least - 1e-9), key=lambda each: (everywhere[each], each))
        for both, hit, calls in in_pairs(words[:TRIED], rows, is_inside, weights):
            f1, tries = 2 * hit / (size + calls), len(everywhere) ** len(both)
            is_own = f1 >= OWN_F1[len(both)]
            if is_own and tries * by_chance(len(pieces), round(size), round(calls), OWN_F1[len(both)]) < CHANCE:
                values = {"tokens": list(both), "name": name, "f1": round(f1, 4)}
                found.append(listed("program.identified", **values))
                break
    return found


def in_pairs(
    words: Sequence[str], rows: Sequence[frozenset[str]], is_inside: NDArray[np.bool_], weights: NDArray[np.float64]
) -> list[tuple[tuple[str, ...], float, float]]:
    """Return each token and pair of tokens, the best first, with the ships of the class and all ships that have it."""
    inside: NDArray[np.float64] = np.zeros((len(words), len(words)))
    everywhere = inside.copy()
    for start in range(0, len(rows) if words else 0, ROWS):
        part = slice(start, start + ROWS)
        has = np.array([[word in row for word in words] for row in rows[part]], dtype=np.float64)
        weighted = has.T * weights[part]
        everywhere += weighted @ has
        inside += (weighted * is_inside[part]) @ has
    found = [
        (tuple(dict.fromkeys((words[i], words[j]))), float(inside[i, j]), float(everywhere[i, j]))
        for i in range(len(words))
        for j in range(i + 1)
    ]
    size = float(is_inside @ weights)
    return sorted(found, key=lambda each: (len(each[0]), -each[1] / (size + each[2])))


def by_chance(ships: int, size: int, calls: int, f1: float) -> float:
    """Return the probability that `calls` ships drawn at random are a class of `size` of all ships with this F1."""

    def ways(number: int, chosen: int) -> float:  # logarithm
        return lgamma(number + 1) - lgamma(chosen + 1) - lgamma(number - chosen + 1)

    hits = range(max(ceil(f1 * (size + calls) / 2 - 1e-9), size + calls - ships), min(size, calls) + 1)
    return sum(exp(ways(size, hit) + ways(ships - size, calls - hit) - ways(ships, calls)) for hit in hits)


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


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
                    listed(
                        "program.copied-segment", first=first, first_split=first_split, second=name, second_split=split
                    )
                )
    if shared:
        raise LabelLeakError(listed("program.leak-copies", count=len(shared), example=shared[0]))


def fingerprint(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
