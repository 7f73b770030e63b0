"""Reading and cleaning AIS points; dealing ships to splits; the generated tracks."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from ascendrun.programs.trajectory.generate import KINDS, generate
from ascendrun.programs.trajectory.split import check_disjoint, split_tracks
from ascendrun.programs.trajectory.tracks import BadData, Limits, read_tracks

HEADER = "vessel_id,time,lat,lon,sog,cog,vessel_class,split\n"
LOOSE = Limits(gap_s=600, segment_points=30, min_points=2)


def write(folder: Path, rows: str, *, header: str = HEADER, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(header + rows)
    return path


def test_points_are_ordered_cleaned_and_counted(tmp_path):
    path = write(tmp_path, "7,2022-01-03T00:02:00Z,10.2,20,5,90,Cargo,train\n"
                           "7,2022-01-03T00:00:00,10.0,20,102.3,360,Cargo,train\n"
                           "7,2022-01-03 00:01:00,10.1,20,-1,,Cargo,train\n"
                           "7,2022-01-03 00:01:00,10.1,20,4,80,Cargo,train\n"
                           "7,2022-01-03 00:03:00,91,20,4,80,Cargo,train\n"
                           "7,not a time,10,20,4,80,Cargo,train\n")
    (track,), cleaning = read_tracks(path, columns={}, limits=LOOSE)
    assert track.lat.tolist() == [10.0, 10.1, 10.2]
    assert np.diff(track.time).tolist() == [60, 60]
    assert np.isnan(track.sog).tolist() == [True, True, False]
    assert np.isnan(track.cog).tolist() == [True, True, False]
    assert (cleaning.points, cleaning.bad_points, cleaning.repeated_points) == (6, 2, 1)


def test_silences_and_length_cut_a_track_and_short_pieces_go(tmp_path):
    rows = "".join(f"1,{seconds},10,20,5,90,Cargo,train\n" for seconds in [*range(1, 80), *range(5000, 5005)])
    tracks, cleaning = read_tracks(write(tmp_path, rows), columns={}, limits=Limits(600, 30, 10))
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
    read = [read_tracks(path, columns={}, limits=LOOSE)[0]
            for path in (plain, tmp_path / "t.csv.gz", tmp_path / "t.parquet", tmp_path / "ships")]
    assert [len(tracks) for tracks in read] == [1, 1, 1, 2]
    assert {track.label for tracks in read for track in tracks} == {"Fishing_Vessel"}
    assert {track.ship for track in read[3]} == {"11", "12"}
    for tracks in read:
        assert tracks[0].time.tolist() == read[0][0].time.tolist() and tracks[0].lat.tolist() == read[0][0].lat.tolist()


def test_columns_can_be_named_and_missing_ones_are_all_told(tmp_path):
    path = write(tmp_path, "1,1,10,20,5\n1,2,10,20,5\n", header="MMSI,when,Latitude,LON,knots\n")
    with pytest.raises(BadData, match="no column for time, sog, cog"):
        read_tracks(path, columns={}, limits=LOOSE)
    with pytest.raises(BadData, match="absent"):
        read_tracks(path, columns={"time": "absent"}, limits=LOOSE)
    tracks, _ = read_tracks(path, columns={"time": "when", "sog": "knots", "cog": "knots"}, limits=LOOSE)
    assert tracks[0].ship == "1" and tracks[0].label is None


def test_ships_are_dealt_whole_and_alike_whatever_else_there_is():
    tracks = generate(300, seed=3)
    pieces = [piece for track in tracks for piece in (track.part(0, 6), track.part(6, len(track)))]
    parts = split_tracks(pieces, val=0.2, test=0.2, seed=1)
    ships = {name: {track.ship for track in part} for name, part in parts.items()}
    assert not ships["train"] & ships["val"] and not ships["train"] & ships["test"] and not ships["val"] & ships["test"]
    assert sum(map(len, parts.values())) == len(pieces)
    assert 0.1 < len(ships["test"]) / 300 < 0.3
    fewer = split_tracks(pieces[:200], val=0.2, test=0.2, seed=1)
    assert {track.ship for track in fewer["test"]} <= ships["test"]


def test_the_data_s_own_split_is_kept_and_refused_when_it_shares_a_ship(tmp_path):
    rows = "".join(f"{ship},{i},10,20,5,90,Cargo,{split}\n" for ship, split in
                   [(1, "train"), (2, "validation"), (3, "test")] for i in range(1, 5))
    tracks, _ = read_tracks(write(tmp_path, rows), columns={}, limits=LOOSE)
    parts = split_tracks(tracks, val=0.2, test=0.2, seed=1)
    assert {name: [track.ship for track in part] for name, part in parts.items()} == {
        "train": ["1"], "val": ["2"], "test": ["3"]}
    with pytest.raises(BadData, match="such as 1 in train and test"):
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
