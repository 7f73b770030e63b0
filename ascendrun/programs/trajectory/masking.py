"""Which words are hidden for the reader to guess: exactly the asked share, each with its own word as the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.grammars.guide import END
from ascendrun.programs.trajectory.tokens import MASK, SPECIAL, Ids

NEVER_HIDDEN = ("YEAR_", "MONTH_", "DAY_", "HOUR_", "MINUTE_", "SECOND_")
"""Clock words are as good as random; nothing is learned by guessing them."""
AS_MASK, AS_OTHER = 0.8, 0.1
"""Of the hidden words so many become [MASK], so many another word, and the rest stay to be guessed all the same."""


def guessable(vocabulary: Mapping[str, int]) -> NDArray[np.bool_]:
    """By word id."""
    may = np.zeros(len(vocabulary), dtype=bool)
    for word, number in vocabulary.items():
        may[number] = word not in SPECIAL and word != END and not word.startswith(NEVER_HIDDEN)
    return may


def hide_words(
    ids: Ids, may: NDArray[np.bool_], vocabulary: Mapping[str, int], *, rate: float, key: Sequence[int]
) -> tuple[Ids, Ids]:
    """(ids with words hidden, places of those words). Of the guessable words `rate` are hidden, rounded up or down by
    chance so that the rate is true on average too. `key` decides everything."""
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
