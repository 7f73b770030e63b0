"""Tokens and their ids: the text of a track, the vocabulary of many, a track as numbers, and its views in training.

A view is a random segment, some inputs and tokens hidden; it is determined by a key alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import FEATURES, PLACE, SIZE
from ascendrun.text import Text, listed

Ids = NDArray[np.int64]
Values = NDArray[np.float32]

END = "POINT_END"
PLACE_DEGREES = tuple(8.0 / 4**level for level in range(7))
"""Cell sizes from coarse to fine, down to 220 m. A cell without enough training ships is left out, so the next coarser
one remains."""
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
        raise InvalidDataError(listed("program.unknown-tokens", model=str(model), share=share, least=LEAST_KNOWN))
    if share < MOSTLY_KNOWN:
        return listed("program.some-unknown-tokens", model=str(model), share=share)
    return None


LEVELS = len(PLACE_DEGREES)
KNOWN_DEGREES = 2.0
"""Size of a cell whose places are known if training has ships in it."""


@dataclass(frozen=True)
class Hiding:
    """How often training hides an input. `place`: all cells below a random level; `size`: length and width; `token`:
    each token; `crop`: all but a random segment of at least `min_points` points."""

    place: float = 0.0
    size: float = 0.0
    token: float = 0.0
    crop: float = 0.0
    min_points: int = 2


@dataclass(frozen=True)
class Groups:
    """The input that each token is part of, by token id: a level of the place from 1, -1: the size, 0: neither."""

    of: NDArray[np.int64]

    @staticmethod
    def make(vocabulary: Mapping[str, int]) -> Groups:
        of = np.zeros(len(vocabulary), dtype=np.int64)
        for word, number in vocabulary.items():
            cell = IS_CELL.match(word)
            of[number] = int(cell["level"]) + 1 if cell else -1 if word.rsplit("_", 1)[0] in SIZE else 0
        return Groups(of)

    def known_places(self) -> NDArray[np.int64]:
        """Return the ids of the cells of at most KNOWN_DEGREES."""
        return np.flatnonzero(self.of > PLACE_DEGREES.index(KNOWN_DEGREES))

    def without(self, sample: Encoded, *, levels: int, has_size: bool) -> Encoded:
        """Return the sample with so many levels of its place, with or without its size, as if it had no more."""
        group, values = self.of[sample.head], sample.values.copy()
        keep = (group <= levels) & (has_size | (group >= 0))
        if len(values):
            hidden = [*(() if levels else PLACE), *(() if has_size else SIZE)]
            values[[FEATURES.index(name) for name in hidden]] = np.nan
        return replace(sample, head=sample.head[keep], values=values)


def augment(sample: Encoded, how: Hiding, groups: Groups, *, unknown: int, key: Sequence[int]) -> Encoded:
    """Return the sample as training sees it in this epoch; a hidden token becomes `unknown`, a hidden place or size is
    left out. `key` (seed, epoch, sample) determines the result: it is equal on every rank."""
    rng = np.random.default_rng([2, *key])
    points = sample.points
    if rng.uniform() < how.crop and len(points) > how.min_points:
        size = int(rng.integers(how.min_points, len(points)))
        start = int(rng.integers(0, len(points) - size + 1))
        points = points[start : start + size]
    levels = int(rng.integers(0, LEVELS)) if rng.uniform() < how.place else LEVELS
    seen = groups.without(replace(sample, points=points), levels=levels, has_size=rng.uniform() >= how.size)
    if not how.token:
        return seen
    return replace(
        seen,
        head=np.where(rng.uniform(size=len(seen.head)) < how.token, unknown, seen.head),
        points=tuple(np.where(rng.uniform(size=len(each)) < how.token, unknown, each) for each in points),
    )


NEVER_HIDDEN = ("YEAR_", "MONTH_", "DAY_", "HOUR_", "MINUTE_", "SECOND_")
"""Clock tokens are nearly random; predicting them teaches the model nothing."""
AS_MASK, AS_OTHER = 0.8, 0.1
"""Fractions of the selected tokens that become [MASK] or another token; the rest stay, and are predicted too."""


def guessable(vocabulary: Mapping[str, int]) -> NDArray[np.bool_]:
    """Return whether a token may be masked, by token id."""
    may = np.zeros(len(vocabulary), dtype=bool)
    for word, number in vocabulary.items():
        may[number] = word not in SPECIAL and word != END and not word.startswith(NEVER_HIDDEN)
    return may


def hide_words(
    ids: Ids, may: NDArray[np.bool_], vocabulary: Mapping[str, int], *, rate: float, key: Sequence[int]
) -> tuple[Ids, Ids]:
    """Return (ids with masked tokens, positions of those tokens). A fraction `rate` of the maskable tokens is masked,
    rounded randomly so that its mean is exact. `key` determines the result."""
    rng = np.random.default_rng([4, *key])
    open_places = np.flatnonzero(may[ids])
    count = int(rate * len(open_places) + rng.uniform())
    places = np.sort(rng.permutation(open_places)[:count])
    hidden = ids.copy()
    draw = rng.uniform(size=len(places))
    hidden[places[draw < AS_MASK]] = vocabulary[MASK]
    other = places[(draw >= AS_MASK) & (draw < AS_MASK + AS_OTHER)]
    hidden[other] = rng.choice(np.flatnonzero(may), size=len(other))
    return hidden, places
