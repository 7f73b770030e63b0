"""The compact grammar: the region once, the whole motion in a few words, then speed and turn of each point."""

from __future__ import annotations

import numpy as np

from ascendrun.programs.trajectory.grammars.bins import SPEED_EDGES, TURN_EDGES, binned, summary_words, turns
from ascendrun.programs.trajectory.grammars.cells import cell_at, library
from ascendrun.programs.trajectory.points.tracks import Track
from ascendrun.programs.trajectory.tokens import Words

REGION_LEVELS = (1, 2, 3, 4, 5, 6, 7, 8)
"""H3 resolutions that the words name, from 600 km down to 500 m."""


def compact_words(track: Track, *, resolution: int) -> Words:
    """Two words a point. A short text leaves little to learn by heart when only a few thousand tracks are at hand."""
    region = cell_at(np.median(track.lat), np.median(track.lon), resolution)
    cells = tuple(
        f"R{level}_{library().cell_to_parent(region, level)}" for level in REGION_LEVELS if level <= resolution
    )
    points = tuple(
        (binned("S", speed, SPEED_EDGES), binned("T", degrees, TURN_EDGES))
        for speed, degrees in zip(track.sog, turns(track))
    )
    return Words((*cells, *summary_words(track)), points)
