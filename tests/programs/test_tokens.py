"""The words of a track: right cells, right bins, and never the answer."""

from __future__ import annotations

from dataclasses import replace

import h3
import numpy as np
import pytest

from ascendrun.programs.trajectory.generate import generate
from ascendrun.programs.trajectory.tokens import (
    PAD,
    UNKNOWN,
    LabelLeak,
    Words,
    as_texts,
    check_leak,
    compass,
    digits_of,
    encode,
    guide_words,
    make_vocabulary,
    speed_word,
)
from ascendrun.programs.trajectory.tracks import Track


def make_track(**changes: object) -> Track:
    track = Track("t", "s", np.array([1631859102, 1631859171]), np.array([59.373173, 59.373333]),
                  np.array([6.043317, 6.043462]), np.array([1.5, 0.1]), np.array([27.1, np.nan]), "Bulk_Carrier", None)
    return replace(track, **changes)


def test_the_guide_grammar_writes_time_cell_speed_and_course_of_each_point():
    words = guide_words(make_track(), resolution=10)
    assert words.text() == (
        "YEAR_2021 MONTH_9 DAY_17 HOUR_6 MINUTE_11 SECOND_42 H3_res_10 H3_base_4 H3_cell_1_6 H3_cell_2_0 H3_cell_3_3 "
        "H3_cell_4_6 H3_cell_5_5 H3_cell_6_2 H3_cell_7_2 H3_cell_8_2 H3_cell_9_4 H3_cell_10_1 SPD_STOP COG_NE "
        "POINT_END "
        "YEAR_2021 MONTH_9 DAY_17 HOUR_6 MINUTE_12 SECOND_51 H3_res_10 H3_base_4 H3_cell_1_6 H3_cell_2_0 H3_cell_3_3 "
        "H3_cell_4_6 H3_cell_5_5 H3_cell_6_2 H3_cell_7_2 H3_cell_8_2 H3_cell_9_4 H3_cell_10_1 SPD_STOP COG_UNKNOWN "
        "POINT_END")


@pytest.mark.parametrize("cell", ["8a0983d5250ffff", "8a30d1cb1a37fff", "8ac319082647fff"])
def test_the_children_of_a_cell_differ_in_their_last_word_only(cell):
    for resolution in range(1, 11):
        ancestor = h3.cell_to_parent(cell, resolution - 1)
        written = [digits_of(child) for child in h3.cell_to_children(ancestor)]
        assert len({words[-1] for words in written}) == len(written) >= 6
        assert len({words[1:-1] for words in written}) == 1
        assert {words[-1] for words in written} <= {f"H3_cell_{resolution}_{digit}" for digit in range(7)}


def test_different_cells_have_different_words_everywhere_also_around_pentagons():
    for base in h3.get_res0_cells():
        cells = h3.cell_to_children(base, 2)
        assert len({digits_of(cell) for cell in cells}) == len(cells)


@pytest.mark.parametrize("degrees, word", [(337.4, "NW"), (337.5, "N"), (0, "N"), (22.4, "N"), (22.5, "NE"), (180, "S"),
                                           (float("nan"), "UNKNOWN")])
def test_courses_fall_into_sectors_of_45_degrees_around_the_compass_points(degrees, word):
    assert compass(degrees) == word


@pytest.mark.parametrize("knots, word", [(0, "STOP"), (1.99, "STOP"), (2, "SLOW"), (5, "MID"), (10, "FAST"),
                                         (15, "HIGH"), (float("nan"), "UNKNOWN")])
def test_speeds_fall_into_five_words(knots, word):
    assert speed_word(knots) == word


@pytest.mark.parametrize("grammar", ["guide", "compact"])
def test_the_class_is_never_in_the_text(grammar):
    tracks = generate(60, seed=1)
    plain = as_texts(tracks, grammar=grammar, resolution=10)
    renamed = as_texts([make_track(id=t.id, time=t.time, lat=t.lat, lon=t.lon, sog=t.sog, cog=t.cog, label="X")
                        for t in tracks], grammar=grammar, resolution=10)
    assert plain == renamed
    check_leak(plain, [str(track.label) for track in tracks])


@pytest.mark.parametrize("grammar", ["guide", "compact"])
def test_every_point_has_as_many_words_and_points_without_speed_or_course_have_words_too(grammar):
    track = make_track(sog=np.array([np.nan, np.nan]), cog=np.array([np.nan, np.nan]))
    words = as_texts([track], grammar=grammar, resolution=10)[0]
    assert len({len(point) for point in words.points}) == 1 and len(words.points) == 2


def test_the_leak_check_trips_on_a_class_word_in_any_spelling():
    texts = [Words((), (("SPD_STOP", "oil-tanker"),)), Words((), (("SPD_STOP", "x"),))]
    with pytest.raises(LabelLeak, match="oil-tanker"):
        check_leak(texts, ["Oil_Tanker", "Cargo"])


def test_the_leak_check_trips_on_a_label_under_another_name():
    texts = [Words((), (("a", f"TYPE_{number % 3}"),)) for number in range(12)]
    with pytest.raises(LabelLeak, match="TYPE_0 = Cargo"):
        check_leak(texts, [("Cargo", "Tanker", "Tug")[number % 3] for number in range(12)])


def test_words_that_training_hardly_knows_become_unknown():
    texts = [Words(("often",), (("a",),)), Words(("often",), (("b",),))]
    vocabulary = make_vocabulary(texts, min_count=2)
    assert vocabulary == {PAD: 0, UNKNOWN: 1, "often": 2}
    assert encode(texts[0], vocabulary, 0).ids().tolist() == [2, 1]
