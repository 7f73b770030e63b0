"""AIS files as users have them: nothing of them is dropped or misread without a line about it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ascendrun.facts.columns import propose
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.data import Samples, as_records, load_data
from ascendrun.programs.trajectory.grammars import as_texts, fit_text, knots_of
from ascendrun.programs.trajectory.model import Sizes, config_of_sizes, make_model
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.points.read_ais import Reading, read_tracks
from ascendrun.programs.trajectory.points.tracks import Limits, Track, is_in_radians, summary
from ascendrun.programs.trajectory.split import doubts
from ascendrun.programs.trajectory.stages.trained import check_classes, classify
from ascendrun.programs.trajectory.store import Trained, Vote, save_trained, save_vote, unlike
from ascendrun.programs.trajectory.tokens import encode, make_vocabulary
from ascendrun.text import from_json
from tests.programs.conftest import alone, options_of

HEADER = "mmsi,time,lat,lon,sog,cog,class\n"
LIMITS = Limits(gap_s=86_400, segment_points=30, min_points=3, max_knots=0)


def ship(name: str, *, count=12, step_s=60, kind="Cargo", lon=20.0, knots=10.0, course=90.0, **other: str) -> str:
    """Rows of a ship that goes east at ten knots."""
    rows = []
    for i in range(count):
        east = lon + i * step_s * 10 * 0.514444 / 111_320
        seconds = 1_641_168_000 + i * step_s
        values = {"mmsi": name, "time": str(seconds), "lat": "0.0", "lon": f"{east:.5f}"}
        values |= {"sog": f"{knots + i % 2 / 10}", "cog": f"{course + i % 2 / 100:.3f}", **other}
        rows.append(",".join([*values.values(), kind]) + "\n")
    return "".join(rows)


def read(folder: Path, rows: str, *, header: str = HEADER, limits: Limits = LIMITS):
    path = folder / "t.csv"
    path.write_text(header + rows)
    return read_tracks(path, Reading(), limits=limits)


def keys(cleaning) -> list[str]:
    return [note.key for note in cleaning.notes]


def problem(folder: Path, rows: str) -> str:
    with pytest.raises(InvalidDataError) as caught:
        read(folder, rows)
    return str(caught.value)


def test_a_ship_without_a_track_is_named_with_the_reason(tmp_path):
    rows = ship("1") + ship("2", count=2) + ship("3", lat="99.0")
    tracks, cleaning = read(tmp_path, rows)
    assert {track.ship for track in tracks} == {"1"}
    assert {name: why.key for name, why in cleaning.dropped.items()} == {
        "2": "program.too-short",
        "3": "program.no-usable-point",
    }


def test_what_was_read_of_a_file_can_be_stored_with_a_report(tmp_path):
    header, torn = HEADER.replace("\n", ",heading\n"), "9,1641168000\n"
    (tmp_path / "t.csv").write_text(header + ship("1").replace("\n", ",\n") + torn)
    _, cleaning = load_data(options_of("trajectory", f"--data_path={tmp_path / 't.csv'}"))
    kept = json.loads(json.dumps(cleaning))
    assert f"{tmp_path / 't.csv'}: heading has no value" in map(str, from_json(kept["notes"]))
    assert str(tmp_path) in str(from_json(kept["why_bad"])[0])


def classifier(folder: Path, tracks) -> Trained:
    text = fit_text(tracks, grammar="motion", resolution=10)
    words = as_texts(tracks, **text)
    vocabulary = make_vocabulary(((track.ship, each) for track, each in zip(tracks, words)), min_count=2)
    config = config_of_sizes(words=len(vocabulary), hidden=16, layers=1, heads=2, max_length=512)
    sizes = Sizes(config, 2, 0.0, "mean", "causal", knots_of(text))
    trained = Trained(make_model(sizes, seed=1), sizes, vocabulary, ["Cargo", "Fishing"], text, [0.5, 0.5])
    save_trained(trained, folder)
    return trained


class Listener:
    """A runtime whose log is kept."""

    def __init__(self) -> None:
        self.own, self.lines = alone(), []

    def __getattr__(self, name):
        return getattr(self.own, name)

    def log(self, line) -> None:
        self.lines.append(str(line))


def test_predict_answers_for_every_ship_or_says_why_not(tmp_path):
    classifier(tmp_path / "best", generate(40, seed=1))
    save_vote([tmp_path / "best"], temperature=2.0, prior_shift=0.0, folder=tmp_path / "best")
    (tmp_path / "t.csv").write_text(
        HEADER + ship("1", kind="Dredger") + "".join(ship(str(i), count=4) for i in range(2, 41))
    )
    here = Listener()
    given = {"model_path": tmp_path / "best", "data_path": tmp_path / "t.csv", "output_dir": tmp_path}
    options = options_of("trajectory", "--mode=predict", *(f"--{name}={value}" for name, value in given.items()))
    classify({**options, "inference_warmup_steps": 0}, here)
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert {line["ship"] for line in lines} == {str(i) for i in range(1, 41)}
    assert [line["ship"] for line in lines if line["class_name"]] == ["1"]
    assert all("too few" in line["error"] for line in lines[1:])
    log = "\n".join(here.lines)
    assert "no track of 39 ships: 2, 3" in log and "min_segment_size" in log
    assert "in waters where training has no ships" in log
    assert "1 track of classes that the model does not have are not scored: Dredger" in log


def test_an_evaluation_of_other_classes_names_them(tmp_path):
    known = generate(40, seed=1)
    trained = classifier(tmp_path, known)
    vote, records = Vote((trained,)), as_records([replace(known[0], label="Dredger")], trained.text)
    with pytest.raises(InvalidDataError) as refused:
        check_classes(vote, Samples({"val": records, "test": []}, {}, {}), ("val", "test"))
    values = refused.value.args[0].values
    assert (values["split"], values["names"], values["known"]) == ("val", ["Dredger"], ["Cargo", "Fishing"])


def test_a_track_over_the_antimeridian_is_whole_in_every_way_to_write_it(tmp_path):
    usual, east = (read(tmp_path, ship("1", step_s=600, lon=lon))[0] for lon in (20.0, 179.6))
    written = ship("1", step_s=600, lon=179.6).splitlines()
    turned = "".join(
        ",".join([*cells[:3], f"{(float(cells[3]) + 180) % 360 - 180:.5f}", *cells[4:]]) + "\n"
        for cells in (line.split(",") for line in written)
    )
    both = ship("1", step_s=600, lon=179.6) + ship("2", lon=-20.0)
    for tracks in (east, read(tmp_path, turned)[0], read(tmp_path, both)[0]):
        found, wanted = summary(tracks[0]), summary(usual[0])
        assert len(tracks[0]) == 12 and abs(found["lon"]) > 179
        assert found["spread_m"] == pytest.approx(wanted["spread_m"], rel=0.01)


def test_what_databases_write_for_a_missing_value_is_no_class_and_no_ship(tmp_path):
    names = ("NA", "NULL", r"\N", "nan", "None", "n/a", "Unspecified", "")
    tracks, _ = read(tmp_path, "".join(ship(str(i), kind=name) for i, name in enumerate((*names, "Cargo"))))
    assert [track.label for track in tracks] == [*[None] * len(names), "Cargo"]
    _, cleaning = read(tmp_path, ship("1") + ship("NULL"))
    assert cleaning.bad_points == 12


def test_codes_are_classes_of_the_ais_table_only_where_they_are_of_that_table(tmp_path):
    header = HEADER.replace("class", "vessel_type")
    tracks, _ = read(tmp_path, ship("1", kind="70") + ship("2", kind="30.0") + ship("3", kind="0"), header=header)
    assert [track.label for track in tracks] == ["Cargo", "Fishing", None]
    tracks, _ = read(tmp_path, ship("1", kind="1") + ship("2", kind="7.0") + ship("3", kind="12"), header=header)
    assert [track.label for track in tracks] == ["1", "7", "12"]
    tracks, _ = read(tmp_path, ship("1", kind="101") + ship("2", kind="204"), header=header)
    assert [track.label for track in tracks] == ["101", "204"]
    tracks, _ = read(tmp_path, ship("1", kind="0") + ship("2", kind="0"), header=header)
    assert [track.label for track in tracks] == [None, None]
    tracks, _ = read(tmp_path, ship("1", kind="1") + ship("2", kind="70"))
    assert [track.label for track in tracks] == ["1", "70"]


@pytest.mark.parametrize("step_s", [10, 60, 1200])
def test_speed_in_tenths_and_course_in_radians_are_noticed_at_any_interval(tmp_path, step_s):
    def five(**other) -> str:
        return "".join(ship(str(i), step_s=step_s, count=max(12, 720 // step_s), **other) for i in range(5))

    assert read(tmp_path, five(knots=8.0))[0]
    assert "--units=knots/10" in problem(tmp_path, five(knots=100.0))
    for low in (0, -math.pi):
        courses = np.random.default_rng(1).uniform(low, low + 2 * math.pi, 60)
        rows = "".join(ship(str(i), step_s=step_s, course=course) for i, course in enumerate(courses))
        assert "radians" in problem(tmp_path, rows)


def test_twenty_minutes_of_one_ship_show_the_unit_of_its_speed(tmp_path):
    assert "--units=knots/10" in problem(tmp_path, ship("1", step_s=30, count=40, knots=100.0))


def test_courses_to_the_north_are_no_radians():
    assert not is_in_radians(np.random.default_rng(1).uniform(0, 3, 100))
    assert not is_in_radians(np.array([0.0, 6.0, np.nan] * 50))


@pytest.mark.parametrize("low", [0, -math.pi])
def test_a_ship_to_the_north_is_read_whatever_its_interval(tmp_path, low):
    courses = np.random.default_rng(1).uniform(low, low + 2 * math.pi, 60) % 360
    rows = "".join(
        f"1,{1_641_168_000 + 1200 * i},{i / 20},0.0,{9 + i % 2 / 10},{course},A\n" for i, course in enumerate(courses)
    )
    assert len(read(tmp_path, rows)[0]) == 2


def test_lines_that_quotes_swallow_are_counted_also_where_the_number_of_columns_fits(tmp_path):
    rows = ship("1", count=20, kind="A").splitlines(keepends=True)
    rows[4] = rows[4].replace(",A\n", ',"A\n')
    rows[15] = rows[15].replace(",A\n", ',A"\n')
    _, cleaning = read(tmp_path, "".join(rows))
    assert (cleaning.points, cleaning.bad_points) == (20, 12)


def test_a_ship_with_and_without_a_leading_zero_is_one_ship(tmp_path):
    tracks, cleaning = read(tmp_path, ship("021000001") + ship("21000001", lon=25.0) + ship("A07") + ship("7"))
    assert [track.ship for track in tracks] == ["021000001", "021000001", "A07", "7"]
    assert keys(cleaning) == ["program.leading-zeros"] and not cleaning.dropped


def test_times_to_the_minute_are_told_and_repeated_lines_are_not(tmp_path):
    rows = ship("1", count=60, step_s=12)
    minutes = "".join(
        ",".join([cells[0], str(int(cells[1]) // 60 * 60), *cells[2:]]) + "\n"
        for cells in (line.split(",") for line in rows.splitlines())
    )
    _, cleaning = read(tmp_path, minutes)
    assert keys(cleaning) == ["program.times-repeated"] and cleaning.repeated_points == 48
    assert not keys(read(tmp_path, rows + rows)[1])


def test_a_class_without_a_training_ship_is_doubted():
    tracks = [replace(track, label="Cargo") for track in generate(40, seed=1)]
    doubt = doubts({"train": tracks, "val": tracks, "test": [*tracks, replace(tracks[0], label="Rare")]})[0]
    assert doubt.key == "program.class-without-ships"
    assert (doubt.values["names"], doubt.values["split"]) == (["Rare"], "train")


@pytest.mark.parametrize("name", ["Navigational status", "activity"])
def test_what_a_ship_does_is_never_proposed_as_its_class(name):
    table = {name: ["Under way using engine", "At anchor", "Moored"] * 10, "kind": ["Cargo", "Tanker", "Cargo"] * 10}
    assert propose(table, {})["class"] == "kind"
    assert "class" not in propose({name: table[name]}, {})


def test_other_waters_sizes_and_times_between_points_are_told(tmp_path):
    known = [replace(track, length=50.0 + i) for i, track in enumerate(generate(60, seed=1))]
    trained = classifier(tmp_path, known)

    def told(tracks: list[Track]) -> list[str]:
        rows = [encode(words, trained.vocabulary, -1) for words in as_texts(tracks, **trained.text)]
        return [text.key if "what" not in text.values else text.values["what"].key for text in unlike(trained, rows)]

    assert told(known) == []
    assert told([replace(track, lat=track.lat + 60) for track in known]) == ["program.other-waters"]
    assert told([replace(track, length=450.0) for track in known]) == ["program.other-sizes"]
    assert told([replace(track, time=track.time * 30) for track in known]) == ["program.other-sampling"]
