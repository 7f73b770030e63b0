"""AIS files that are not as they should be: what is wrong, where, and the way out, all problems in one message."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.options import read_table
from ascendrun.programs.trainer.strategies.fsdp2 import InvalidWeightsError, file_of_tensor
from ascendrun.programs.trajectory.__main__ import OPTIONS
from ascendrun.programs.trajectory.api import Classifier
from ascendrun.programs.trajectory.data import from_tracks, load_prepared, prepare, read_texts
from ascendrun.programs.trajectory.model import config_of_folder, word_pieces
from ascendrun.programs.trajectory.points.read_ais import Reading, read_tracks
from ascendrun.programs.trajectory.points.tables import NO_TIME
from ascendrun.programs.trajectory.points.tracks import Limits
from ascendrun.programs.trajectory.split import split_records
from ascendrun.programs.trajectory.store import load_trained
from ascendrun.text import Text

HEADER = "mmsi,time,lat,lon,sog,cog,class,name\n"
DEFAULTS = {name: option.default for name, option in read_table(OPTIONS).options.items()}
LIMITS = Limits(gap_s=600, segment_points=30, min_points=3, max_knots=0)


def row(i: int, **other: str) -> str:
    values = {
        "mmsi": "7",
        "time": f"2022-01-03T00:{i:02d}:00",
        "lat": f"10.{i:02d}",
        "lon": "20",
        "sog": "5",
        "cog": "90",
        "class": "Cargo",
        "name": "Ada",
    }
    return ",".join({**values, **other}.values()) + "\n"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def problem(path: Path) -> str:
    with pytest.raises(InvalidDataError) as caught:
        read_tracks(path, Reading(), limits=LIMITS)
    return str(caught.value)


def test_a_name_in_another_encoding_and_zero_bytes_do_not_keep_the_points_from_being_read(tmp_path):
    text = HEADER + "".join(row(i, name="François") for i in range(4)) + "\0\0" + row(5)
    (track,), cleaning = read_tracks(write(tmp_path / "t.csv", text.encode("latin-1")), Reading(), limits=LIMITS)
    assert (len(track), cleaning.bad_points) == (5, 0)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("utf16.csv", (HEADER + row(1)).encode("utf-16"), "not valid UTF-8"),
        ("archive.csv", b"PK\x03\x04" + bytes(range(256)), "not valid UTF-8"),
        ("plain.csv.gz", HEADER + row(1), "Not a gzipped file"),
        ("cut.csv.gz", gzip.compress((HEADER + "".join(map(row, range(60)))).encode(), mtime=0)[:90], "ended before"),
        ("no.parquet", "PAR1 nothing", "Parquet"),
        ("quote.csv", HEADER + row(1) + '7,"' + "x" * 140_000, "line 3"),
    ],
)
def test_a_file_that_is_no_table_is_named_with_what_it_is(tmp_path, name, content, words):
    told = problem(write(tmp_path / name, content))
    assert name in told and words in told


def test_lines_that_an_open_quote_swallows_are_counted(tmp_path):
    text = HEADER + "".join(map(row, range(4))) + '7,"2022' + row(5) * 6
    _, cleaning = read_tracks(write(tmp_path / "t.csv", text), Reading(), limits=LIMITS)
    assert (cleaning.points, cleaning.bad_points) == (10, 6)


def test_where_no_track_is_left_the_reasons_and_their_first_values_are_told(tmp_path):
    rows = [row(i, time="1641168000000") for i in range(3)] + [row(i, lat="10,5") for i in range(2)]
    rows += [row(i, lon="200") for i in range(2)] + [row(1), "7,torn\n"]
    told = problem(write(tmp_path / "t.csv", HEADER + "".join(rows).replace("10,5", '"10,5"')))
    assert "no track of at least 3 points among 9" in told
    assert "3 have no valid time (ISO, seconds" in told and "), such as '1641168000000' in time" in told
    assert "4 have no valid position, such as '10,5' in lat" in told
    assert "1 are incomplete lines, such as line 10" in told and "1 segments are too short" in told


def test_the_problems_of_all_files_of_a_folder_stand_together_and_hidden_files_are_none(tmp_path):
    write(tmp_path / "a.csv", HEADER + "".join(map(row, range(4))))
    write(tmp_path / "b.csv", "x,y\n1,2\n")
    write(tmp_path / "c.csv", "")
    write(tmp_path / "._a.csv", b"\0\5\x16\7")
    told = problem(tmp_path)
    assert "b.csv: no column for time" in told and "c.csv: empty" in told and "._a.csv" not in told


def test_an_unknown_split_is_told_with_all_others_and_dealing_anew_is_a_way_out(tmp_path):
    rows = "".join(
        row(i, mmsi=ship, name=split)
        for ship, split in [("1", "train"), ("2", "holdout"), ("3", "extra"), *((str(n), "test") for n in range(4, 40))]
        for i in range(3)
    )
    path = write(tmp_path / "t.csv", HEADER.replace("name", "split") + rows)
    records = from_tracks(read_tracks(path, Reading(), limits=LIMITS)[0], grammar="motion", resolution=1)
    with pytest.raises(InvalidDataError, match="(?s)extra, holdout.*split_column=false"):
        split_records(records, val=0.2, test=0.2, seed=1)
    assert split_records(records, val=0.2, test=0.2, seed=1, use_column=False)["val"]


def test_points_in_python_that_lack_something_are_told_in_their_own_words():
    words_of = Classifier.words_of.__get__(SimpleNamespace(vote=None))
    with pytest.raises(InvalidDataError, match="points lack sog, cog; expected"):
        words_of([{"time": 1, "lat": 1, "lon": 2}])
    with pytest.raises(
        InvalidDataError, match="make 1 tracks .1 have no valid position, such as 95 in lat.; expected two or more"
    ):
        words_of([{"time": 1, "lat": 1, "lon": 2, "sog": 1, "cog": None}, {"time": 9, "lat": 95, "lon": 2}])


def test_points_that_are_left_out_are_told_with_their_reasons_where_others_are_left(tmp_path):
    text = HEADER + "".join(map(row, range(4))) + row(4, time="noon")
    _, cleaning = read_tracks(write(tmp_path / "t.csv", text), Reading(), limits=LIMITS)
    (why,) = cleaning.why_bad
    assert why == Text(
        "program.dropped",
        "",
        count=1,
        reason=NO_TIME,
        example=Text("program.value-in", "", value="'noon'", column="time"),
    )


@pytest.mark.parametrize("kind, words", [("70", "got 8 of Cargo"), ("0", "got 8 of no class")])
def test_too_few_classes_are_told_with_those_that_are_there(tmp_path, kind, words):
    text = HEADER.replace("class", "vesseltype") + "".join(
        row(i, **{"mmsi": str(ship), "class": kind}) for ship in range(8) for i in range(10)
    )
    options = {**DEFAULTS, "data_path": str(write(tmp_path / "t.csv", text)), "grammar": "motion"}
    with pytest.raises(InvalidDataError, match=words):
        prepare(options)


def test_all_bad_lines_of_a_text_file_are_told_together(tmp_path):
    lines = ['{"text": "a POINT_END", "label": 1}', "none", '{"txt": 1}', '{"text": null}']
    path = write(tmp_path / "t.jsonl", "\n".join(lines).encode() + b'\n{"text": "\xff"}')
    with pytest.raises(InvalidDataError) as caught:
        read_texts(path)
    assert [line.split(": must be")[0][-2:] for line in str(caught.value).splitlines()] == [":2", ":3", ":4", ":5"]


def test_damaged_files_are_told_as_damaged(tmp_path):
    for name in ("model.pt", "prepared.json", "samples.jsonl.gz", "config.json", "model.safetensors"):
        write(tmp_path / name, "{ cut")
    for look in (load_trained, load_prepared, lambda folder: config_of_folder(folder, words=9), file_of_tensor):
        with pytest.raises((InvalidDataError, InvalidWeightsError), match="again"):
            look(tmp_path)
    write(tmp_path / "tokenizer.json", "{ cut")
    write(tmp_path / "config.json", '{"model_type": "qwen2", "hidden_size": "big"}')
    for look in (lambda folder: word_pieces(folder, ["a"]), lambda folder: config_of_folder(folder, words=9)):
        with pytest.raises(InvalidDataError, match=r"(?s)(tokenizer|config)\.json: .*copy the base again"):
            look(tmp_path)
    torch.save({"weights": {}}, tmp_path / "model.pt")
    with pytest.raises(InvalidDataError, match="not a trained classifier"):
        load_trained(tmp_path)
