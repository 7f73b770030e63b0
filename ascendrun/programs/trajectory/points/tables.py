"""Tables of AIS points in CSV and Parquet files: invalid lines, columns by name, numbers and times."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ascendrun.facts import columns as facts
from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import listed

SEPARATORS = ",;\t|"
"""Characters between columns; the one that the first line has most often."""
NO_TEXT = "\0\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Table:
    """`torn`: number of lines with too few or too many values, which are skipped; `first_torn`: the first of them."""

    columns: Mapping[str, Sequence[Any]]
    torn: int = 0
    first_torn: int | None = None


def read_table(file: Path) -> Table:
    """Read a table. Raises InvalidDataError for an invalid file."""
    try:
        return Table(read_parquet(file)) if file.suffix == ".parquet" else read_csv(file)
    except (EOFError, OSError, zlib.error) as error:
        raise InvalidDataError(listed("program.cannot-read", file=file, error=error)) from error


def read_parquet(file: Path) -> dict[str, Sequence[Any]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InvalidDataError(listed("program.no-pyarrow", file=file)) from None
    try:
        return dict(parquet.read_table(file).to_pydict())
    except (pyarrow.ArrowException, ValueError) as error:
        raise InvalidDataError(f"{file}: {error}") from error


def read_csv(file: Path) -> Table:
    """Read a CSV file; its first line shows the separator. Empty lines are skipped.

    A ship name in another encoding does not make its positions invalid.
    """
    body: list[list[str]] = []
    torn, first_torn, first_line = 0, None, 1
    with open_text(file) as lines:
        first = lines.readline()
        if any(mark in first for mark in NO_TEXT):
            raise InvalidDataError(listed("program.table-not-utf8", file=file))
        separator = max(SEPARATORS, key=first.count)
        rows = csv.reader((line.replace("\0", "") for line in chain([first], lines)), delimiter=separator)
        try:
            header = next(rows, None)
            if not header:
                raise InvalidDataError(listed("program.table-empty", file=file))
            first_line = rows.line_num + 1
            for row in rows:
                if len(row) == len(header) and rows.line_num == first_line:  # a quote that stays open takes lines
                    body.append(row)
                elif row:
                    torn += rows.line_num + 1 - first_line
                    first_torn = first_torn or first_line
                first_line = rows.line_num + 1
        except csv.Error as error:
            raise InvalidDataError(listed("program.bad-csv", file=file, line=first_line, error=error)) from error
    return Table({name.strip(): [row[i] for row in body] for i, name in enumerate(header)}, torn, first_torn)


def open_text(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig", errors="replace", newline="")
    return open(file, encoding="utf-8-sig", errors="replace", newline="")


KNOTS = {"knots": 1.0, "m/s": 1.943844, "km/h": 0.539957, "knots/10": 0.1}
"""Knots in one unit, by the name that `--units` expects. Tenths of a knot: as AIS messages have them."""


def match_columns(table: Mapping[str, Sequence[Any]], wanted: Mapping[str, str], file: object) -> facts.Columns:
    """Return the file's columns. `wanted`: --column_map; an empty name means that the file has no such column.

    Raises InvalidDataError, with all missing columns and the line to add.
    """
    names = list(table)
    unknown = facts.unknown_names(table, wanted)
    if unknown:
        raise InvalidDataError(
            listed("program.unknown-columns", unknown=unknown, known=list(facts.ALIASES), file=file, columns=names)
        )
    found, missing, proposal = facts.missing_columns(table, wanted)
    if missing:
        raise InvalidDataError(
            listed("program.no-column", file=file, missing=missing, columns=names, proposal=proposal)
        )
    return facts.Columns(found, None if "sog" in wanted else facts.find_columns(names).speed_unit)


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


def is_date(value: Any) -> bool:
    """Return whether a value is a date whose year stands last, so that the order of day and month is open."""
    return isinstance(value, str) and facts.YEAR_LAST.fullmatch(value.strip()) is not None


def order_of_dates(columns: Iterable[tuple[str, Sequence[Any]]]) -> str | None:
    """Return DAY_FIRST or MONTH_FIRST for the time columns of all files together; None: no date has that form.

    A number above 12 decides; else dots or the Danish header (day first), a 12-hour clock (month first), else the order
    in which the data takes less time. Raises InvalidDataError when values contradict or nothing decides.
    """
    dates: dict[tuple[int, int, int], Any] = {}
    is_european = is_american = False
    for name, values in columns:
        for value in values:
            found = facts.YEAR_LAST.fullmatch(value.strip()) if isinstance(value, str) else None
            if found:
                dates.setdefault((int(found[1]), int(found[3]), int(found[4])), value)
                is_european |= found[2] == "." or name.strip().lower() == "# timestamp"
                is_american |= found[9] is not None
    if not dates:
        return None
    day_first = next((value for (one, _, _), value in dates.items() if one > 12), None)
    month_first = next((value for (_, other, _), value in dates.items() if other > 12), None)
    if day_first and month_first:
        raise InvalidDataError(listed("program.dates-contradict", first=day_first, other=month_first))
    if day_first or month_first:
        return facts.DAY_FIRST if day_first else facts.MONTH_FIRST
    if is_european != is_american:
        return facts.DAY_FIRST if is_european else facts.MONTH_FIRST
    spans = {}
    for order in (facts.DAY_FIRST, facts.MONTH_FIRST):
        days = [
            datetime(year, *((other, one) if order == facts.DAY_FIRST else (one, other))) for one, other, year in dates
        ]
        spans[order] = (max(days) - min(days)).days
    if 5 * min(spans.values()) < max(spans.values()):
        return min(spans, key=lambda order: spans[order])
    example = next(iter(dates.values()))
    raise InvalidDataError(listed("program.dates-ambiguous", date=example))


def read_times(values: Sequence[Any], *, order: str | None, time_format: str = "") -> NDArray[np.float64]:
    """Return UTC seconds; NaN where a value is no time. Numbers beyond the year 2200 are milliseconds, microseconds or
    nanoseconds. `time_format`: of strptime, for all values; its time of day may be missing."""
    if time_format:
        return np.array([_formatted(value, time_format) for value in values], dtype=np.float64)
    found = np.array([facts.read_time(value, order) for value in values], dtype=np.float64)
    usual = np.nanmedian(np.abs(found)) if np.isfinite(found).any() else 0.0
    while facts.LATEST_S < usual < facts.LATEST_S * 1e9:
        found, usual = found / 1000, usual / 1000
    return found


def _formatted(value: Any, time_format: str) -> float:
    text = str(value).strip()
    for form in (time_format, *(time_format + clock for clock in (" %H:%M:%S", "T%H:%M:%S", " %H:%M", " %H:%M:%S.%f"))):
        try:
            moment = datetime.strptime(text, form)
        except ValueError:
            continue
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    return float("nan")


NO_TIME = listed("program.no-time")
