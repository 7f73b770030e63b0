"""Tokens and their ids: the text of a track, the vocabulary of many, a track as numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import FEATURES
from ascendrun.text import Text

Ids = NDArray[np.int64]
Values = NDArray[np.float32]

PAD, UNKNOWN, MASK = "[PAD]", "[UNK]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, MASK)
IS_CELL = re.compile(r"[FG](?P<level>[0-9])_")
"""Tokens of a place, coarse to fine."""
LEAST_KNOWN, MOSTLY_KNOWN = 0.5, 0.9
"""Shares of known tokens below which a model refuses data, and below which it warns."""


@dataclass(frozen=True)
class Words:
    """The text of one track: some tokens about the complete track, then the tokens of each point. `values`: its
    summary, None: unknown; empty: the text has none."""

    head: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]
    values: tuple[float | None, ...] = ()

    def all(self) -> list[str]:
        return [*self.head, *(word for point in self.points for word in point)]

    def text(self) -> str:
        """Return the tokens, then each known number of the summary as NAME=VALUE."""
        numbers = [f"{name}={value:.8g}" for name, value in zip(FEATURES, self.values) if value is not None]
        return " ".join([*self.all(), *numbers])


def make_vocabulary(texts: Iterable[tuple[str, Words]], *, min_count: int) -> dict[str, int]:
    """Return ids of the tokens that are in the texts of at least `min_count` ships; SPECIAL come first. `texts`: ship
    and text of each track. Same texts, same ids.

    Use it on training texts only: a token that is only in test ships must stay unknown.
    """
    ships: dict[str, set[str]] = {}
    for ship, words in texts:
        for word in words.all():
            ships.setdefault(word, set()).add(ship)
    known = sorted(word for word, of in ships.items() if len(of) >= min_count)
    return {word: i for i, word in enumerate([*SPECIAL, *known])}


@dataclass(frozen=True)
class Encoded:
    """One track as ids; `points`: one array per point; `label` -1: unknown. `values`: its summary, NaN: unknown."""

    head: Ids
    points: tuple[Ids, ...]
    label: int
    values: Values = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    def __len__(self) -> int:
        return len(self.head) + sum(map(len, self.points))

    def ids(self) -> Ids:
        return np.concatenate([self.head, *self.points])


def encode(words: Words, vocabulary: Mapping[str, int], label: int) -> Encoded:
    """Return the ids of a text. A cell that training does not know is left out: the next coarser one remains."""
    unknown = vocabulary[UNKNOWN]

    def known(part: Sequence[str]) -> Ids:
        kept = [vocabulary.get(word, unknown) for word in part if word in vocabulary or not IS_CELL.match(word)]
        return np.array(kept, dtype=np.int64)

    return Encoded(known(words.head), tuple(map(known, words.points)), label, np.array(words.values, dtype=np.float32))


def known_share(samples: Sequence[Encoded], vocabulary: Mapping[str, int], known: Collection[str]) -> float:
    """Return the share of the tokens that are in `known`, a vocabulary; a cell that was left out does not count."""
    is_known = np.array([word in known and word != UNKNOWN for word in vocabulary])
    ids = np.concatenate([np.empty(0, dtype=np.int64), *(sample.ids() for sample in samples)])
    return float(is_known[ids].mean()) if len(ids) else 0.0


def check_known(
    samples: Sequence[Encoded], vocabulary: Mapping[str, int], known: Collection[str], *, model: object
) -> Text | None:
    """Return a warning if a model with the vocabulary `known` has never seen some of the tokens; None: it has.

    Raises InvalidDataError if it has never seen most of them: its output would have no meaning.
    """
    share = known_share(samples, vocabulary, known)
    if share < LEAST_KNOWN:
        raise InvalidDataError(
            "program.unknown-tokens",
            "{model} knows {share:percent} of the tokens of this data; expected at least {least:percent}\n"
            "hint: use data of the same form and grammar as in its training, or train a model on this data",
            model=str(model),
            share=share,
            least=LEAST_KNOWN,
        )
    if share < MOSTLY_KNOWN:
        return Text(
            "program.some-unknown-tokens",
            "{model} knows {share:percent} of the tokens of this data; its results may be worse than in training",
            model=str(model),
            share=share,
        )
    return None


def label_ids(labels: Sequence[str]) -> dict[str, int]:
    """Return class ids by name, sorted by name."""
    return {name: i for i, name in enumerate(sorted(set(labels)))}
