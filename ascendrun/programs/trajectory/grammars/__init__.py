"""Grammars that convert a track to tokens: one function for each, by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Callable

from ascendrun.programs.trajectory.grammars.guide import PUBLISHED, compact_words, guide_words, make_words
from ascendrun.programs.trajectory.grammars.motion import motion_words, sized_words
from ascendrun.programs.trajectory.points.tracks import Track
from ascendrun.programs.trajectory.tokens import Words

Grammar = Callable[..., Words]
"""(track, resolution=…) -> Words; a grammar never reads the track's label."""

GRAMMARS: dict[str, Grammar] = {
    "compact": compact_words,
    "motion": motion_words,
    "motion_size": sized_words,
    "guide": guide_words,
    **{name: partial(make_words, cell_words=words) for name, words in PUBLISHED.items()},
}


def as_texts(tracks: Sequence[Track], *, grammar: str, resolution: int) -> list[Words]:
    return [GRAMMARS[grammar](track, resolution=resolution) for track in tracks]
