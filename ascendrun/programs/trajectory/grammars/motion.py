"""The motion grammar: place, size and total motion as tokens, then the speed, turn, step and drift of each point.

Bins are quantiles over the training ships, so that the same grammar fits other waters and other intervals.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ascendrun.programs.trajectory.points.summary import FEATURES, PLACE, SIZE, between, steps_m, summary
from ascendrun.programs.trajectory.points.tracks import Floats, Track
from ascendrun.programs.trajectory.tokens import Words

Edges = Mapping[str, Sequence[float]]
"""By name of a quantity: increasing values, from the smallest to the largest of the training ships."""

INPUTS = ("place", "size", "summary")
"""Inputs beside the motion of each point: each may be left out."""
PIECES_PER_SHIP = 4
"""Number of pieces of a ship, evenly over its time, that shape the bins: ships count, not pieces."""
POINT_BINS = {"S": 24, "T": 16, "I": 8, "M": 16, "D": 8}
"""Number of bins of each token of a point: speed, turn a second, seconds and metres since the previous point, drift."""
SUMMARY_BINS = 16
SUMMARY_WORDS = (
    "speed_mean", "speed_max", "speed_spread", "straightness", "spread_m", "interval_median", "interval_spread",
    "turn_mean", "swing_mean", "drift_median",
)  # fmt: skip
"""Quantities of the complete track that are tokens too."""
PLACE_DEGREES = tuple(8.0 / 4**level for level in range(7))
"""Cell sizes from coarse to fine, down to 220 m. A cell without enough training ships is left out, so the next coarser
one remains."""


def fit_edges(tracks: Sequence[Track]) -> dict[str, list[float]]:
    """Return the quantiles of each quantity; a ship with many pieces counts as one with PIECES_PER_SHIP.
    No tracks: no quantiles."""
    if not tracks:
        return {}
    by_ship: dict[str, list[Track]] = {}
    for track in tracks:
        by_ship.setdefault(track.ship, []).append(track)
    chosen = [each for pieces in by_ship.values() for each in evenly(pieces)]
    points = [quantities(track) for track in chosen]
    totals = [summary(track) for track in chosen]
    return {
        **{name: quantiles(np.concatenate([each[name] for each in points]), n) for name, n in POINT_BINS.items()},
        **{name: quantiles(np.array([each[name] for each in totals]), SUMMARY_BINS) for name in FEATURES},
    }


def evenly(pieces: Sequence[Track]) -> list[Track]:
    places = np.linspace(0, len(pieces) - 1, min(len(pieces), PIECES_PER_SHIP)).astype(int)
    return [pieces[i] for i in places]


def quantiles(values: Floats, bins: int) -> list[float]:
    """Return at most bins + 1 increasing values; an empty list if no value is known."""
    known = values[~np.isnan(values)]
    if not len(known):
        return []
    found = np.quantile(known, np.linspace(0, 1, bins + 1))
    return sorted({float(f"{value:.6g}") for value in found})


def quantities(track: Track) -> dict[str, Floats]:
    """Return the numbers of each point; NaN: unknown, as the changes at the first point."""
    seconds = np.concatenate([[np.nan], track.time[1:] - track.time[:-1]])
    turn = np.concatenate([[np.nan], between(track.cog[:-1], track.cog[1:])])
    return {
        "S": track.sog,
        "T": turn / seconds,
        "I": seconds,
        "M": np.concatenate([[np.nan], steps_m(track)]),
        "D": np.abs(between(track.cog, track.heading)),
    }


def motion_words(track: Track, *, edges: Edges, inputs: Sequence[str] = INPUTS) -> Words:
    """Return the tokens of a track, and its summary. A quantity that is not known has no token."""
    totals = summary(track)
    columns = [binned(name, values, edges[name]) for name, values in quantities(track).items()]
    points = tuple(tuple(word for word in each if word) for each in zip(*columns))
    named = (*(SIZE if "size" in inputs else ()), *SUMMARY_WORDS)
    head = [
        f"{name}_{bisect.bisect_right(edges[name][1:-1], totals[name])}"
        for name in named
        if not math.isnan(totals[name])
    ]
    place = cells(totals["lat"], totals["lon"]) if "place" in inputs else ()
    hidden = {*(() if "size" in inputs else SIZE), *(() if "place" in inputs else PLACE)}
    values = tuple(None if name in hidden or math.isnan(value) else value for name, value in totals.items())
    return Words((*place, *head), points, values if "summary" in inputs else ())


def binned(name: str, values: Floats, edges: Sequence[float]) -> list[str]:
    """Return the token of each value: the index of its bin; "" if unknown."""
    numbers = np.asarray(edges[1:-1]).searchsorted(values, side="right").tolist()
    return ["" if math.isnan(value) else f"{name}_{number}" for value, number in zip(values.tolist(), numbers)]


def cells(lat: float, lon: float) -> Iterator[str]:
    """Yield the cell of every level in each of two grids, coarse to fine; the second is shifted by half a cell, so that
    no place is at the border of both."""
    for level, degrees in enumerate(PLACE_DEGREES):
        for name, moved in (("G", 0.0), ("F", 0.5)):
            yield f"{name}{level}_{math.floor(lat / degrees + moved)}_{math.floor(lon / degrees + moved)}"
