"""The grammars with H3 cells: compact, and the guide's, which describe every point without its class token.

`guide` writes the cell with all its digits. The other eight write the tokens of the published code, for texts made
with it. This includes `cell_based`, whose digits are off by one, so that the seven children of a cell are equal.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import numpy as np

from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trajectory.grammars.bins import (
    SPEED_EDGES,
    TURN_EDGES,
    binned,
    compass,
    speed_word,
    summary_words,
    time_words,
    turns,
)
from ascendrun.programs.trajectory.points.tracks import Track
from ascendrun.programs.trajectory.tokens import Words

END = "POINT_END"
PREFIXES = (("L1", 3), ("L2", 5), ("L3", 7), ("L4", 9))
"""Levels of the hierarchical grammars: their name and the number of letters of the cell in a token."""

REGION_LEVELS = (1, 2, 3, 4, 5, 6, 7, 8)
"""H3 resolutions in the tokens, from 600 km down to 500 m."""

CellWords = Callable[[str, Optional[str]], tuple[str, ...]]
"""Function from a cell and the cell of the previous point (None: first point) to the tokens of the cell."""


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


def cell_at(lat: float, lon: float, resolution: int) -> str:
    return str(library().latlng_to_cell(float(lat), float(lon), resolution))


def compact_words(track: Track, *, resolution: int) -> Words:
    """Return two tokens per point. With only a few thousand tracks, a short text reduces memorization."""
    region = cell_at(np.median(track.lat), np.median(track.lon), resolution)
    cells = tuple(
        f"R{level}_{library().cell_to_parent(region, level)}" for level in REGION_LEVELS if level <= resolution
    )
    points = tuple(
        (binned("S", speed, SPEED_EDGES), binned("T", degrees, TURN_EDGES))
        for speed, degrees in zip(track.sog, turns(track))
    )
    return Words((*cells, *summary_words(track)), points)


def make_words(track: Track, cell_words: CellWords, *, resolution: int) -> Words:
    before: str | None = None
    points = []
    for i in range(len(track)):
        cell = cell_at(track.lat[i], track.lon[i], resolution)
        points.append(
            (
                *time_words(int(track.time[i])),
                *cell_words(cell, before),
                f"SPD_{speed_word(track.sog[i])}",
                f"COG_{compass(track.cog[i])}",
                END,
            )
        )
        before = cell
    return Words((), tuple(points))


def guide_words(track: Track, *, resolution: int) -> Words:
    """Return twenty-one tokens per point at resolution 10."""
    return make_words(track, lambda cell, before: digits_of(cell), resolution=resolution)


def digits_of(cell: str) -> tuple[str, ...]:
    """Return an H3 cell as its resolution, base cell (0-121) and one digit (0-6) for each resolution up to it.

    The index stores the digit of resolution r in the three bits from 3 * (15 - r) up; the seven children of a cell
    differ in it.
    """
    return written(cell, lowest_bit=lambda level: 3 * (15 - level))


def cell_based(cell: str, before: str | None) -> tuple[str, ...]:
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


def char_split(cell: str, before: str | None) -> tuple[str, ...]:
    return tuple(f"H3_CHAR_{i}_{letter}" for i, letter in enumerate(cell))


def hierarchical_optimized(cell: str, before: str | None) -> tuple[str, ...]:
    return (f"H3_RES_{cell[1]}", *(f"H3_{level}_{cell[:end]}" for level, end in PREFIXES))


def semantic(cell: str, before: str | None) -> tuple[str, ...]:
    return (
        f"H3_VER_{cell[0]}",
        f"H3_RES_{cell[1]}",
        f"H3_BASE_{cell[2:6]}",
        f"H3_SUB_{cell[6:10]}",
        f"H3_PRECISE_{cell[10:13]}",
    )


def grid_based(cell: str, before: str | None) -> tuple[str, ...]:
    return (
        f"GRID_RES_{cell[1]}",
        f"GRID_MAJOR_{cell[2:4]}",
        f"GRID_MID_{cell[4:7]}",
        f"GRID_MINOR_{cell[7:10]}",
        f"GRID_MICRO_{cell[10:13]}",
    )


def relative(cell: str, before: str | None) -> tuple[str, ...]:
    """Return the changes since the previous point, level by level; all levels for the first point."""
    if before is None:
        return hierarchical_optimized(cell, None)
    words = ["H3_RES_SAME" if cell[1] == before[1] else f"H3_RES_CHANGE_{cell[1]}"]
    for level, end in PREFIXES:
        if cell[:end] == before[:end]:
            words.append(f"H3_{level}_SAME")
        else:
            words += [f"H3_{level}_CHANGE", f"H3_{level}_NEW_{cell[end - 2 : end]}"]
    return tuple(words)


def simple(cell: str, before: str | None) -> tuple[str, ...]:
    return (f"H3_{cell}",)


def grouped(cell: str, before: str | None) -> tuple[str, ...]:
    return (f"H3_PREFIX_{cell[:5]}", f"H3_MID_{cell[5:10]}", f"H3_SUFFIX_{cell[10:]}")


PUBLISHED: dict[str, CellWords] = {
    "cell_based": cell_based,
    "char_split": char_split,
    "hierarchical_optimized": hierarchical_optimized,
    "semantic": semantic,
    "grid_based": grid_based,
    "relative": relative,
    "simple": simple,
    "grouped": grouped,
}
