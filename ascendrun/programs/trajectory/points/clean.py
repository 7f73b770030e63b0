"""From the rows of a table to tracks: usable points by ship, with classes, sizes and directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascendrun.facts.columns import LATEST_S
from ascendrun.programs.trajectory.points.tables import NO_TIME, numbers, one_number
from ascendrun.programs.trajectory.points.tracks import FASTEST_KNOTS, Floats, Track
from ascendrun.text import Text, listed

MISSING = ("nan", "none", "null", "na", "n/a", "<na>", "\\n")
"""What libraries and databases write for a value that is not there, in lower case."""
NO_CLASS = ("", "undefined", "unknown", "unspecified")
NO_PLACE = listed("program.no-place")
LEAST_NEGATIVE = 5
"""Number of different negative courses from which they are those of -180 to 180 degrees."""
LEAST_WEST = 10
"""Number of longitudes above 180 from which they are those of 0 to 360 degrees."""
NO_LONGITUDE = 181.0
TYPES = (20, 99)
"""The lowest and the highest AIS ship type in use; where most codes are others, they are those of another table."""
LONGEST_SHIP_M = 500.0
SHIPS = ("", "Class A", "Class B")
"""Senders; base stations and buoys send positions too. Empty: there is no such column."""
NUMBERED_CLASSES = (
    "Bulk_Carrier", "Cargo_Ship", "Container_Ship", "Barge", "Fishing_Vessel", "Other", "Oil_Tanker",
    "Passenger_Ship", "Sand_Carrier", "Fishery_Research_Vessel", "Supply_Ship", "Storage_Tanker", "Submarine",
    "Transport_Ship",
)  # fmt: skip
"""Names of the classes that some data sets number from 0 to 13."""
CLASS_OF_CODE = {
    30: "Fishing",
    31: "Tug_Tow",
    32: "Tug_Tow",
    52: "Tug_Tow",
    36: "Pleasure_Sailing",
    37: "Pleasure_Sailing",
    **dict.fromkeys(range(60, 70), "Passenger"),
    **dict.fromkeys(range(70, 80), "Cargo"),
    **dict.fromkeys(range(80, 90), "Tanker"),
}
"""Class by AIS ship type; 0 and missing are unknown, all others `Other`."""


@dataclass
class LeftOut:
    """Unusable points: their number for each reason, with an example."""

    found: dict[Text, tuple[int, Text]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(count for count, _ in self.found.values())

    def add(self, reason: Text, count: int, such_as: Text) -> None:
        before, first = self.found.get(reason, (0, such_as))
        if count:
            self.found[reason] = before + count, first

    def reasons(self) -> list[Text]:
        return [
            listed("program.dropped", count=count, reason=reason, example=such_as)
            for reason, (count, such_as) in self.found.items()
        ]


def clean_rows(
    table: Mapping[str, Sequence[Any]],
    found: Mapping[str, str],
    default_ship: str,
    left_out: LeftOut,
    *,
    times: Floats,
    knots: float = 1.0,
) -> list[Track]:
    """Return one track per ship (and track id), of its usable points; the label is the first given.

    `left_out` counts the other points. `times`: UTC seconds, NaN: invalid. `knots`: in one unit of the speeds.
    """
    count = len(times)
    lat, lon = numbers(table[found["lat"]]), numbers(table[found["lon"]])
    sog = optional_numbers(table, found, "sog", count) * knots
    sog = np.where((sog < 0) | (sog > FASTEST_KNOTS), np.nan, sog)
    cog, heading = (directions(optional_numbers(table, found, key, count)) for key in ("cog", "heading"))
    is_west = (lon > 180) & (lon <= 360) & (lon != NO_LONGITUDE)
    if len(np.unique(lon[is_west])) >= LEAST_WEST:
        lon = np.where(is_west, lon - 360, lon)
    ships = [without_fraction(text) for text in texts(table, found, "ship", count, default_ship)]
    tracks = texts(table, found, "track", count, "")
    usable = usable_rows(table, found, left_out, times=times, places=(lat, lon), names=(ships, tracks))
    groups: dict[tuple[str, str], list[int]] = {}
    for i in np.flatnonzero(usable):
        groups.setdefault((ships[i] or default_ship, tracks[i]), []).append(int(i))
    labels, splits = class_texts(table, found, count), texts(table, found, "split", count, "")
    length, width = (optional_numbers(table, found, name, count) for name in ("length", "width"))
    return [
        Track(
            track or ship,
            ship,
            times[rows].astype(np.int64),
            lat[rows],
            lon[rows],
            sog[rows],
            cog[rows],
            class_name(first_given(labels, rows)),
            split_name(first_given(splits, rows)),
            heading[rows],
            first_size(length, rows),
            first_size(width, rows),
        )
        for (ship, track), rows in groups.items()
    ]


def usable_rows(
    table: Mapping[str, Sequence[Any]],
    found: Mapping[str, str],
    left_out: LeftOut,
    *,
    times: Floats,
    places: tuple[Floats, Floats],
    names: tuple[Sequence[str], Sequence[str]],
) -> Any:
    """Return which rows can be used; `left_out` counts the others.

    `places`: latitudes and longitudes. `names`: of ships and tracks.
    """
    count, (lat, lon), (ships, tracks) = len(times), places, names
    usable = np.ones(count, dtype=bool)

    def leave_out(wrong: Any, key: str, reason: Text) -> None:
        rows = np.flatnonzero(usable & wrong)
        usable[rows] = False
        if len(rows):
            left_out.add(
                reason, len(rows), listed("program.value-in", value=repr(table[found[key]][rows[0]]), column=found[key])
            )

    leave_out(~(np.abs(times) < LATEST_S), "time", NO_TIME)
    leave_out(~(np.abs(lat) <= 90), "lat", NO_PLACE)
    leave_out(~(np.abs(lon) <= 180) | ((lat == 0) & (lon == 0)), "lon", NO_PLACE)
    leave_out(~np.isin(texts(table, found, "sender", count, ""), SHIPS), "sender", listed("program.not-a-ship"))
    if any(ships):
        leave_out(
            ~np.array([bool(ship or track) for ship, track in zip(ships, tracks)], dtype=bool),
            "ship",
            listed("program.no-ship"),
        )
    return usable


def class_texts(table: Mapping[str, Sequence[Any]], found: Mapping[str, str], count: int) -> list[str]:
    """Return the class column; without it, the class of each AIS ship type."""
    if "class" in found or "type_code" not in found:
        return texts(table, found, "class", count, "")
    codes = numbers(table[found["type_code"]])
    is_type = (codes >= TYPES[0]) & (codes <= TYPES[1])
    if (codes != 0).any() and is_type.sum() <= (codes > 0).sum() / 2:
        return texts(table, found, "type_code", count, "")
    return ["" if not code > 0 else CLASS_OF_CODE.get(int(code), "Other") for code in codes]


def directions(values: Floats) -> Floats:
    """Return degrees from 0 to 360, NaN: unknown. Some files have -180 to 180; a single -1 is a filler."""
    is_west = (values >= -180) & (values < 0)
    if len(np.unique(values[is_west])) >= LEAST_NEGATIVE:
        values = np.where(is_west, values + 360, values)
    return np.where((values < 0) | (values >= 360), np.nan, values)


def without_fraction(ship: str) -> str:
    """Return 219000001 for 219000001.0: a column with gaps has its numbers as floats, another file of the ship not."""
    return ship[:-2] if ship.endswith(".0") and ship[:-2].isdigit() else ship


def first_size(values: Floats, rows: Sequence[int]) -> float:
    """Return the first size in metres that a ship can have; NaN if there is none."""
    return next((float(values[i]) for i in rows if 0 < values[i] < LONGEST_SHIP_M), float("nan"))


def optional_numbers(table: Mapping[str, Sequence[Any]], found: Mapping[str, str], key: str, count: int) -> Floats:
    return numbers(table[found[key]]) if key in found else np.full(count, np.nan)


def texts(
    table: Mapping[str, Sequence[Any]], found: Mapping[str, str], key: str, count: int, default: str
) -> list[str]:
    if key not in found:
        return [default] * count
    given = ("" if value is None else str(value).strip() for value in table[found[key]])
    return ["" if text.lower() in MISSING else text for text in given]


def first_given(values: Sequence[str], rows: Sequence[int]) -> str:
    return next((values[i] for i in rows if values[i]), "")


def class_name(text: str) -> str | None:
    """Return the class name, None if unknown. A code stays a code: its table is not known."""
    return None if text.lower() in (*NO_CLASS, *MISSING) else without_fraction(text)


def numbered_class(text: str) -> str | None:
    """Return the class of a text of the field guides; numbers 0 to 13 become NUMBERED_CLASSES."""
    number = one_number(text)
    if number.is_integer() and 0 <= number < len(NUMBERED_CLASSES):
        return NUMBERED_CLASSES[int(number)]
    return class_name(text)


def split_name(text: str) -> str | None:
    """Return a common split name as one of SPLITS; others in lower case, for split_records to check; None if empty."""
    return {"validation": "val", "valid": "val", "dev": "val"}.get(text.lower(), text.lower()) or None
