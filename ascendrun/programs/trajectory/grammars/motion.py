"""The motion grammar: position in two nested grids, the total motion and heading as tokens, then each point relative to
the previous point. It requires no library, and uses headings if the data has them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timezone

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.grammars.bins import (
    MEAN_TURN_EDGES,
    NET_EDGES,
    SHARE_EDGES,
    SPEED_EDGES,
    TURN_EDGES,
    between,
    binned,
    given,
    summary_words,
    turns,
)
from ascendrun.programs.trajectory.points.tracks import METRES_PER_DEGREE, Floats, Track
from ascendrun.programs.trajectory.tokens import Words

GRID_LEVELS = 7
COARSEST_DEGREES = 8.0
"""Cell size of level 0; each level's cells are a quarter as wide as the previous: 8 degrees, 2, … down to 220 m."""
STILL_KNOTS = 0.5
DRIFT_EDGES = (2.0, 5.0, 10.0, 20.0, 45.0, 90.0, 135.0)
LENGTH_EDGES = (
    10.0, 15.0, 20.0, 23.0, 26.0, 30.0, 35.0, 42.0, 50.0, 65.0, 80.0, 100.0, 130.0, 160.0, 180.0, 195.0,
    210.0, 235.0, 260.0, 300.0,
)  # fmt: skip
WIDTH_EDGES = (4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0, 16.0, 18.0, 20.0, 24.0, 28.0, 31.0, 33.0, 40.0)
STAY_EDGES = (60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, 14400.0)
PLACE_EDGES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, *NET_EDGES[3:], 20_000.0)
SLIM_EDGES = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0)


def motion_words(track: Track, *, resolution: int) -> Words:
    """Return three tokens per point: speed, turn, and angle between heading and course. `resolution` is not
    used."""
    drift = np.abs(between(track.cog, track.heading))
    points = tuple(
        (binned("S", track.sog[i], SPEED_EDGES), binned("T", degrees, TURN_EDGES), binned("D", drift[i], DRIFT_EDGES))
        for i, degrees in enumerate(turns(track))
    )
    head = (
        *grid_words(float(np.median(track.lat)), float(np.median(track.lon))),
        *summary_words(track),
        *bow_words(track, drift),
        *stay_words(track),
    )
    return Words(head, points)


def sized_words(track: Track, *, resolution: int) -> Words:
    """Return the motion grammar and the ship's size, from its static messages."""
    words = motion_words(track, resolution=resolution)
    slim = track.length / track.width if track.width else float("nan")
    size = (
        binned("LEN", track.length or float("nan"), LENGTH_EDGES),
        binned("WID", track.width or float("nan"), WIDTH_EDGES),
        binned("SLIM", slim, SLIM_EDGES),
    )
    return Words((*words.head, *size), words.points)


def grid_words(lat: float, lon: float) -> Iterator[str]:
    """Yield the cell of every level in each of two grids; the second is shifted by half a cell, so that no place is at
    the border of both."""
    for level in range(GRID_LEVELS):
        degrees = COARSEST_DEGREES / 4**level
        for name, moved in (("G", 0.0), ("F", 0.5)):
            yield f"{name}{level}_{math.floor(lat / degrees + moved)}_{math.floor(lon / degrees + moved)}"


def bow_words(track: Track, drift: Floats) -> tuple[str, ...]:
    """Return tokens of the headings: the fraction that is missing, mean turn, median drift from the course."""
    swing = np.abs(given(np.diff(track.heading) if len(track) > 1 else track.heading * np.nan))
    swing = np.minimum(swing, 360 - swing)
    return (
        binned("HU", float(np.isnan(track.heading).mean()), SHARE_EDGES),
        binned("HK", float(swing.mean()), MEAN_TURN_EDGES),
        binned("HD", float(np.median(given(drift))), DRIFT_EDGES),
    )


def stay_words(track: Track) -> tuple[str, ...]:
    """Return fraction of points at rest, longest rest in seconds, spread of the position in metres, hour of the day."""
    still = np.nan_to_num(track.sog, nan=0.0) < STILL_KNOTS
    spread = math.hypot(
        float(track.lat.std()) * METRES_PER_DEGREE,
        float(track.lon.std()) * METRES_PER_DEGREE * math.cos(math.radians(float(track.lat[0]))),
    )
    hour = datetime.fromtimestamp(int(track.time[0]), timezone.utc).hour
    return (
        binned("Z", float(still.mean()), SHARE_EDGES),
        binned("ZL", longest_stay_s(track, still), STAY_EDGES),
        binned("P", spread, PLACE_EDGES),
        f"HOUR_{hour}",
        binned("MINS", float(given(track.sog).min()), SPEED_EDGES),
    )


def longest_stay_s(track: Track, still: NDArray[np.bool_]) -> float:
    longest, since = 0, None
    for i, is_still in enumerate(still):
        since = (since if since is not None else int(track.time[i])) if is_still else None
        if since is not None:
            longest = max(longest, int(track.time[i]) - since)
    return float(longest)
