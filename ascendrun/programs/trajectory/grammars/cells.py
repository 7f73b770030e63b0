"""The door to the h3 library: cells of positions, and an error that says what to do where it is absent."""

from __future__ import annotations

from typing import Any

from ascendrun.programs.trajectory.points.tracks import InvalidDataError


def library() -> Any:
    """The h3 module. Raises InvalidDataError where it is not installed."""
    try:
        import h3
    except ImportError:
        raise InvalidDataError(
            "this grammar names H3 cells and the Python package h3 is not installed here; install it "
            "(pip install h3), or take --grammar=motion, which needs none"
        ) from None
    return h3


def cell_at(lat: float, lon: float, resolution: int) -> str:
    return str(library().latlng_to_cell(float(lat), float(lon), resolution))
