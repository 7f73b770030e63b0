"""The guide's grammars with H3 cells: every point with its absolute time, its cell, coarse speed and course.

`guide` writes the cell with all its digits. `cell_based` writes the published form, whose digits are off by one, so
that the seven children of a cell are equal.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Callable

import numpy as np

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import Track
from ascendrun.programs.trajectory.tokens import Words

END = "POINT_END"
COMPASS = ("N", "NE", "E", "SE", "S", "SW", "W", "NW")
SPEED_WORDS = ((2.0, "STOP"), (5.0, "SLOW"), (10.0, "MID"), (15.0, "FAST"))


def library() -> Any:
    """Return the h3 module. Raises InvalidDataError if it is not installed."""
    try:
        import h3
    except ImportError:
        raise InvalidDataError(
            "program.no-h3",
            "this grammar requires the Python package h3, which is not installed\n"
            "hint: pip install h3, or set --grammar=motion",
        ) from None
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
