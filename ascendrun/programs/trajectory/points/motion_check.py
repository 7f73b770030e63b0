"""Speeds and courses compared with the distances travelled: units, exchanged coordinates, two ships under one name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.points.tables import KNOTS
from ascendrun.programs.trajectory.points.tracks import (
    FASTEST_KNOTS,
    METRES_PER_KNOT_SECOND,
    Floats,
    Track,
    is_too_far,
    metres_between,
)

LONGEST_STEP_S = 300.0
"""Over a longer time a ship changes its speed too much for the comparison."""
LEAST_KNOTS, LEAST_METRES = 2.0, 100.0
LEAST_STEPS = 30
USUAL_KNOTS = 100.0
SHARED_NAME = 0.2
"""Share of unreachable steps from which a name belongs to two ships or more."""


@dataclass(frozen=True)
class Agreement:
    """`factor`: knots travelled for each unit of the speed column, median. `spread`: its interquartile range, as a
    difference of logarithms. `turned`, `mirrored`: median degrees between course and path, as read and with latitude
    and longitude exchanged; NaN: no course. None of them: fewer than LEAST_STEPS steps of moving ships."""

    factor: float
    spread: float
    turned: float
    mirrored: float

    @property
    def is_exchanged(self) -> bool:
        """Whether the courses fit the path only with latitude and longitude exchanged."""
        return self.mirrored < 20 and self.turned > 2 * self.mirrored + 15

    def unit(self, read_as: float = 1.0) -> str | None:
        """Return the unit of the speed column, None: none that is known. `read_as`: the knots that one unit of it was
        taken for."""
        distance = {name: abs(np.log(self.factor * read_as / knots)) for name, knots in KNOTS.items()}
        nearest = min(distance, key=lambda name: distance[name])
        return nearest if distance[nearest] < 0.3 else None


def agreement(tracks: Sequence[Track]) -> Agreement | None:
    """Compare speed and course of all tracks (by time) with their paths; None: too few steps of moving ships."""
    ratios, turned, mirrored = [], [], []
    for track in tracks:
        seconds, metres, north, east = steps(track)
        knots = metres / np.maximum(seconds, 1) / METRES_PER_KNOT_SECOND
        told = (track.sog[1:] + track.sog[:-1]) / 2
        with np.errstate(invalid="ignore"):
            moving = (seconds > 0) & (seconds <= LONGEST_STEP_S) & (metres > LEAST_METRES) & (knots > LEAST_KNOTS)
            moving &= (knots < USUAL_KNOTS) & (told > 0)
        ratios.append(knots[moving] / told[moving])
        course = track.cog[1:][moving]
        turned.append(apart(np.degrees(np.arctan2(east, north))[moving], course))
        _, _, north, east = steps(replace(track, lat=track.lon, lon=track.lat))
        mirrored.append(apart(np.degrees(np.arctan2(east, north))[moving], course))
    found = np.concatenate(ratios) if ratios else np.empty(0)
    if len(found) < LEAST_STEPS:
        return None
    low, middle, high = np.percentile(np.log(found), [25, 50, 75])
    return Agreement(float(np.exp(middle)), float(high - low), _median(turned), _median(mirrored))


def steps(track: Track) -> tuple[Floats, Floats, Floats, Floats]:
    """Return seconds and metres from each point to the next, and metres to the north and to the east."""
    seconds = np.diff(track.time).astype(np.float64)
    lat, lon, to_lat, to_lon = track.lat[:-1], track.lon[:-1], track.lat[1:], track.lon[1:]
    north = metres_between(lat, lon, to_lat, lon) * np.sign(to_lat - lat)
    east = metres_between(lat, lon, lat, to_lon) * np.sign((to_lon - lon + 180) % 360 - 180)
    return seconds, metres_between(lat, lon, to_lat, to_lon), north, east


def apart(degrees: Floats, others: Floats) -> Floats:
    """Return the angle between directions, 0 to 180; NaN where one is unknown."""
    return np.abs((others - degrees + 180) % 360 - 180)


def _median(parts: Sequence[NDArray[np.float64]]) -> float:
    together = np.concatenate(parts)
    given = together[~np.isnan(together)]
    return float(np.median(given)) if len(given) >= LEAST_STEPS else float("nan")


def with_derived(track: Track, *, speed: bool, course: bool) -> Track:
    """Return the track (by time) with speed or course from its positions: of the step to each point, the first point
    has those of the second. A step of no distance has no course."""
    if len(track) < 2 or not (speed or course):
        return track
    seconds, metres, north, east = steps(track)
    knots = np.minimum(metres / np.maximum(seconds, 1) / METRES_PER_KNOT_SECOND, FASTEST_KNOTS)
    degrees = np.where(metres > 0, np.degrees(np.arctan2(east, north)) % 360, np.nan)
    return replace(
        track,
        sog=np.concatenate([knots[:1], knots]) if speed else track.sog,
        cog=np.concatenate([degrees[:1], degrees]) if course else track.cog,
    )


def is_shared_name(track: Track) -> bool:
    """Return whether the track (by time) jumps between places as two ships under one name do."""
    if len(track) < 10:
        return False
    later = np.arange(1, len(track))
    return float(is_too_far(track, later - 1, later, USUAL_KNOTS).mean()) >= SHARED_NAME
