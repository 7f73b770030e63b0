"""Tokens and their ids: the text of a track, the vocabulary of many, a track as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

PAD, UNKNOWN, MASK = "[PAD]", "[UNK]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, MASK)


@dataclass(frozen=True)
class Words:
    """The text of one track: some tokens about the complete track, then the tokens of each point."""

    head: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]

    def all(self) -> list[str]:
        return [*self.head, *(word for point in self.points for word in point)]

    def text(self) -> str:
        return " ".join(self.all())


def make_vocabulary(texts: Iterable[Words], *, min_count: int) -> dict[str, int]:
    """Return ids of the tokens that are in at least `min_count` tracks; SPECIAL come first. Same texts, same ids.

    Use it on training texts only: a token that is only in test ships must stay unknown.
    """
    counts: dict[str, int] = {}
    for words in texts:
        for word in set(words.all()):
            counts[word] = counts.get(word, 0) + 1
    known = sorted(word for word, count in counts.items() if count >= min_count)
    return {word: i for i, word in enumerate([*SPECIAL, *known])}


@dataclass(frozen=True)
class Encoded:
    """One track as ids; `points`: one array per point; `label` -1: unknown."""

    head: Ids
    points: tuple[Ids, ...]
    label: int

    def __len__(self) -> int:
        return len(self.head) + sum(map(len, self.points))

    def ids(self) -> Ids:
        return np.concatenate([self.head, *self.points])


def encode(words: Words, vocabulary: Mapping[str, int], label: int) -> Encoded:
    unknown = vocabulary[UNKNOWN]
    head = np.array([vocabulary.get(word, unknown) for word in words.head], dtype=np.int64)
    points = tuple(
        np.array([vocabulary.get(word, unknown) for word in point], dtype=np.int64) for point in words.points
    )
    return Encoded(head, points, label)


def label_ids(labels: Sequence[str]) -> dict[str, int]:
    """Return class ids by name, sorted by name."""
    return {name: i for i, name in enumerate(sorted(set(labels)))}
