"""Synthetic data: plausible tracks of seven vessel types, each with its own motion; same seed, same tracks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.points.tracks import METRES_PER_DEGREE, METRES_PER_KNOT_SECOND, Floats, Track

Rng = np.random.Generator
Motion = tuple[Floats, Floats]
"""Speed in knots and course in degrees, one value per point."""

START_S = 1_640_995_200
PORTS = ((29.95, -90.06), (33.74, -118.25), (40.66, -74.05), (47.60, -122.36), (27.90, -82.45), (36.95, -76.33))
MOORED_SHARE = 0.12
"""Fraction of ships that are moored; types are then indistinguishable: no classifier reaches 1.0 here."""


@dataclass(frozen=True)
class Kind:
    """One vessel type: its frequency, its motion, and the seconds between its reports."""

    share: float
    interval_s: float
    motion: Callable[[Rng, int], Motion]


def steady(rng: Rng, points: int, *, low: float, high: float, wander: float, jitter: float) -> Motion:
    """Generate a ship on passage: speed nearly constant, course drifting slowly."""
    speed = rng.uniform(low, high) + rng.normal(0, jitter, points)
    course = rng.uniform(0, 360) + np.cumsum(rng.normal(0, wander, points))
    return speed, course


def fishing(rng: Rng, points: int) -> Motion:
    """Generate slow tows in alternating directions, with sharp turns."""
    leg = rng.integers(3, 7)
    legs = np.arange(points) // leg
    course = rng.uniform(0, 360) + legs % 2 * rng.uniform(120, 200) + rng.normal(0, 12, points)
    return rng.uniform(2, 5) + rng.normal(0, 0.7, points), course


def tug(rng: Rng, points: int) -> Motion:
    """Generate short trips: variable speed, frequent turns."""
    phase = np.linspace(0, rng.uniform(3, 12), points) + rng.uniform(0, 6)
    speed = 4.5 + 2.5 * np.sin(phase) + rng.normal(0, 0.6, points)
    return speed, rng.uniform(0, 360) + np.cumsum(rng.normal(0, 16, points))


def passenger(rng: Rng, points: int) -> Motion:
    """Generate a ferry: a fast crossing, a stop at the pier, and the return."""
    half = int(rng.integers(5, 10))
    phase = (np.arange(points) + rng.integers(0, half)) % half
    speed = np.where(phase < half - 2, rng.uniform(12, 22), 0.4) + rng.normal(0, 0.8, points)
    way = (np.arange(points) // half) % 2
    return speed, rng.uniform(0, 360) + 180.0 * way + rng.normal(0, 5, points)


def sailing(rng: Rng, points: int) -> Motion:
    """Generate tacks against the wind, with a speed that depends on gusts."""
    wind, angle = rng.uniform(0, 360), rng.uniform(40, 55)
    tack = np.where((np.arange(points) // int(rng.integers(4, 9))) % 2 == 0, angle, -angle)
    return rng.uniform(3.5, 7) + rng.normal(0, 1.0, points), wind + tack + rng.normal(0, 6, points)


def other(rng: Rng, points: int) -> Motion:
    """Generate workboats and launches: each moves approximately like another type."""
    motion = (tug, fishing, passenger, sailing)[int(rng.integers(0, 4))]
    speed, course = motion(rng, points)
    return speed * rng.uniform(0.7, 1.4), course + rng.normal(0, 10, points)


KINDS: dict[str, Kind] = {
    "Tug_Tow": Kind(0.34, 70, tug),
    "Cargo": Kind(0.18, 70, partial(steady, low=11, high=19, wander=1.2, jitter=0.3)),
    "Passenger": Kind(0.13, 65, passenger),
    "Fishing": Kind(0.11, 80, fishing),
    "Tanker": Kind(0.11, 70, partial(steady, low=9, high=14, wander=0.8, jitter=0.15)),
    "Pleasure_Sailing": Kind(0.08, 90, sailing),
    "Other": Kind(0.05, 80, other),
}


def generate(count: int, *, seed: int, min_points: int = 12, max_points: int = 24) -> list[Track]:
    """Return `count` tracks, one per ship. The i-th track depends only on `seed` and i: more tracks keep the first."""
    names = list(KINDS)
    edges = np.cumsum([KINDS[name].share for name in names])
    tracks = []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        name = names[int(np.searchsorted(edges, rng.uniform(0, edges[-1]), side="right"))]
        tracks.append(make_track(i, name, rng, int(rng.integers(min_points, max_points + 1))))
    return tracks


def make_track(number: int, name: str, rng: Rng, points: int) -> Track:
    kind = KINDS[name]
    speed, course = kind.motion(rng, points)
    if rng.uniform() < MOORED_SHARE:
        speed, course = rng.uniform(0, 0.25, points), rng.uniform(0, 360, points)
    speed = np.clip(speed, 0, 40)
    steps = np.maximum(rng.normal(kind.interval_s, 12, points), 20)
    time = START_S + int(rng.integers(0, 86_400 * 300)) + np.cumsum(steps).astype(np.int64)
    lat, lon = sail(rng, speed, course, np.diff(time, prepend=time[0]))
    cog = np.where(rng.uniform(size=points) < 0.03, np.nan, np.round(course % 360, 1) % 360)
    return Track(f"gen{number:06d}", f"gen{number:06d}", time, lat, lon, np.round(speed, 1), cog, name, None)


def sail(rng: Rng, speed: Floats, course: Floats, seconds: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return positions from speed and course, starting near one of PORTS."""
    port_lat, port_lon = PORTS[int(rng.integers(0, len(PORTS)))]
    metres = speed * METRES_PER_KNOT_SECOND * seconds
    north, east = np.cumsum(metres * np.cos(np.radians(course))), np.cumsum(metres * np.sin(np.radians(course)))
    lat = port_lat + rng.normal(0, 0.15) + north / METRES_PER_DEGREE
    lon = port_lon + rng.normal(0, 0.15) + east / (METRES_PER_DEGREE * np.cos(np.radians(port_lat)))
    return np.round(lat, 5), np.round(lon, 5)
