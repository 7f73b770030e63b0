"""The door to the h3 library: cells of positions, and an error that says what to do where it is absent."""

from __future__ import annotations

from typing import Any

from ascendrun.programs.trainer.errors import InvalidDataError


def library() -> Any:
    """The h3 module. Raises InvalidDataError where it is not installed."""
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
