"""Reader of AIS points from CSV or Parquet files of any known layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ascendrun.facts.columns import Columns
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points import tables
from ascendrun.programs.trajectory.points import tracks as points
from ascendrun.programs.trajectory.points.clean import (
    LeftOut,
    class_name,
    class_texts,
    clean_rows,
    texts,
    without_fraction,
)
from ascendrun.text import Text, listed

CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")
DIFFERENT_DEGREES = 60.0
"""Median difference of course and path above which the column is no course."""
STEADY = 1.0
"""Interquartile range of the factor, in logarithms, up to which speeds differ from distances by a constant factor."""
LEAST_SIZED = 5
"""Number of ships of one length from which that length is a filler."""
NO_POINT, TOO_SHORT = listed("program.no-usable-point"), listed("program.too-short")
REPEATED = 0.2
"""Share of the points from which repeated times at other places are noted."""
TWO_SHIPS = listed("program.two-ships")


@dataclass(frozen=True)
class Reading:
    """How files are read. `columns` maps internal names (the keys of ALIASES) to the file's; others are found by
    ALIASES. `units`: of the speeds; auto: knots, checked by the distances. `time_format`: of strptime; "": times.py."""

    columns: Mapping[str, str] = field(default_factory=dict)
    units: str = "auto"
    time_format: str = ""


@dataclass
class Source:
    """One file. `tracks`: by time, each time once. `derives_speed`, `derives_course`: the file has none of its own.
    `names_ships`: it says of which ship a point is. `classes`: number of different classes in it."""

    file: Path
    columns: Columns
    tracks: list[points.Track] = field(default_factory=list)
    derives_speed: bool = False
    derives_course: bool = False
    names_ships: bool = True
    classes: int = 0


def read_tracks(path: Path, reading: Reading, *, limits: points.Limits) -> tuple[list[points.Track], points.Cleaning]:
    """Return all tracks of a file, or of all files of a directory.

    Raises InvalidDataError, with the problems of all files and the options that solve them, if no track is usable or a
    column could be understood in two ways.
    """
    imported = Import(reading, limits)
    for file in data_files(path):
        imported.add(file)
    return imported.finish(path)


class Import:
    """The reading of several files: problems and notes of all of them are collected."""

    def __init__(self, reading: Reading, limits: points.Limits) -> None:
        self._reading, self._limits = reading, limits
        self._problems: list[Text | str] = []
        self._notes: list[Text] = []
        self._left_out = LeftOut()
        self._points = self._repeated = 0
        self._waiting: list[tuple[Source, tables.Table]] = []  # the order of day and month is decided over all files
        self._sources: list[Source] = []
        self._unmatched: dict[tuple[str, ...], int] = {}
        self._ships: dict[str, Text] = {}  # all that are named, and why one has no track
        self._elsewhere = 0  # points that repeat a time at another place

    def add(self, file: Path) -> None:
        try:
            table = with_dates(tables.read_table(file))
            names = tuple(table.columns)
            if names in self._unmatched:
                self._unmatched[names] += 1
                return
            self._unmatched[names] = 0
            source = Source(file, tables.match_columns(table.columns, self._reading.columns, file))
            del self._unmatched[names]
        except InvalidDataError as error:
            self._problems.append(str(error))
            return
        self._points += len(table.columns[source.columns.of["time"]]) + table.torn
        self._left_out.add(
            listed("program.torn-lines"), table.torn, listed("program.line-of-file", line=table.first_torn, file=file)
        )
        self._sources.append(source)
        if not self._reading.time_format and any(map(tables.is_date, table.columns[source.columns.of["time"]])):
            self._waiting.append((source, table))
        else:
            self._clean(source, table, None)

    def finish(self, path: Path) -> tuple[list[points.Track], points.Cleaning]:
        more = sum(self._unmatched.values())
        if more:
            self._problems.append(listed("program.files-alike", count=more))
        names = [source.columns.of["time"] for source, _ in self._waiting]
        times = [(name, table.columns[name]) for name, (_, table) in zip(names, self._waiting)]
        try:
            order = tables.order_of_dates(times)
        except InvalidDataError as error:
            raise InvalidDataError.of([*self._problems, str(error)]) from error
        for source, table in self._waiting:
            self._clean(source, table, order)
        self._check_ships()
        self._check_motion()
        if self._problems:
            raise InvalidDataError.of(self._problems)
        spelled: dict[str, str] = {}
        self._join_ships()
        raw = [
            points.with_derived(spelled_alike(track, spelled), speed=source.derives_speed, course=source.derives_course)
            for source in self._sources
            for track in source.tracks
        ]
        tracks, counts = points.cut_tracks(raw, self._limits)
        counts["repeated_points"] += self._repeated
        if not tracks:
            raise self._no_track(path, counts)
        bad, why = self._left_out.count, tuple(self._left_out.reasons())
        notes = tuple(self._notes)
        self._ships.update(dict.fromkeys((track.ship for track in raw), TOO_SHORT))
        kept = {track.ship for track in tracks}
        dropped = {ship: reason for ship, reason in self._ships.items() if ship not in kept}
        return tracks, points.Cleaning(
            points=self._points, bad_points=bad, tracks=len(tracks), **counts, why_bad=why, dropped=dropped, notes=notes
        )

    def _join_ships(self) -> None:
        """Read a ship with and without leading zeros as one, and note it; and note many repeated times."""
        tracks = [track for source in self._sources for track in source.tracks]
        names: dict[str, str] = {}
        for ship in sorted({track.ship for track in tracks}, key=len, reverse=True):
            names.setdefault(ship.lstrip("0") if ship.isdigit() else ship, ship)
        own = {track.ship: names[track.ship.lstrip("0") if track.ship.isdigit() else track.ship] for track in tracks}
        joined = [ship for ship, name in own.items() if ship != name]
        for source in self._sources:
            source.tracks = [replace(track, ship=own[track.ship]) for track in source.tracks]
        for ship in joined:
            self._ships.pop(ship, None)
        if joined:
            self._notes.append(listed("program.leading-zeros", count=len(joined), ship=joined[0]))
        if self._elsewhere > REPEATED * self._points:
            self._notes.append(listed("program.times-repeated", count=self._elsewhere, points=self._points))

    def _no_track(self, path: Path, counts: Mapping[str, int]) -> InvalidDataError:
        cut = {reason: count for name, reason in CUT_AWAY.items() if (count := counts[name])}
        reasons = [listed("program.cut", count=cut[reason], reason=reason) for reason in cut]
        return InvalidDataError(
            listed(
                "program.no-track",
                path=path,
                least=self._limits.min_points,
                points=self._points,
                why=because([*self._left_out.reasons(), *reasons]),
            )
        )

    def _clean(self, source: Source, table: tables.Table, order: str | None) -> None:
        columns = source.columns
        unit = columns.speed_unit or "knots" if self._reading.units == "auto" else self._reading.units
        found = self._without_fillers(source, table)
        raw = clean_rows(
            table.columns,
            found,
            source.file.name.split(".", 1)[0],
            self._left_out,
            times=tables.read_times(table.columns[found["time"]], order=order, time_format=self._reading.time_format),
            knots=tables.KNOTS[unit],
        )
        ordered = [points.in_order(track) for track in raw]
        self._repeated += sum(again for _, again in ordered)
        self._elsewhere += sum(
            len(set(zip(track.time.tolist(), track.lat.tolist(), track.lon.tolist()))) - len(alone)
            for track, (alone, _) in zip(raw, ordered)
        )
        ships = texts(table.columns, found, "ship", len(table.columns[found["time"]]), "")
        for ship in filter(None, map(without_fraction, ships)):
            self._ships.setdefault(ship, NO_POINT)
        source.tracks = [track for track, _ in ordered]
        source.classes = len(set(class_texts(table.columns, found, len(table.columns[found["time"]]))) - {""})
        source.derives_speed, source.derives_course = "sog" not in found, "cog" not in found
        source.names_ships = bool({"ship", "track"} & set(found))
        self._note_classes(source, table, found)
        if source.derives_speed or source.derives_course:
            what = [key for key in ("sog", "cog") if key not in found]
            self._notes.append(listed("program.derived", file=source.file, what=what))
            unused = [name for name in table.columns if name not in columns.of.values()]
            if unused and what[0] not in self._reading.columns:
                self._notes.append(listed("program.columns-unused", columns=unused, what=what[0]))

    def _without_fillers(self, source: Source, table: tables.Table) -> dict[str, str]:
        """Return the file's columns without those that are empty or have one number for all ships; these are noted."""
        found = dict(source.columns.of)
        for key in ("sog", "cog", "heading", "length", "width"):
            value = tables.only_value(tables.numbers(table.columns[found[key]])) if key in found else None
            if value is None or not (np.isnan(value) or self._should_vary(key, table, found)):
                continue
            self._notes.append(
                listed("program.column-empty", file=source.file, column=found[key])
                if np.isnan(value)
                else listed("program.column-constant", file=source.file, column=found[key], value=value)
            )
            del found[key]
        if "ship" in found and not any(texts(table.columns, found, "ship", 0, "")):
            self._notes.append(listed("program.column-empty", file=source.file, column=found.pop("ship")))
        return found

    def _note_classes(self, source: Source, table: tables.Table, found: Mapping[str, str]) -> None:
        """Note ships with several classes, of which the first is used."""
        count = len(table.columns[found["time"]])
        of_ship: dict[str, set[str]] = {}
        for ship, name in zip(texts(table.columns, found, "ship", count, ""), class_texts(table.columns, found, count)):
            if ship and class_name(name):
                of_ship.setdefault(ship, set()).add(name.casefold())
        several = [ship for ship, names in of_ship.items() if len(names) > 1]
        if several:
            self._notes.append(listed("program.several-classes", file=source.file, count=len(several), ship=several[0]))

    def _should_vary(self, key: str, table: tables.Table, found: Mapping[str, str]) -> bool:
        """Return whether the same number in every row is a filler: for ships that move, or for several ships."""
        if key in ("length", "width"):
            sizes = tables.numbers(table.columns[found[key]])
            ships = texts(table.columns, found, "ship", len(sizes), "")
            return len({ships[i] for i in np.flatnonzero(sizes > 0)}) >= LEAST_SIZED
        lat, lon = (tables.numbers(table.columns[found[name]]) for name in ("lat", "lon"))
        return bool(np.nanmax(lat, initial=-90) - np.nanmin(lat, initial=90) > 0.01) or bool(
            np.nanmax(lon, initial=-180) - np.nanmin(lon, initial=180) > 0.01
        )

    def _check_ships(self) -> None:
        """Drop names that belong to several ships. Without a ship column each file is one ship."""
        no_column = [source for source in self._sources if not source.names_ships]
        for source in self._sources:
            jumping = source.tracks if self._limits.max_knots else ()
            shared = [track for track in jumping if points.is_shared_name(track)]
            if not source.names_ships and (shared or source.classes > 1):
                self._problems.append(listed("program.no-ship-column", file=source.file))
            self._ships.update(dict.fromkeys((track.ship for track in shared), TWO_SHIPS))
            for track in shared:
                self._left_out.add(TWO_SHIPS, len(track), listed("program.ship-of-file", ship=track.ship))
            source.tracks = [track for track in source.tracks if track not in shared]
        if no_column:
            self._notes.append(listed("program.ship-per-file", count=len(no_column)))

    def _check_motion(self) -> None:
        """Compare speeds and courses with the distances: of each file, or of all files too small for that together."""
        small: list[Source] = []
        for source in self._sources:
            found = points.agreement(source.tracks)
            if found is None:
                small.append(source)
            else:
                self._judge(source, found)
        rest = [track for source in small for track in source.tracks]
        together = points.agreement(rest)
        if together is not None:
            self._judge(small[0], together)
        elif (slow := points.agreement(rest, points.LONGEST_AT_ALL_S)) and self._reading.units == "auto":
            if abs(np.log(slow.factor)) > np.log(points.GROSSLY):
                self._judge_speed(small[0], replace(slow, spread=0.0))
        for source in self._sources:
            courses = np.concatenate([np.empty(0), *(track.cog for track in source.tracks)])
            if points.is_in_radians(courses) and not fits_paths(source.tracks):
                column = source.columns.of.get("cog", "cog")
                self._problems.append(listed("program.course-radians", file=source.file, column=column))

    def _judge(self, source: Source, found: points.Agreement) -> None:
        columns, file = source.columns.of, source.file
        if found.is_exchanged:
            self._problems.append(
                listed("program.coordinates-exchanged", file=file, lat=columns["lat"], lon=columns["lon"])
            )
            return
        if found.turned > DIFFERENT_DEGREES:
            self._problems.append(
                listed("program.course-differs", file=file, column=columns.get("cog", "cog"), degrees=found.turned)
            )
        if self._reading.units == "auto" and found.unit() != "knots":
            self._judge_speed(source, found)

    def _judge_speed(self, source: Source, found: points.Agreement) -> None:
        """Report speeds that are not in knots, or note that they do not match the distances."""
        columns, file = source.columns.of, source.file
        knots = tables.KNOTS[source.columns.speed_unit or "knots"]
        unit, factor = found.unit(knots), found.factor * knots
        if unit is not None:
            self._problems.append(
                listed("program.speed-unit", file=file, column=columns.get("sog", "sog"), unit=unit, factor=factor)
            )
        elif found.spread < STEADY:
            self._problems.append(
                listed("program.speed-differs", file=file, column=columns.get("sog", "sog"), factor=factor)
            )
        else:
            self._notes.append(
                listed("program.speed-unsteady", file=file, column=columns.get("sog", "sog"), factor=found.factor)
            )


def fits_paths(tracks: Sequence[points.Track]) -> bool:
    """Return whether the paths agree with courses in degrees, which may all be near 0."""
    found = points.agreement(tracks, points.LONGEST_AT_ALL_S)
    return found is not None and found.turned < DIFFERENT_DEGREES


CUT_AWAY = {
    "repeated_points": listed("program.repeated"),
    "outliers": listed("program.outliers"),
    "short_pieces": listed("program.short-segments"),
}
"""Messages for the counts of cut_tracks."""


def because(reasons: Sequence[Text]) -> Text | str:
    return listed("program.reasons", reasons=list(reasons)) if reasons else ""


def data_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(
            file
            for file in path.iterdir()
            if file.name.endswith((".csv", ".csv.gz", ".parquet")) and not file.name.startswith(".")
        )
        if not files:
            raise InvalidDataError(listed("program.no-data-file", path=path))
        return files
    if not path.is_file():
        raise InvalidDataError(listed("program.data-not-found", path=path))
    if not path.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise InvalidDataError(listed("program.data-format", path=path))
    return [path]


def with_dates(table: tables.Table) -> tables.Table:
    """Return the table with the dates in its time column, where `date` and `time` are two columns."""
    names = {name.strip().lower(): name for name in table.columns}
    if not {"date", "time"} <= set(names):
        return table
    dates, clocks = (table.columns[names[key]] for key in ("date", "time"))
    if not all(CLOCK.fullmatch(str(value).strip()) for value in clocks if value not in ("", None)):
        return table
    joined = [f"{str(date).strip()} {str(clock).strip()}" for date, clock in zip(dates, clocks)]
    return replace(table, columns={**table.columns, names["time"]: joined})


def spelled_alike(track: points.Track, spelled: dict[str, str]) -> points.Track:
    """Return the track with its class as first spelled: Cargo and CARGO are one class."""
    if track.label is None or spelled.setdefault(track.label.casefold(), track.label) == track.label:
        return track
    return replace(track, label=spelled[track.label.casefold()])
