"""Reader of AIS points from CSV or Parquet files of any known layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tables import read_table
from ascendrun.programs.trajectory.points.tracks import FASTEST_KNOTS, Cleaning, Floats, Limits, Track, cut_tracks
from ascendrun.text import Text

ALIASES = {
    "ship": ("vessel_id", "ship", "mmsi"),
    "track": ("track_id", "track"),
    "time": ("time", "date", "timestamp", "# timestamp", "basedatetime", "base_date_time"),
    "lat": ("lat", "latitude"),
    "lon": ("lon", "longitude", "lng"),
    "sog": ("sog", "speed"),
    "cog": ("cog", "course"),
    "heading": ("heading", "true_heading"),
    "length": ("length",),
    "width": ("width",),
    "class": ("vessel_class", "class", "label", "ship type"),
    "type_code": ("vesseltype", "vessel_type", "ais_type"),
    "sender": ("type of mobile",),
    "split": ("split",),
}
"""Column names by internal name, in lower case: those of MarineCadastre (US), of the Danish Maritime Authority, and
common names."""
NEEDED = ("time", "lat", "lon", "sog", "cog")
NO_CLASS = ("", "nan", "none", "undefined", "unknown")
DANISH_TIME = "%d/%m/%Y %H:%M:%S"
LATEST_S = 7_258_118_400
"""The year 2200. A later time is in milliseconds, or a mistake."""
NO_TIME = Text(
    "program.no-time", "have no valid time (ISO, seconds since 1970, or day/month/year hours:minutes:seconds)"
)
NO_PLACE = Text("program.no-place", "have no valid position")

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


def read_tracks(path: Path, *, columns: Mapping[str, str], limits: Limits) -> tuple[list[Track], Cleaning]:
    """Return all tracks of a file, or of all files of a directory. Raises InvalidDataError if no track is usable.

    `columns` maps internal names (the keys of ALIASES) to the file's; other names are found by ALIASES.
    """
    files = data_files(path)
    raw: list[Track] = []
    points, left_out, problems = 0, LeftOut(), []
    for file in files:
        try:
            table = read_table(file)
            found = match_columns(list(table.columns), columns, file)
        except InvalidDataError as error:
            problems.append(str(error))
            continue
        points += len(table.columns[found["time"]]) + table.torn
        left_out.add(
            Text("program.torn-lines", "are incomplete lines"),
            table.torn,
            Text("program.line-of-file", "line {line} of {file}", line=table.first_torn, file=file),
        )
        raw += clean_rows(table.columns, found, stem(file) if len(files) > 1 else "0", left_out)
    if problems:
        raise InvalidDataError.of(problems)
    tracks, counts = cut_tracks(raw, limits)
    if not tracks:
        cut = {reason: count for name, reason in CUT_AWAY.items() if (count := counts[name])}
        reasons = [Text("program.cut", "{count} {reason}", count=cut[reason], reason=reason) for reason in cut]
        raise InvalidDataError(
            "program.no-track",
            "{path}: no track of at least {least} points among {points}{why}\n"
            "hint: fix the data, lower --min_segment_size, or add data",
            path=path,
            least=limits.min_points,
            points=points,
            why=because([*left_out.reasons(), *reasons]),
        )
    return tracks, Cleaning(
        points=points, bad_points=left_out.count, tracks=len(tracks), **counts, why_bad=tuple(left_out.reasons())
    )


CUT_AWAY = {
    "repeated_points": Text("program.repeated", "repeat a time"),
    "outliers": Text("program.outliers", "are outliers"),
    "short_pieces": Text("program.short-segments", "segments are too short"),
}
"""Messages for the counts of cut_tracks."""


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
            Text("program.dropped", "{count} {reason}, such as {example}", count=count, reason=reason, example=such_as)
            for reason, (count, such_as) in self.found.items()
        ]


def because(reasons: Sequence[Text]) -> Text | str:
    return Text("program.reasons", " ({reasons})", reasons=list(reasons)) if reasons else ""


def data_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(
            file
            for file in path.iterdir()
            if file.name.endswith((".csv", ".csv.gz", ".parquet")) and not file.name.startswith(".")
        )
        if not files:
            raise InvalidDataError(
                "program.no-data-file", "{path}: no .csv, .csv.gz or .parquet file in this directory", path=path
            )
        return files
    if not path.is_file():
        raise InvalidDataError(
            "program.data-not-found",
            "{path}: file not found on this node; the data must be at the same path on every node",
            path=path,
        )
    if not path.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise InvalidDataError(
            "program.data-format",
            "{path}: expected .csv, .csv.gz or .parquet, or texts as .jsonl or .jsonl.gz",
            path=path,
        )
    return [path]


def stem(file: Path) -> str:
    return file.name.split(".", 1)[0]


def match_columns(names: Sequence[str], wanted: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return the file's column for each internal name. Raises InvalidDataError with all missing columns."""
    unknown = [key for key in wanted if key not in ALIASES]
    absent = [name for name in wanted.values() if name not in names]
    if unknown or absent:
        raise InvalidDataError(
            "program.unknown-columns",
            "--column_map: unknown names {unknown}; known names are {known}; {file} has the columns {columns}",
            unknown=list(unknown + absent),
            known=list(ALIASES),
            file=file,
            columns=list(names),
        )
    found = {**find_columns(names), **wanted}
    missing = [key for key in NEEDED if key not in found]
    if missing:
        raise InvalidDataError(
            "program.no-column",
            "{file}: no column for {missing} among {columns}\nhint: name it with --column_map={first}=NAME",
            file=file,
            missing=list(missing),
            columns=list(names),
            first=missing[0],
        )
    return found


def find_columns(names: Sequence[str]) -> dict[str, str]:
    """Return the file's column for each internal name found by ALIASES."""
    by_lower = {name.lower(): name for name in names}
    found = {
        key: next((by_lower[alias] for alias in aliases if alias in by_lower), None) for key, aliases in ALIASES.items()
    }
    return {key: name for key, name in found.items() if name is not None}


def clean_rows(
    table: Mapping[str, Sequence[Any]], found: Mapping[str, str], default_ship: str, left_out: LeftOut
) -> list[Track]:
    """Return one track per ship (and track id), of its usable points; the label is the first given. `left_out` counts
    the other points."""
    count = len(table[found["time"]])
    lat, lon = numbers(table[found["lat"]]), numbers(table[found["lon"]])
    sog, cog = numbers(table[found["sog"]]), numbers(table[found["cog"]])
    sog = np.where((sog < 0) | (sog > FASTEST_KNOTS), np.nan, sog)
    cog = np.where((cog < 0) | (cog >= 360), np.nan, cog)
    heading = optional_numbers(table, found, "heading", count)
    heading = np.where((heading < 0) | (heading >= 360), np.nan, heading)
    time = np.array([read_time(text) for text in table[found["time"]]], dtype=np.float64)
    usable = np.ones(count, dtype=bool)

    def leave_out(wrong: Any, key: str, reason: Text) -> None:
        rows = np.flatnonzero(usable & wrong)
        usable[rows] = False
        if len(rows):
            left_out.add(
                reason,
                len(rows),
                Text(
                    "program.value-in", "{value} in {column}", value=repr(table[found[key]][rows[0]]), column=found[key]
                ),
            )

    leave_out(~(np.abs(time) < LATEST_S), "time", NO_TIME)
    leave_out(~(np.abs(lat) <= 90), "lat", NO_PLACE)
    leave_out(~(np.abs(lon) <= 180) | ((lat == 0) & (lon == 0)), "lon", NO_PLACE)
    leave_out(
        ~np.array([is_ship(text) for text in texts(table, found, "sender", count, "")], dtype=bool),
        "sender",
        Text("program.not-a-ship", "are not from a ship"),
    )
    ships, tracks = texts(table, found, "ship", count, default_ship), texts(table, found, "track", count, "")
    groups: dict[tuple[str, str], list[int]] = {}
    for i in np.flatnonzero(usable):
        groups.setdefault((ships[i] or default_ship, tracks[i]), []).append(int(i))
    labels, splits = class_texts(table, found, count), texts(table, found, "split", count, "")
    length, width = (optional_numbers(table, found, name, count) for name in ("length", "width"))
    return [
        Track(
            track or ship,
            ship,
            time[rows].astype(np.int64),
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


def is_ship(sender: str) -> bool:
    """Return whether a ship sent it; base stations and buoys send positions too. Empty (no such column): true."""
    return sender in ("", "Class A", "Class B")


def class_texts(table: Mapping[str, Sequence[Any]], found: Mapping[str, str], count: int) -> list[str]:
    """Return the class column; without it, the class of each AIS ship type."""
    if "class" in found or "type_code" not in found:
        return texts(table, found, "class", count, "")
    codes = numbers(table[found["type_code"]])
    return ["" if not code > 0 else CLASS_OF_CODE.get(int(code), "Other") for code in codes]


def first_size(values: Floats, rows: Sequence[int]) -> float:
    """Return the first size in metres above 0; NaN if there is none."""
    return next((float(values[i]) for i in rows if values[i] > 0), float("nan"))


def optional_numbers(table: Mapping[str, Sequence[Any]], found: Mapping[str, str], key: str, count: int) -> Floats:
    return numbers(table[found[key]]) if key in found else np.full(count, np.nan)


def numbers(values: Sequence[Any]) -> Floats:
    """Convert to floats; a value that is not a number becomes NaN."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([one_number(value) for value in values], dtype=np.float64)


def one_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def read_time(value: Any) -> float:
    """Return UTC seconds of an ISO text, a datetime or a number of seconds; NaN for other values."""
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(value, (int, float)):
        return one_number(value)
    try:
        moment = datetime.fromisoformat(str(value).strip().replace("Z", "+00:00"))
    except ValueError:
        return danish_time(str(value).strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def danish_time(text: str) -> float:
    """Parse "03/01/2022 00:00:07", the third of January; else a number of seconds, else NaN."""
    try:
        return datetime.strptime(text, DANISH_TIME).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return one_number(text)


def texts(
    table: Mapping[str, Sequence[Any]], found: Mapping[str, str], key: str, count: int, default: str
) -> list[str]:
    if key not in found:
        return [default] * count
    return ["" if value is None else str(value).strip() for value in table[found[key]]]


def first_given(values: Sequence[str], rows: Sequence[int]) -> str:
    return next((values[i] for i in rows if values[i]), "")


def class_name(text: str) -> str | None:
    """Return the class name, None if unknown; numbers 0 to 13 become NUMBERED_CLASSES."""
    if text.lower() in NO_CLASS:
        return None
    number = one_number(text)
    if number.is_integer() and 0 <= number < len(NUMBERED_CLASSES):
        return NUMBERED_CLASSES[int(number)]
    return text


def split_name(text: str) -> str | None:
    """Return a common split name as one of SPLITS; others in lower case, for split_records to check; None if empty."""
    return {"validation": "val", "valid": "val", "dev": "val"}.get(text.lower(), text.lower()) or None
