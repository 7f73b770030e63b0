"""Reads AIS points from CSV or Parquet and cuts them into clean tracks."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, TextIO, Tuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ALIASES = {
    "ship": ("vessel_id", "ship", "mmsi"),
    "track": ("track_id", "track"),
    "time": ("time", "date", "timestamp", "basedatetime", "base_date_time"),
    "lat": ("lat", "latitude"),
    "lon": ("lon", "longitude", "lng"),
    "sog": ("sog", "speed"),
    "cog": ("cog", "course"),
    "class": ("vessel_class", "class", "label"),
    "split": ("split",),
}
NEEDED = ("time", "lat", "lon", "sog", "cog")
FASTEST_KNOTS = 102.2
"""AIS sends 102.3 for "no speed"; nothing above 102.2 is a measurement."""
SPLITS = ("train", "val", "test")

NUMBERED_CLASSES = (
    "Bulk_Carrier", "Cargo_Ship", "Container_Ship", "Barge", "Fishing_Vessel", "Other", "Oil_Tanker", "Passenger_Ship",
    "Sand_Carrier", "Fishery_Research_Vessel", "Supply_Ship", "Storage_Tanker", "Submarine", "Transport_Ship",
)
"""Names of the classes that some data sets give as numbers 0 to 13."""


class BadData(Exception):
    """The data cannot be used as it is; the message says what is wrong and what would be right."""


@dataclass(frozen=True)
class Track:
    """Consecutive points of one ship, oldest first. `time`: UTC seconds; `sog`: knots; `cog`: degrees; NaN: not
    known. `label` None: the class is not known; `split` None: the data does not say."""

    id: str
    ship: str
    time: NDArray[np.int64]
    lat: Floats
    lon: Floats
    sog: Floats
    cog: Floats
    label: Optional[str]
    split: Optional[str]

    def __len__(self) -> int:
        return len(self.time)

    def part(self, start: int, stop: int) -> "Track":
        cut = slice(start, stop)
        return replace(self, id=f"{self.id}/{start}", time=self.time[cut], lat=self.lat[cut], lon=self.lon[cut],
                       sog=self.sog[cut], cog=self.cog[cut])


@dataclass(frozen=True)
class Limits:
    """How tracks are cut: at silences over `gap_s`, into pieces of `segment_points`; under `min_points`: dropped."""

    gap_s: int = 3600
    segment_points: int = 30
    min_points: int = 10


@dataclass(frozen=True)
class Cleaning:
    """What was read and what was left out."""

    points: int
    bad_points: int
    repeated_points: int
    short_pieces: int
    tracks: int


def read_tracks(path: Path, *, columns: Mapping[str, str], limits: Limits) -> Tuple[List[Track], Cleaning]:
    """All tracks of a file, or of all files of a folder. Raises BadData when there is nothing to use.

    `columns` maps our names (the keys of ALIASES) to the file's; what it does not name is found by ALIASES.
    """
    files = data_files(path)
    raw: List[Track] = []
    points = bad = repeated = short = 0
    for file in files:
        table = read_parquet(file) if file.suffix == ".parquet" else read_csv(file)
        found = match_columns(list(table), columns, file)
        count = len(table[found["time"]])
        points += count
        rows = clean_rows(table, found, stem(file) if len(files) > 1 else "0")
        bad += count - sum(len(track) for track in rows)
        raw += rows
    tracks: List[Track] = []
    for track in raw:
        ordered, again = in_order(track)
        repeated += again
        for piece in pieces(ordered, limits):
            if len(piece) < limits.min_points:
                short += 1
            else:
                tracks.append(piece)
    if not tracks:
        raise BadData(f"{path}: no track of at least {limits.min_points} points among {points} points; "
                      "lower --min_points or give more data")
    return tracks, Cleaning(points, bad, repeated, short, len(tracks))


def data_files(path: Path) -> List[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith((".csv", ".csv.gz", ".parquet")))
        if not files:
            raise BadData(f"{path}: no .csv, .csv.gz or .parquet file in this folder")
        return files
    if not path.is_file():
        raise BadData(f"{path}: no such file on this node; data must be at the same path on every node")
    if not path.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise BadData(f"{path}: must be .csv, .csv.gz or .parquet")
    return [path]


def stem(file: Path) -> str:
    return file.name.split(".", 1)[0]


def read_parquet(file: Path) -> Dict[str, Sequence[Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise BadData(f"{file}: reading Parquet needs pyarrow; install it or give the data as CSV") from None
    return dict(parquet.read_table(file).to_pydict())


def read_csv(file: Path) -> Dict[str, Sequence[Any]]:
    with open_text(file) as lines:
        rows = csv.reader(lines)
        header = next(rows, None)
        if not header:
            raise BadData(f"{file}: empty; the first line must name the columns")
        body = [row for row in rows if len(row) == len(header)]
    return {name.strip(): [row[i] for row in body] for i, name in enumerate(header)}


def open_text(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return open(file, encoding="utf-8-sig", newline="")


def match_columns(names: Sequence[str], wanted: Mapping[str, str], file: Path) -> Dict[str, str]:
    """The file's column for each of our names. Raises BadData with all that is missing."""
    unknown = [key for key in wanted if key not in ALIASES]
    absent = [name for name in wanted.values() if name not in names]
    if unknown or absent:
        raise BadData(f"--columns: {', '.join(unknown + absent)} not known; ours are {', '.join(ALIASES)}, "
                      f"{file} has {', '.join(names)}")
    by_lower = {name.lower(): name for name in names}
    found = dict(wanted)
    for key, aliases in ALIASES.items():
        name = next((by_lower[alias] for alias in aliases if alias in by_lower), None)
        if key not in found and name is not None:
            found[key] = name
    missing = [key for key in NEEDED if key not in found]
    if missing:
        raise BadData(f"{file}: no column for {', '.join(missing)} among {', '.join(names)}; "
                      f"name it with --columns={missing[0]}=NAME")
    return found


def clean_rows(table: Mapping[str, Sequence[Any]], found: Mapping[str, str], default_ship: str) -> List[Track]:
    """One track per ship (and track id), of its usable points; the label is the first one given."""
    count = len(table[found["time"]])
    lat, lon = numbers(table[found["lat"]]), numbers(table[found["lon"]])
    sog, cog = numbers(table[found["sog"]]), numbers(table[found["cog"]])
    sog = np.where((sog < 0) | (sog > FASTEST_KNOTS), np.nan, sog)
    cog = np.where((cog < 0) | (cog >= 360), np.nan, cog)
    time = np.array([read_time(text) for text in table[found["time"]]], dtype=np.float64)
    usable = (np.abs(lat) <= 90) & (np.abs(lon) <= 180) & ~((lat == 0) & (lon == 0)) & np.isfinite(time)
    ships = texts(table, found, "ship", count, default_ship)
    tracks = texts(table, found, "track", count, "")
    groups: Dict[Tuple[str, str], List[int]] = {}
    for i in np.flatnonzero(usable):
        groups.setdefault((ships[i] or default_ship, tracks[i]), []).append(int(i))
    labels, splits = texts(table, found, "class", count, ""), texts(table, found, "split", count, "")
    return [
        Track(track or ship, ship, time[rows].astype(np.int64), lat[rows], lon[rows], sog[rows], cog[rows],
              class_name(first_given(labels, rows)), split_name(first_given(splits, rows)))
        for (ship, track), rows in groups.items()
    ]


def numbers(values: Sequence[Any]) -> Floats:
    """As floats; what is no number becomes NaN."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        return np.array([one_number(value) for value in values], dtype=np.float64)


def one_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def read_time(value: Any) -> float:
    """UTC seconds of an ISO text, a datetime or a number of seconds; NaN when it is none of these."""
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(value, (int, float)):
        return float(value)
    try:
        moment = datetime.fromisoformat(str(value).strip().replace("Z", "+00:00"))
    except ValueError:
        return one_number(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def texts(table: Mapping[str, Sequence[Any]], found: Mapping[str, str], key: str, count: int,
          default: str) -> List[str]:
    if key not in found:
        return [default] * count
    return ["" if value is None else str(value).strip() for value in table[found[key]]]


def first_given(values: Sequence[str], rows: Sequence[int]) -> str:
    return next((values[i] for i in rows if values[i]), "")


def class_name(text: str) -> Optional[str]:
    """The class as a name; numbers 0 to 13 become NUMBERED_CLASSES."""
    if not text or text.lower() == "nan":
        return None
    number = one_number(text)
    if number.is_integer() and 0 <= number < len(NUMBERED_CLASSES):
        return NUMBERED_CLASSES[int(number)]
    return text


def split_name(text: str) -> Optional[str]:
    if not text:
        return None
    name = {"validation": "val", "valid": "val", "dev": "val"}.get(text.lower(), text.lower())
    if name not in SPLITS:
        raise BadData(f"split {text!r} is none of {', '.join(SPLITS)}; rename it, or use --split_column=false")
    return name


def in_order(track: Track) -> Tuple[Track, int]:
    """The track by time, each moment once; and how many points were left out."""
    _, first = np.unique(track.time, return_index=True)
    ordered = replace(track, time=track.time[first], lat=track.lat[first], lon=track.lon[first],
                      sog=track.sog[first], cog=track.cog[first])
    return ordered, len(track) - len(ordered)


def pieces(track: Track, limits: Limits) -> Iterator[Track]:
    silences = np.flatnonzero(np.diff(track.time) > limits.gap_s) + 1
    bounds = [0, *silences.tolist(), len(track)]
    for start, stop in zip(bounds, bounds[1:]):
        for cut in range(start, stop, limits.segment_points):
            yield track.part(cut, min(cut + limits.segment_points, stop))
