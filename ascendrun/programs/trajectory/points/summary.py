"""Summary of a track: a fixed set of numbers, the same for the head of the model and for the baselines of a report."""

from __future__ import annotations

import math
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.points.tracks import (
    METRES_PER_DEGREE,
    METRES_PER_KNOT_SECOND,
    Floats,
    Track,
    metres_between,
)

STILL_KNOTS = 0.5
MOTION = (
    "speed_mean", "speed_max", "speed_min", "speed_median", "speed_spread", "way_speed_mean", "way_speed_max",
    "way_speed_spread", "acceleration_mean", "acceleration_max", "net_m", "path_m", "straightness", "spread_m",
    "interval_median", "interval_max", "interval_min", "interval_spread", "duration_s", "turn_mean", "turn_max",
    "turn_median", "no_course", "still", "longest_still_s", "no_heading", "swing_mean", "swing_max", "drift_median",
    "drift_max",
)  # fmt: skip
SIZE = ("length", "width", "slimness")
PLACE = ("lat", "lon")
FEATURES = (*MOTION, *SIZE, *PLACE)
"""Names in the order of `summary`. Speeds are in knots; `way_speed` is that between positions. Turns and swings
(changes of course and heading) are in degrees a minute, accelerations in knots a minute; drift is the angle between
course and heading."""


def summary(track: Track) -> dict[str, float]:
    """Return a number for each name of FEATURES; NaN: unknown. It is computed once: bins and tokens need it."""
    kept = vars(track)
    if "summary" not in kept:
        kept["summary"] = computed(track)
    found: dict[str, float] = kept["summary"]
    return found


def computed(track: Track) -> dict[str, float]:
    seconds = (track.time[1:] - track.time[:-1]).astype(np.float64)
    minutes = seconds / 60
    metres = steps_m(track)
    path = float(metres.sum())
    net = float(metres_between(track.lat[:1], track.lon[:1], track.lat[-1:], track.lon[-1:])[0])
    still = np.nan_to_num(track.sog, nan=0.0) < STILL_KNOTS
    turn, swing = (np.abs(between(each[:-1], each[1:])) / minutes for each in (track.cog, track.heading))
    values = (
        *rules(track.sog, mean, np.maximum.reduce, np.minimum.reduce, median, spread),
        *rules(metres / seconds / METRES_PER_KNOT_SECOND, mean, np.maximum.reduce, spread),
        *rules(np.abs(track.sog[1:] - track.sog[:-1]) / minutes, mean, np.maximum.reduce),
        net, path, net / (path + 1), spread_m(track),
        *rules(seconds, median, np.maximum.reduce, np.minimum.reduce, spread), float(seconds.sum()),
        *rules(turn, mean, np.maximum.reduce, median), float(np.isnan(track.cog).mean()),
        float(still.mean()), longest_stay_s(track, still), float(np.isnan(track.heading).mean()),
        *rules(swing, mean, np.maximum.reduce),
        *rules(np.abs(between(track.cog, track.heading)), median, np.maximum.reduce),
        track.length or math.nan, track.width or math.nan, track.length / track.width if track.width else math.nan,
        float(median(track.lat)), float(median(track.lon)),
    )  # fmt: skip
    return dict(zip(FEATURES, values))


def rules(values: Floats, *each: Callable[[Floats], np.float64]) -> list[float]:
    """Return what each rule gives for the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return [float(rule(known)) if len(known) else math.nan for rule in each]


def mean(values: Floats) -> np.float64:
    """As np.mean, which takes five times as long for a few values; `median` and `spread` likewise."""
    return np.add.reduce(values) / len(values)  # type: ignore[no-any-return]


def median(values: Floats) -> np.float64:
    ordered, middle = np.sort(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2  # type: ignore[no-any-return]


def spread(values: Floats) -> np.float64:
    away = values - mean(values)
    return np.sqrt(mean(away * away))  # type: ignore[no-any-return]


def between(degrees: Floats, others: Floats) -> Floats:
    """Return the angle from each direction to the other, -180 to 180, starboard positive; NaN if either is unknown."""
    difference: Floats = (others - degrees + 180) % 360 - 180
    return difference


def steps_m(track: Track) -> Floats:
    """Return the metres from each point to the next."""
    return metres_between(track.lat[:-1], track.lon[:-1], track.lat[1:], track.lon[1:])


def spread_m(track: Track) -> float:
    """Return the standard deviation of the position."""
    east = METRES_PER_DEGREE * math.cos(math.radians(float(track.lat[0])))
    return math.hypot(float(track.lat.std()) * METRES_PER_DEGREE, float(track.lon.std()) * east)


def longest_stay_s(track: Track, still: NDArray[np.bool_]) -> float:
    longest, since = 0, None
    for i, is_still in enumerate(still):
        since = (since if since is not None else int(track.time[i])) if is_still else None
        if since is not None:
            longest = max(longest, int(track.time[i]) - since)
    return float(longest)
