"""Training views of a track: a random segment of it, some inputs and tokens hidden; determined by a key alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.grammars import END, PLACE_DEGREES
from ascendrun.programs.trajectory.points.tracks import FEATURES, PLACE, SIZE
from ascendrun.programs.trajectory.tokens import IS_CELL, MASK, SPECIAL, Encoded, Ids

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
