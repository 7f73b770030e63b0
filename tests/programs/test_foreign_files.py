"""AIS files as sites have them: each is read right, or refused with the option that reads it; none is read wrong."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.points.read_ais import TWO_SHIPS, Reading, read_tracks
from ascendrun.programs.trajectory.points.tracks import Limits, Track

pytestmark = pytest.mark.counts
LIMITS = Limits(gap_s=3600, segment_points=10_000, min_points=3, max_knots=100)
TRUTH = [track for track in generate(40, seed=11) if track.sog.max() > 3][:16]
Row = dict[str, Any]


def rows_of(tracks: list[Track]) -> list[Row]:
    return [
        {
            "mmsi": 219_000_000 + number,
            "time": datetime.fromtimestamp(int(track.time[i]), timezone.utc).strftime("%Y-%m-%dT%H:%M:%S"),
            "lat": f"{track.lat[i]:.6f}",
            "lon": f"{track.lon[i]:.6f}",
            "sog": "" if np.isnan(track.sog[i]) else f"{track.sog[i]:.2f}",
            "cog": "" if np.isnan(track.cog[i]) else f"{track.cog[i]:.1f}",
            "length": 20 + number,
            "class": track.label,
        }
        for number, track in enumerate(tracks)
        for i in range(len(track))
    ]


def write(path: Path, rows: list[Row], *, separator: str = ",") -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def changed(change: Callable[[Row], Row]) -> list[Row]:
    return [change(dict(row)) for row in rows_of(TRUTH)]


def renamed(**names: str) -> list[Row]:
    return changed(lambda row: {names.get(key, key): value for key, value in row.items()})


def when(row: Row) -> datetime:
    return datetime.strptime(row["time"], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)


def dated(form: str, *, zone_hours: float = 0.0) -> list[Row]:
    return changed(lambda row: {**row, "time": (when(row) + timedelta(hours=zone_hours)).strftime(form)})


def assert_right(tracks: list[Track]) -> None:
    """Compare with the truth: times, places, and speeds and courses within a tolerance, where both have them."""
    by_ship = {track.ship: track for track in tracks}
    assert len(by_ship) == len(TRUTH)
    for number, truth in enumerate(TRUTH):
        track = by_ship[str(219_000_000 + number)]
        assert np.array_equal(track.time, truth.time)
        assert np.allclose(track.lat, truth.lat, atol=1e-5) and np.allclose(track.lon, truth.lon, atol=1e-5)
        assert track.label == truth.label
        with np.errstate(invalid="ignore"):
            slow = ~(np.abs(track.sog - truth.sog) > 0.02)
            turned = np.abs((track.cog - truth.cog + 180) % 360 - 180)[truth.sog > 3]
        assert slow.all() and not (turned > 0.2).any()


RIGHT = {
    "as it is": lambda: rows_of(TRUTH),
    "zone marks": lambda: dated("%Y-%m-%d %H:%M:%S+02:00", zone_hours=2),
    "short zone marks": lambda: dated("%Y-%m-%dT%H:%M:%S-0530", zone_hours=-5.5),
    "milliseconds": lambda: dated("%Y-%m-%dT%H:%M:%S.250Z"),
    "seconds since 1970": lambda: changed(lambda row: {**row, "time": int(when(row).timestamp())}),
    "milliseconds since 1970": lambda: changed(lambda row: {**row, "time": int(when(row).timestamp() * 1000)}),
    "dots": lambda: dated("%d.%m.%Y %H:%M:%S"),
    "twelve hours": lambda: dated("%m/%d/%Y %I:%M:%S %p"),
    "compact": lambda: dated("%Y%m%dT%H:%M:%S"),
    "unit in the header": lambda: [
        {("SOG [km/h]" if key == "sog" else key): value for key, value in row.items()}
        for row in changed(lambda row: {**row, "sog": row["sog"] and f"{float(row['sog']) * 1.852:.3f}"})
    ],
    "date and time in two columns": lambda: changed(
        lambda row: {"date": row["time"][:10], **row, "time": row["time"][11:]}
    ),
    "courses from -180": lambda: changed(
        lambda row: {**row, "cog": row["cog"] and f"{(float(row['cog']) + 180) % 360 - 180:.1f}"}
    ),
    "longitudes to 360": lambda: changed(lambda row: {**row, "lon": f"{float(row['lon']) % 360:.6f}"}),
    "ship numbers with a fraction": lambda: changed(lambda row: {**row, "mmsi": f"{row['mmsi']}.0"}),
    "classes as text in the type": lambda: renamed(**{"class": "VesselType"}),
    "semicolons inside of quotes": lambda: changed(lambda row: {**row, "name": "Ada; Berta, Carla"}),
    "not in the order of time": lambda: rows_of(TRUTH)[::-1],
    "long": lambda: renamed(lon="long"),
    "upper case and spaces": lambda: renamed(mmsi="MMSI", time=" Timestamp ", lat="LATITUDE", lon="Longitude"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_file_of_another_form_is_read_right(tmp_path, name):
    tracks, cleaning = read_tracks(write(tmp_path / "t.csv", RIGHT[name]()), Reading(), limits=LIMITS)
    assert_right(tracks)
    assert cleaning.bad_points == 0 and cleaning.notes == ()


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_and_decimal_commas_are_read_right(tmp_path, separator):
    rows = changed(lambda row: {key: str(value).replace(".", ",") for key, value in row.items()})
    assert_right(read_tracks(write(tmp_path / "t.csv", rows, separator=separator), Reading(), limits=LIMITS)[0])


def fix_of(error: InvalidDataError) -> dict[str, str]:
    """Return the options of the message's last line, as a user would copy them."""
    line = str(error).splitlines()[-1]
    return dict(re.findall(r"--(\w+)=(\S+)", line))


def reading_of(options: dict[str, str]) -> Reading:
    columns = dict(pair.split("=", 1) for pair in options.pop("column_map", "").split(",") if pair)
    return Reading(columns, **options)


REFUSED = {
    "speed in m/s": lambda: changed(lambda row: {**row, "sog": row["sog"] and f"{float(row['sog']) / 1.943844:.3f}"}),
    "speed in km/h": lambda: changed(lambda row: {**row, "sog": row["sog"] and f"{float(row['sog']) * 1.852:.3f}"}),
    "speed in tenths of a knot": lambda: changed(
        lambda row: {**row, "sog": row["sog"] and f"{float(row['sog']) * 10:.0f}"}
    ),
    "exchanged coordinates": lambda: changed(lambda row: {**row, "lat": row["lon"], "lon": row["lat"]}),
    "km/h in the header, knots in the rows": lambda: [
        {("SOG [km/h]" if key == "sog" else key): value for key, value in row.items()} for row in rows_of(TRUTH)
    ],
    "a foreign name of the ship alone": lambda: renamed(mmsi="Rufnummer"),
    "German names": lambda: renamed(
        time="Zeitpunkt", lat="Breite", lon="Laenge", mmsi="Rufnummer", sog="Fahrt", cog="Kurs"
    ),
    "Chinese names": lambda: renamed(time="时间", lat="纬度", lon="经度", mmsi="船舶编号", sog="航速", cog="航向"),
    "a foreign name of the longitude alone": lambda: renamed(lon="Laenge"),
    "a foreign name of the latitude alone": lambda: renamed(lat="Breite"),
    "Spanish names": lambda: renamed(time="fecha", lat="latitud", lon="longitud", sog="velocidad", cog="rumbo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_in_doubt_is_refused_and_the_printed_option_reads_it_right(tmp_path, name):
    rows = REFUSED[name]()
    if name == "exchanged coordinates":  # beyond 90 degrees it would be noticed at once
        rows = [row for row in rows if abs(float(row["lat"])) <= 90]
    path = write(tmp_path / "t.csv", rows)
    with pytest.raises(InvalidDataError) as caught:
        read_tracks(path, Reading(), limits=LIMITS)
    tracks, _ = read_tracks(path, reading_of(fix_of(caught.value)), limits=LIMITS)
    if name != "exchanged coordinates":
        assert_right(tracks)
    assert {track.ship for track in tracks} <= {str(219_000_000 + number) for number in range(len(TRUTH))}


def test_a_date_that_can_be_read_in_two_ways_is_refused_and_either_format_is_taken(tmp_path):
    day = [{**row, "time": f"03/02/2022 {row['time'][11:]}"} for row in rows_of(TRUTH[:1])]
    path = write(tmp_path / "t.csv", day)
    with pytest.raises(InvalidDataError, match="day/month or month/day"):
        read_tracks(path, Reading(), limits=LIMITS)
    found = {
        form: read_tracks(path, Reading(time_format=form), limits=LIMITS)[0][0].time[0]
        for form in ("%d/%m/%Y", "%m/%d/%Y")
    }
    assert {datetime.fromtimestamp(int(s), timezone.utc).month for s in found.values()} == {2, 3}
    assert datetime.fromtimestamp(int(found["%d/%m/%Y"]), timezone.utc).month == 2


def test_one_date_of_another_file_decides_the_order_for_all(tmp_path):
    for name, date in (("a", "03/02/2022"), ("b", "25/02/2022")):
        rows = [{**row, "time": f"{date} {row['time'][11:]}"} for row in rows_of(TRUTH[:1])]
        write(tmp_path / f"{name}.csv", rows)
    tracks, _ = read_tracks(tmp_path, Reading(), limits=LIMITS)
    assert {datetime.fromtimestamp(int(track.time[0]), timezone.utc).month for track in tracks} == {2}


def test_dates_in_two_orders_contradict(tmp_path):
    dates = ("25/02/2022", "02/25/2022")
    rows = [{**row, "time": f"{dates[i % 2]} 10:00:{i:02d}"} for i, row in enumerate(rows_of(TRUTH[:1])[:20])]
    with pytest.raises(InvalidDataError, match="two orders"):
        read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)


@pytest.mark.parametrize(
    "change",
    [lambda row: {**row, "sog": "", "cog": ""}, lambda row: {**row, "sog": 0.0, "cog": 511}],
    ids=["empty", "0"],
)
def test_an_empty_or_constant_speed_is_named_and_derived_from_the_positions(tmp_path, change):
    tracks, cleaning = read_tracks(write(tmp_path / "t.csv", changed(change)), Reading(), limits=LIMITS)
    by_ship = {track.ship: track for track in tracks}
    differences = np.concatenate(
        [by_ship[str(219_000_000 + number)].sog[1:] - truth.sog[1:] for number, truth in enumerate(TRUTH)]
    )
    assert np.nanmedian(np.abs(differences)) < 0.3
    keys = [note.key for note in cleaning.notes]
    assert keys[-1] == "program.derived" and len(keys) == 3
    assert {note.values.get("column") for note in cleaning.notes} == {"sog", "cog", None}


def test_a_file_without_speed_and_course_is_read_from_its_positions(tmp_path):
    rows = changed(lambda row: {key: value for key, value in row.items() if key not in ("sog", "cog")})
    tracks, cleaning = read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)
    assert len(tracks) == len(TRUTH) and [note.key for note in cleaning.notes] == ["program.derived"]


def test_a_speed_of_a_foreign_name_is_derived_and_the_unused_columns_are_named(tmp_path):
    _, cleaning = read_tracks(write(tmp_path / "t.csv", renamed(sog="SPEEDx10")), Reading(), limits=LIMITS)
    unused = next(note for note in cleaning.notes if note.key == "program.columns-unused")
    assert unused.values["columns"] == ["SPEEDx10"] and "--column_map=sog=NAME" in str(unused)


def test_a_constant_length_is_a_filler(tmp_path):
    tracks, cleaning = read_tracks(
        write(tmp_path / "t.csv", changed(lambda row: {**row, "length": 100})), Reading(), limits=LIMITS
    )
    assert np.isnan([track.length for track in tracks]).all()
    assert [note.values["column"] for note in cleaning.notes] == ["length"]


def test_points_without_a_ship_are_left_out_and_an_empty_ship_column_is_none(tmp_path):
    rows = [{**row, "mmsi": "" if row["mmsi"] == 219_000_003 else row["mmsi"]} for row in rows_of(TRUTH)]
    tracks, cleaning = read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)
    assert len(tracks) == len(TRUTH) - 1 and cleaning.bad_points == len(TRUTH[3])
    for name, ship in (("a", TRUTH[0]), ("b", TRUTH[1])):
        write(tmp_path / "each" / f"{name}.csv", [{**row, "mmsi": ""} for row in rows_of([ship])])
    tracks, cleaning = read_tracks(tmp_path / "each", Reading(), limits=LIMITS)
    assert [track.ship for track in tracks] == ["a", "b"]
    assert {note.key for note in cleaning.notes} == {"program.column-empty", "program.ship-per-file"}


def test_classes_in_two_spellings_are_one(tmp_path):
    rows = changed(lambda row: {**row, "class": row["class"].upper() if row["mmsi"] % 2 else row["class"]})
    tracks, _ = read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)
    assert [track.label.lower() for track in tracks] == [track.label.lower() for track in TRUTH]
    assert len({track.label for track in tracks}) == len({track.label for track in TRUTH})


def test_a_ship_of_several_classes_is_named(tmp_path):
    rows = [{**row, "class": "Else" if i == 5 else row["class"]} for i, row in enumerate(rows_of(TRUTH))]
    tracks, cleaning = read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)
    assert_right(tracks)
    assert [(note.key, note.values["ship"]) for note in cleaning.notes] == [("program.several-classes", "219000000")]


def test_a_size_that_no_ship_has_is_unknown(tmp_path):
    rows = changed(lambda row: {**row, "length": 999 if row["mmsi"] % 2 else row["length"]})
    tracks, _ = read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)
    assert [bool(np.isnan(track.length)) for track in tracks] == [int(track.ship) % 2 == 1 for track in tracks]


def test_a_course_in_tenths_of_a_degree_is_refused(tmp_path):
    rows = changed(lambda row: {**row, "cog": row["cog"] and f"{float(row['cog']) * 10:.0f}"})
    with pytest.raises(InvalidDataError, match="not a course in degrees"):
        read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)


def test_several_ships_without_a_ship_column_are_refused(tmp_path):
    rows = sorted(rows_of(TRUTH), key=lambda row: row["time"])
    rows = [{key: value for key, value in row.items() if key != "mmsi"} for row in rows]
    with pytest.raises(InvalidDataError, match="no column for ship.*\n.*column_map=ship"):
        read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)


def test_two_ships_under_one_name_are_left_out_and_counted(tmp_path):
    rows = rows_of(TRUTH)
    shared = {219_000_000, 219_000_001}
    start = datetime(2022, 1, 1, tzinfo=timezone.utc)
    places = {ship: [row for row in rows if row["mmsi"] == ship] for ship in shared}
    mixed = [
        {**row, "mmsi": 219_000_000, "lat": float(row["lat"]) + (5 if ship == 219_000_001 else 0)}
        for ship in shared
        for row in places[ship]
    ]
    mixed = [
        {
            **row,
            "time": (
                start + timedelta(seconds=60 * (2 * (i % len(places[219_000_000])) + i // len(places[219_000_000])))
            ).strftime("%Y-%m-%dT%H:%M:%S"),
        }
        for i, row in enumerate(mixed)
    ]
    path = write(tmp_path / "t.csv", [row for row in rows if row["mmsi"] not in shared] + mixed)
    tracks, cleaning = read_tracks(path, Reading(), limits=LIMITS)
    assert "219000000" not in {track.ship for track in tracks}
    assert cleaning.bad_points == len({row["time"] for row in mixed})
    assert any(why.values["reason"] == TWO_SHIPS for why in cleaning.why_bad)


def test_the_same_missing_columns_of_many_files_are_one_problem(tmp_path):
    for number in range(12):
        write(tmp_path / f"{number:02d}.csv", renamed(time="Zeitpunkt")[:50])
    with pytest.raises(InvalidDataError) as caught:
        read_tracks(tmp_path, Reading(), limits=LIMITS)
    assert str(caught.value).count("no column for") == 1 and "11 more with the same columns" in str(caught.value)
    assert "--column_map=time=Zeitpunkt" in str(caught.value)


def test_a_speed_of_no_unit_is_refused_and_can_be_derived(tmp_path):
    rows = changed(lambda row: {**row, "sog": row["sog"] and f"{float(row['sog']) * 3:.1f}"})
    path = write(tmp_path / "t.csv", rows)
    with pytest.raises(InvalidDataError, match="not a speed in knots") as caught:
        read_tracks(path, Reading(), limits=LIMITS)
    assert fix_of(caught.value) == {"column_map": "sog="}
    tracks, _ = read_tracks(path, Reading({"sog": ""}), limits=LIMITS)
    assert max(float(np.nanmax(track.sog)) for track in tracks) < 40


def test_a_course_in_radians_is_refused(tmp_path):
    rows = changed(lambda row: {**row, "cog": row["cog"] and f"{np.radians(float(row['cog'])):.4f}"})
    with pytest.raises(InvalidDataError, match="not a course in degrees"):
        read_tracks(write(tmp_path / "t.csv", rows), Reading(), limits=LIMITS)
