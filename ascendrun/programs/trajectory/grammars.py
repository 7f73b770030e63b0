"""Grammars that convert a track to tokens: `motion`, and those of the guide with H3 cells.

Bins of `motion` are quantiles over the training ships, so that it fits other waters and other intervals. `guide` writes
every point with its absolute time, its cell with all digits, coarse speed and course; `cell_based` writes the published
form, whose digits are off by one, so that the seven children of a cell are equal.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, Callable

import numpy as np

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import FEATURES, PLACE, SIZE, Floats, Track, between, steps_m, summary
from ascendrun.programs.trajectory.rules import INPUTS
from ascendrun.programs.trajectory.tokens import END, PLACE_DEGREES, Words
from ascendrun.text import listed

COMPASS = ("N", "NE", "E", "SE", "S", "SW", "W", "NW")
SPEED_WORDS = ((2.0, "STOP"), (5.0, "SLOW"), (10.0, "MID"), (15.0, "FAST"))


def library() -> Any:
    """Return the h3 module. Raises InvalidDataError if it is not installed."""
    try:
        import h3
    except ImportError:
        raise InvalidDataError(listed("program.no-h3")) from None
    return h3


def make_words(track: Track, *, cell_words: Callable[[str], tuple[str, ...]], resolution: int) -> Words:
    """Return twenty-one tokens per point at resolution 10."""
    cell_at = library().latlng_to_cell
    points = tuple(
        (
            *time_words(int(track.time[i])),
            *cell_words(str(cell_at(float(track.lat[i]), float(track.lon[i]), resolution))),
            f"SPD_{speed_word(track.sog[i])}",
            f"COG_{compass(track.cog[i])}",
            END,
        )
        for i in range(len(track))
    )
    return Words((), points)


def time_words(seconds: int) -> Iterator[str]:
    at = datetime.fromtimestamp(seconds, timezone.utc)
    for name in ("year", "month", "day", "hour", "minute", "second"):
        yield f"{name.upper()}_{getattr(at, name)}"


def speed_word(knots: float) -> str:
    if np.isnan(knots):
        return "UNKNOWN"
    return next((word for limit, word in SPEED_WORDS if knots < limit), "HIGH")


def compass(degrees: float) -> str:
    if np.isnan(degrees):
        return "UNKNOWN"
    return COMPASS[int(((degrees + 22.5) % 360) // 45)]


def digits_of(cell: str) -> tuple[str, ...]:
    """Return an H3 cell as its resolution, base cell (0-121) and one digit (0-6) for each resolution up to it.

    The index stores the digit of resolution r in the three bits from 3 * (15 - r) up; the seven children of a cell
    differ in it.
    """
    return written(cell, lowest_bit=lambda level: 3 * (15 - level))


def cell_based(cell: str) -> tuple[str, ...]:
    """Return the published form: each digit is that of the next coarser resolution, and the finest is lost."""
    return written(cell, lowest_bit=lambda level: 3 * (16 - level))


def written(cell: str, *, lowest_bit: Callable[[int], int]) -> tuple[str, ...]:
    h3 = library()
    resolution, index = h3.get_resolution(cell), h3.str_to_int(cell)
    digits = (index >> lowest_bit(level) & 7 for level in range(1, resolution + 1))
    return (
        f"H3_res_{resolution}",
        f"H3_base_{h3.get_base_cell_number(cell)}",
        *(f"H3_cell_{level}_{digit}" for level, digit in enumerate(digits, start=1)),
    )


Edges = Mapping[str, Sequence[float]]
"""By name of a quantity: increasing values, from the smallest to the largest of the training ships."""

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


def fit_edges(tracks: Sequence[Track]) -> dict[str, list[float]]:
    """Return the quantiles of each quantity; a ship with many pieces counts as one with PIECES_PER_SHIP.
    No tracks: no quantiles."""
    if not tracks:
        return {}
    by_ship: dict[str, list[Track]] = {}
    for track in tracks:
        by_ship.setdefault(track.ship, []).append(track)
    chosen: list[Track] = []
    for pieces in by_ship.values():
        places = np.linspace(0, len(pieces) - 1, min(len(pieces), PIECES_PER_SHIP)).astype(int)
        chosen += [pieces[i] for i in places]
    points = [quantities(track) for track in chosen]
    totals = [summary(track) for track in chosen]
    return {
        **{name: quantiles(np.concatenate([each[name] for each in points]), n) for name, n in POINT_BINS.items()},
        **{name: quantiles(np.array([each[name] for each in totals]), SUMMARY_BINS) for name in FEATURES},
    }


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


GUIDES = {"guide": digits_of, "cell_based": cell_based}
GRAMMARS = ("motion", *GUIDES)
"""A grammar never reads the track's label."""
TEXTS = "texts"
"""In place of a grammar: the data were texts, whose tokens are used as they are."""


def fit_text(
    tracks: Sequence[Track], *, grammar: str, resolution: int, inputs: Sequence[str] = INPUTS
) -> dict[str, Any]:
    """Return all that makes tokens of any track, to be kept with the model: for `motion` the bins, from `tracks`."""
    text: dict[str, Any] = {"grammar": grammar, "resolution": resolution}
    return {**text, "inputs": list(inputs), "edges": fit_edges(tracks)} if grammar == "motion" else text


def as_texts(
    tracks: Sequence[Track],
    *,
    grammar: str,
    resolution: int,
    edges: Mapping[str, Sequence[float]] | None = None,
    inputs: Sequence[str] = INPUTS,
) -> list[Words]:
    """Return the text of each track. `edges` None: bins from these tracks alone."""
    if grammar == TEXTS and tracks:
        raise InvalidDataError(listed("program.text-model"))
    if grammar == TEXTS:
        return []
    if grammar == "motion":
        known = fit_edges(tracks) if edges is None else edges
        return [motion_words(track, edges=known, inputs=inputs) for track in tracks]
    words = partial(make_words, cell_words=GUIDES[grammar], resolution=resolution)
    return [words(track) for track in tracks]


def summary_of_text(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text for a message, with a hash in place of the bins."""
    bins = hashlib.sha256(repr(text.get("edges")).encode()).hexdigest()[:8]
    return {**{name: value for name, value in text.items() if name != "edges"}, "bins": bins}


def knots_of(text: Mapping[str, Any]) -> list[list[float]]:
    """Return the quantiles of each number of a summary; empty: the texts have no summary."""
    has_summary = "summary" in text.get("inputs", ()) and text["edges"]
    return [list(text["edges"][name]) for name in FEATURES] if has_summary else []
