"""Reading and cleaning AIS points; dealing ships to splits; the generated tracks."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.data import from_tracks, make_samples
from ascendrun.programs.trajectory.points.generate import KINDS, generate
from ascendrun.programs.trajectory.points.read_ais import Reading, read_tracks
from ascendrun.programs.trajectory.points.tracks import Limits, Track, cut_tracks, without_outliers
from ascendrun.programs.trajectory.split import check_disjoint, deal, doubts, split_records
from tests.programs.conftest import options_of

HEADER = "vessel_id,time,lat,lon,sog,cog,vessel_class,split\n"
LOOSE = Limits(gap_s=600, segment_points=30, min_points=2, max_knots=0)


def write(folder: Path, rows: str, *, header: str = HEADER, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(header + rows)
    return path


def test_points_are_ordered_cleaned_and_counted(tmp_path):
    path = write(
        tmp_path,
        "7,2022-01-03T00:02:00Z,10.2,20,5,90,Cargo,train\n"
        "7,2022-01-03T00:00:00,10.0,20,102.3,360,Cargo,train\n"
        "7,2022-01-03 00:01:00,10.1,20,-1,,Cargo,train\n"
        "7,2022-01-03 00:01:00,10.1,20,4,80,Cargo,train\n"
        "7,2022-01-03 00:03:00,91,20,4,80,Cargo,train\n"
        "7,not a time,10,20,4,80,Cargo,train\n",
    )
    (track,), cleaning = read_tracks(path, Reading(), limits=LOOSE)
    assert track.lat.tolist() == [10.0, 10.1, 10.2]
    assert np.diff(track.time).tolist() == [60, 60]
    assert np.isnan(track.sog).tolist() == [True, True, False]
    assert np.isnan(track.cog).tolist() == [True, True, False]
    assert (cleaning.points, cleaning.bad_points, cleaning.repeated_points) == (6, 2, 1)


def test_a_torn_line_counts_as_an_unusable_point_and_an_empty_one_as_none(tmp_path):
    path = write(
        tmp_path,
        "7,2022-01-03T00:00:00,10.0,20,5,90,Cargo,train\n\n"
        "7,2022-01-03T00:01:00,10.1\n"
        "7,2022-01-03T00:02:00,10.2,20,5,90,Cargo,train\n",
    )
    (track,), cleaning = read_tracks(path, Reading(), limits=LOOSE)
    assert (len(track), cleaning.points, cleaning.bad_points) == (2, 3, 1)


def test_silences_and_length_cut_a_track_and_short_pieces_go(tmp_path):
    rows = "".join(f"1,{seconds},10,20,5,90,Cargo,train\n" for seconds in [*range(1, 80), *range(5000, 5005)])
    tracks, cleaning = read_tracks(write(tmp_path, rows), Reading(), limits=Limits(600, 30, 10, 0))
    assert [len(track) for track in tracks] == [30, 30, 19]
    assert len({track.id for track in tracks}) == 3 and {track.ship for track in tracks} == {"1"}
    assert cleaning.short_pieces == 1


def test_csv_gz_parquet_and_a_folder_of_ship_files_read_alike(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [(f"2022-01-03T00:{minute:02d}:00", 10 + minute / 100, 20.0, 5.0, 90.0, "4.0") for minute in range(12)]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    header = "date,lat,lon,sog,cog,class\n"
    (tmp_path / "ships").mkdir()
    write(tmp_path / "ships", text, header=header, name="11.csv")
    write(tmp_path / "ships", text, header=header, name="12.csv")
    plain = write(tmp_path, text, header=header)
    with gzip.open(tmp_path / "t.csv.gz", "wt") as file:
        file.write(header + text)
    columns = dict(zip(header.strip().split(","), map(list, zip(*rows))))
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    read = [
        read_tracks(path, Reading(), limits=LOOSE)[0]
        for path in (plain, tmp_path / "t.csv.gz", tmp_path / "t.parquet", tmp_path / "ships")
    ]
    assert [len(tracks) for tracks in read] == [1, 1, 1, 2]
    assert {track.label for tracks in read for track in tracks} == {"4"}
    assert {track.ship for track in read[3]} == {"11", "12"}
    for tracks in read:
        assert tracks[0].time.tolist() == read[0][0].time.tolist() and tracks[0].lat.tolist() == read[0][0].lat.tolist()


def test_columns_can_be_named_and_missing_ones_are_all_told(tmp_path):
    path = write(tmp_path, "1,1,10,20,5\n1,2,10,20,5\n", header="MMSI,when,Latitude,LON,knots\n")
    with pytest.raises(InvalidDataError, match="no column for time among"):
        read_tracks(path, Reading(), limits=LOOSE)
    with pytest.raises(InvalidDataError, match="absent"):
        read_tracks(path, Reading({"time": "absent"}), limits=LOOSE)
    tracks, _ = read_tracks(path, Reading({"time": "when", "sog": "knots", "cog": "knots"}), limits=LOOSE)
    assert tracks[0].ship == "1" and tracks[0].label is None


def test_ships_are_dealt_whole_and_alike_whatever_else_there_is():
    tracks = generate(300, seed=3)
    pieces = [piece for track in tracks for piece in (track.part(0, 6), track.part(6, len(track)))]
    pieces = from_tracks(pieces, grammar="motion", resolution=1)
    parts = split_records(pieces, val=0.2, test=0.2, seed=1)
    ships = {name: {track.ship for track in part} for name, part in parts.items()}
    assert not ships["train"] & ships["val"] and not ships["train"] & ships["test"] and not ships["val"] & ships["test"]
    assert sum(map(len, parts.values())) == len(pieces)
    assert 0.1 < len(ships["test"]) / 300 < 0.3
    fewer = split_records(pieces[:200], val=0.2, test=0.2, seed=1)
    assert {track.ship for track in fewer["test"]} <= ships["test"]


def test_two_ships_are_refused_with_the_way_out_which_says_that_it_leaks(tmp_path):
    rows = "".join(
        f"{ship},{1000 * i + 40000 * part},{10 + i / 100 + part},{19 + ship},2.2,0,{kind},\n"
        for ship, kind in ((1, "Cargo"), (2, "Tug"))
        for part in range(40)
        for i in range(12)
    )
    given = [f"--data_path={write(tmp_path, rows)}", "--max_gap_s=2000"]
    with pytest.raises(InvalidDataError, match="--split=segment"):
        make_samples(options_of("trajectory", *given))
    samples = make_samples(options_of("trajectory", *given, "--split=segment"))
    assert samples.is_leaky and all(samples.records[name] for name in ("train", "val", "test"))
    assert {each.ship for each in samples.records["train"]} == {each.ship for each in samples.records["test"]}


def test_a_ship_is_dealt_alike_on_every_machine_and_another_seed_deals_anew():
    """S0-B8: a split without a seed. Python's own hash is another in every process."""
    ships = ("366000001", "366000002", "219000001", "104694", "11")
    dealt = {seed: [deal(ship, val=0.2, test=0.2, seed=seed) for ship in ships] for seed in (1, 2)}
    assert dealt == {1: ["train", "train", "train", "train", "val"], 2: ["train", "train", "test", "test", "val"]}


def test_the_data_s_own_split_is_kept_and_refused_when_it_shares_a_ship(tmp_path):
    rows = "".join(
        f"{ship},{i},10,20,5,90,Cargo,{split}\n"
        for ship, split in [(1, "train"), (2, "validation"), (3, "test")]
        for i in range(1, 5)
    )
    tracks, _ = read_tracks(write(tmp_path, rows), Reading(), limits=LOOSE)
    parts = split_records(from_tracks(tracks, grammar="motion", resolution=1), val=0.2, test=0.2, seed=1)
    assert {name: [track.ship for track in part] for name, part in parts.items()} == {
        "train": ["1"],
        "val": ["2"],
        "test": ["3"],
    }
    with pytest.raises(InvalidDataError, match="such as 1 in train and test"):
        check_disjoint({**parts, "test": parts["train"]})


def test_generated_tracks_follow_from_the_seed_and_do_not_move_when_more_are_asked_for():
    few, many, others = generate(20, seed=5), generate(40, seed=5), generate(20, seed=6)
    for one, other in zip(few, many):
        assert one.label == other.label and one.time.tolist() == other.time.tolist()
        assert np.array_equal(one.cog, other.cog, equal_nan=True) and one.lat.tolist() == other.lat.tolist()
    assert [track.lat.tolist() for track in few] != [track.lat.tolist() for track in others]


def test_generated_tracks_hold_every_kind_and_move_as_their_speed_says():
    tracks = generate(300, seed=5)
    assert {track.label for track in tracks} == set(KINDS)
    for track in tracks:
        north, east = np.diff(track.lat) * 111_320, np.diff(track.lon) * 111_320 * np.cos(np.radians(track.lat[1:]))
        metres = np.hypot(north, east)
        expected = track.sog[1:] * 0.514444 * np.diff(track.time)
        assert np.abs(metres - expected).max() < 0.05 * expected.max() + 5


def steady(**changes: object) -> Track:
    """Ten points, one a minute, a tenth of a nautical mile apart to the north."""
    seconds = np.arange(10) * 60
    track = Track(
        "t",
        "s",
        seconds,
        10 + np.arange(10) / 600,
        np.full(10, 20.0),
        np.full(10, 6.0),
        np.full(10, 0.0),
        "Cargo",
        None,
    )
    return replace(track, **changes)


def test_a_place_that_no_ship_reaches_and_returns_from_is_left_out_alone():
    lat = steady().lat.copy()
    lat[4] += 1.0
    kept, out = without_outliers(steady(lat=lat), 100)
    assert out == 1 and len(kept) == 9 and 240 not in kept.time


def test_a_jump_that_is_not_left_again_cuts_the_track_and_both_are_counted():
    lat, lon = steady().lat.copy(), steady().lon.copy()
    lon[6:] += 3.0
    lat[2] -= 2.0
    tracks, counts = cut_tracks([steady(lat=lat, lon=lon)], Limits(600, 30, 3, 100))
    assert [len(track) for track in tracks] == [5, 4]
    assert counts == {"repeated_points": 0, "outliers": 1, "jumps": 1, "short_pieces": 0}


MARINE_CADASTRE = (
    "MMSI,BaseDateTime,LAT,LON,SOG,COG,Heading,VesselName,IMO,CallSign,VesselType,Status,Length,Width,"
    "Draft,Cargo,TransceiverClass\n"
)
DANISH = (
    "# Timestamp,Type of mobile,MMSI,Latitude,Longitude,Navigational status,ROT,SOG,COG,Heading,IMO,Callsign,"
    "Name,Ship type,Cargo type,Width,Length\n"
)


def test_files_of_marine_cadastre_are_read_without_a_word_about_their_columns(tmp_path):
    rows = "".join(
        f"366000001,2022-01-03T00:{i:02d}:00,29.9{i},-90.0,10.5,171.5,{511 if i else 174},A,IMO1,B,70,0,180,32,9,70,A\n"
        for i in range(4)
    )
    rows += "366000002,2022-01-03T00:00:00,29.9,-90.1,0.1,10,511,A,,B,0,0,0,0,,,B\n"
    rows += "366000002,2022-01-03T00:01:00,29.9,-90.1,0.1,10,511,A,,B,,0,,,,,B\n"
    tracks, _ = read_tracks(write(tmp_path, rows, header=MARINE_CADASTRE), Reading(), limits=LOOSE)
    first, second = tracks
    assert (first.ship, first.label, first.length, first.width) == ("366000001", "Cargo", 180.0, 32.0)
    assert first.heading[0] == 174 and np.isnan(first.heading[1:]).all()
    assert second.label is None and np.isnan(second.length)


def test_files_of_the_danish_authority_are_read_and_base_stations_left_out(tmp_path):
    rows = "".join(
        f"03/02/2022 00:0{i}:00,Class A,219000001,56.{i},11.0,Under way,0,9.{i},90,91,1,C,N,Fishing,,6,20\n"
        for i in range(3)
    )
    rows += "03/02/2022 00:00:00,Base Station,2190068,56.4,11.1,,,,,,,,,Undefined,,,\n" * 2
    rows += "03/02/2022 00:00:00,Class A,219000002,91.0,0.0,,,,,,,,,Undefined,,,\n"
    (track,), cleaning = read_tracks(write(tmp_path, rows, header=DANISH), Reading(), limits=LOOSE)
    assert (track.ship, track.label, track.length, track.width) == ("219000001", "Fishing", 20.0, 6.0)
    assert track.time[0] == 1643846400, "the third of February, not the second of March"
    assert cleaning.bad_points == 3


def fleet(ships: int, pieces: int = 1) -> list[Track]:
    return [
        replace(track, id=f"{track.id}/{i}", label="Rare" if number < 5 else "Common")
        for number, track in enumerate(generate(ships, seed=1))
        for i in range(pieces)
    ]


def test_each_ship_is_tested_in_one_fold_and_each_class_in_every_fold():
    tracks, tested = fleet(60, pieces=2), []
    for fold in range(5):
        parts = split_records(tracks, val=0.2, test=0.5, seed=1, folds=5, fold=fold)
        assert {track.label for track in parts["test"]} == {"Rare", "Common"} and len(parts["test"]) == 24
        assert 0 < len(parts["val"]) < 0.4 * len(tracks)
        tested += [track.ship for track in parts["test"]]
    assert sorted(tested) == sorted(track.ship for track in tracks)


def test_a_split_that_says_little_is_named_with_its_numbers():
    tracks = fleet(120)
    parts = {"train": tracks[:80], "val": [*tracks[:3], *tracks[80:100]], "test": tracks[100:]}
    few, absent = doubts(parts)
    assert (few.key, few.values["ships"]) == ("program.few-test-ships", 20)
    assert (absent.values["split"], absent.values["names"]) == ("test", ["Rare"])
    crowd = [replace(tracks[110], id=str(i)) for i in range(40)]
    (ship,) = doubts({"train": tracks, "val": tracks, "test": [*tracks, *crowd]})
    assert (ship.values["ship"], ship.values["count"]) == (tracks[110].ship, 41)
    assert not doubts(dict.fromkeys(parts, tracks))
