"""Numbers of a track as tokens: bins of values, and the values themselves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import numpy as np

from ascendrun.programs.trajectory.points.tracks import Floats, Track, metres_between

COMPASS = ("N", "NE", "E", "SE", "S", "SW", "W", "NW")
SPEED_WORDS = ((2.0, "STOP"), (5.0, "SLOW"), (10.0, "MID"), (15.0, "FAST"))
SPEED_EDGES = (
    0.05, 0.15, 0.25, 0.4, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0,
    9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 16.0, 18.0, 20.0, 24.0, 30.0,
)  # fmt: skip
TURN_EDGES = (-120.0, -60.0, -30.0, -15.0, -8.0, -4.0, -1.5, -0.5, 0.5, 1.5, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
STEP_EDGES = (15.0, 30.0, 50.0, 58.0, 62.0, 66.0, 69.0, 71.0, 74.0, 80.0, 100.0, 130.0, 170.0, 185.0, 240.0, 400.0)
SPREAD_EDGES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)
NET_EDGES = (3.0, 6.0, 10.0, 20.0, 50.0, 100.0, 300.0, 1000.0, 2000.0, 4000.0, 8000.0)
SHARE_EDGES = (0.001, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99)
JITTER_EDGES = (2.0, 4.0, 8.0, 12.0, 20.0, 40.0, 60.0, 90.0)
MEAN_TURN_EDGES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 80.0, 100.0)


def binned(letter: str, value: float, edges: Sequence[float]) -> str:
    """Return the token of a number: the index of its bin, `x` if unknown."""
    return f"{letter}_x" if np.isnan(value) else f"{letter}_{int(np.searchsorted(edges, value, side='right'))}"


def time_words(seconds: int) -> tuple[str, ...]:
    at = datetime.fromtimestamp(seconds, timezone.utc)
    return (
        f"YEAR_{at.year}",
        f"MONTH_{at.month}",
        f"DAY_{at.day}",
        f"HOUR_{at.hour}",
        f"MINUTE_{at.minute}",
        f"SECOND_{at.second}",
    )


def speed_word(knots: float) -> str:
    if np.isnan(knots):
        return "UNKNOWN"
    return next((word for limit, word in SPEED_WORDS if knots < limit), "HIGH")


def compass(degrees: float) -> str:
    if np.isnan(degrees):
        return "UNKNOWN"
    return COMPASS[int(((degrees + 22.5) % 360) // 45)]


def given(values: Floats) -> Floats:
    """Return the values that are not NaN; a single NaN if there are none, so that their mean is NaN too."""
    present = values[~np.isnan(values)]
    return present if len(present) else np.array([np.nan])


def between(degrees: Floats, others: Floats) -> Floats:
    """Return the angle from each direction to the other, -180 to 180, starboard positive; NaN if either is unknown."""
    difference: Floats = (others - degrees + 180) % 360 - 180
    return difference


def turns(track: Track) -> Floats:
    """Return the course change in degrees since the previous point; NaN where a course is unknown."""
    return between(np.concatenate([[np.nan], track.cog[:-1]]), track.cog)


def summary_words(track: Track) -> tuple[str, ...]:
    """Return nine tokens: mean, maximum and spread of the speed, metres from first to last point, their ratio to the
    path, the median interval and its spread, mean turn, fraction of points without a course."""
    speed, turn = given(track.sog), np.abs(given(turns(track)[1:]))
    interval = np.diff(track.time).astype(np.float64)
    way = float(np.sum(metres_between(track.lat[:-1], track.lon[:-1], track.lat[1:], track.lon[1:])))
    net = float(metres_between(track.lat[:1], track.lon[:1], track.lat[-1:], track.lon[-1:])[0])
    return (
        binned("VM", float(speed.mean()), SPEED_EDGES),
        binned("VX", float(speed.max()), SPEED_EDGES),
        binned("VS", float(speed.std()), SPREAD_EDGES),
        binned("L", net, NET_EDGES),
        binned("E", net / (way + 1), SHARE_EDGES),
        binned("I", float(np.median(interval)), STEP_EDGES),
        binned("J", float(interval.std()), JITTER_EDGES),
        binned("K", float(turn.mean()), MEAN_TURN_EDGES),
        binned("U", float(np.isnan(track.cog).mean()), SHARE_EDGES),
    )
