"""Times of AIS files: ISO 8601, seconds or milliseconds since 1970, and dates whose order the whole file decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendrun.facts.columns import DAY_FIRST, LATEST_S, MONTH_FIRST, YEAR_LAST, read_time
from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text


def has_dates(values: Sequence[Any]) -> bool:
    """Return whether a value is a date whose year stands last, so that the order of day and month is open."""
    return any(isinstance(value, str) and YEAR_LAST.fullmatch(value.strip()) for value in values)


def order_of_dates(columns: Iterable[tuple[str, Sequence[Any]]]) -> str | None:
    """Return DAY_FIRST or MONTH_FIRST for the time columns of all files together; None: no date has that form.

    A number above 12 decides; else dots or the Danish header (day first), a 12-hour clock (month first), else the order
    in which the data takes less time. Raises InvalidDataError when values contradict or nothing decides.
    """
    dates: dict[tuple[int, int, int], Any] = {}
    is_european = is_american = False
    for name, values in columns:
        for value in values:
            found = YEAR_LAST.fullmatch(value.strip()) if isinstance(value, str) else None
            if found:
                dates.setdefault((int(found[1]), int(found[3]), int(found[4])), value)
                is_european |= found[2] == "." or name.strip().lower() == "# timestamp"
                is_american |= found[9] is not None
    if not dates:
        return None
    day_first = next((value for (one, _, _), value in dates.items() if one > 12), None)
    month_first = next((value for (_, other, _), value in dates.items() if other > 12), None)
    if day_first and month_first:
        raise InvalidDataError(
            "program.dates-contradict",
            "dates are written in two orders: {first:quote} and {other:quote}\n"
            "hint: convert one of the files, or give --time_format, such as %d/%m/%Y %H:%M:%S; other dates are dropped",
            first=day_first,
            other=month_first,
        )
    if day_first or month_first:
        return DAY_FIRST if day_first else MONTH_FIRST
    if is_european != is_american:
        return DAY_FIRST if is_european else MONTH_FIRST
    spans = {order: _days(dates, order) for order in (DAY_FIRST, MONTH_FIRST)}
    if 5 * min(spans.values()) < max(spans.values()):
        return min(spans, key=lambda order: spans[order])
    example = next(iter(dates.values()))
    raise InvalidDataError(
        "program.dates-ambiguous",
        "{date:quote} can be day/month or month/day, and no date of the data decides it\n"
        "hint: --time_format=%d/%m/%Y or --time_format=%m/%d/%Y",
        date=example,
    )


def _days(dates: Iterable[tuple[int, int, int]], order: str) -> int:
    days = [datetime(year, *((other, one) if order == DAY_FIRST else (one, other))) for one, other, year in dates]
    return (max(days) - min(days)).days


def read_times(values: Sequence[Any], *, order: str | None, time_format: str = "") -> NDArray[np.float64]:
    """Return UTC seconds; NaN where a value is no time. Numbers beyond the year 2200 are milliseconds, microseconds or
    nanoseconds. `time_format`: of strptime, for all values; its time of day may be missing."""
    if time_format:
        return np.array([_formatted(value, time_format) for value in values], dtype=np.float64)
    found = np.array([read_time(value, order) for value in values], dtype=np.float64)
    usual = np.nanmedian(np.abs(found)) if np.isfinite(found).any() else 0.0
    while LATEST_S < usual < LATEST_S * 1e9:
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


NO_TIME = Text("program.no-time", "have no valid time (ISO, seconds since 1970, or a date as in --time_format)")
