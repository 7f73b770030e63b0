"""Training views of a track: a random segment of it, some tokens masked; determined by a key alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.grammars.guide import END
from ascendrun.programs.trajectory.tokens import MASK, SPECIAL, Encoded, Ids


def augment(sample: Encoded, *, min_points: int, crop: float, hide: float, unknown: int, key: Sequence[int]) -> Ids:
    """Return the sample's ids for this epoch: with probability `crop` a random segment of it, each token replaced by
    `unknown` with probability `hide`. `key` (seed, epoch, sample) determines the result: it is equal on every rank."""
    if crop == 0 and hide == 0:
        return sample.ids()
    rng = np.random.default_rng([2, *key])
    points = sample.points
    if rng.uniform() < crop and len(points) > min_points:
        size = int(rng.integers(min_points, len(points)))
        start = int(rng.integers(0, len(points) - size + 1))
        points = points[start : start + size]
    ids = np.concatenate([sample.head, *points])
    ids[rng.uniform(size=len(ids)) < hide] = unknown
    return ids


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
