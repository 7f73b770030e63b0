"""Columns of an AIS file: which of them is the time, the position, the speed; numbers in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendrun.facts.columns import ALIASES, Columns, find_columns, missing_columns, unknown_names
from ascendrun.programs.errors import InvalidDataError

KNOTS = {"knots": 1.0, "m/s": 1.943844, "km/h": 0.539957}
"""Knots in one unit, by the name that `--units` expects."""


def match_columns(table: Mapping[str, Sequence[Any]], wanted: Mapping[str, str], file: object) -> Columns:
    """Return the file's columns. `wanted`: --column_map; an empty name means that the file has no such column.

    Raises InvalidDataError, with all missing columns and the line to add.
    """
    names = list(table)
    unknown = unknown_names(table, wanted)
    if unknown:
        raise InvalidDataError(
            "program.unknown-columns",
            "--column_map: unknown names {unknown}; known names are {known}; {file} has the columns {columns}",
            unknown=unknown,
            known=list(ALIASES),
            file=file,
            columns=names,
        )
    found, missing, proposal = missing_columns(table, wanted)
    if missing:
        raise InvalidDataError(
            "program.no-column",
            "{file}: no column for {missing} among {columns}\nhint: --column_map={proposal}",
            file=file,
            missing=missing,
            columns=names,
            proposal=proposal,
        )
    return Columns(found, None if "sog" in wanted else find_columns(names).speed_unit)


# --- numbers ---


def numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """Convert to floats; a value that is not a number becomes NaN. A column of decimal commas is read as such."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        pass
    found = np.array([one_number(value) for value in values], dtype=np.float64)
    texts = [str(value).strip() for value in values if isinstance(value, str) and value.strip()]
    if texts and np.isnan(found).any() and all(re.fullmatch(r"[-+]?[0-9]+(,[0-9]+)?", text) for text in texts):
        return np.array([one_number(str(value).replace(",", ".")) for value in values], dtype=np.float64)
    return found


def one_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def only_value(values: NDArray[np.float64]) -> float | None:
    """Return the value that a column has in every row that has one, NaN if no row has one; None: there are several."""
    given = values[~np.isnan(values)]
    if not len(given):
        return float("nan")
    return float(given[0]) if len(given) > 1 and np.ptp(given) == 0 else None
