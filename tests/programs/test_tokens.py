"""The words of a track: right cells, right bins, and never the answer."""

from __future__ import annotations

import sys
from dataclasses import replace

import h3
import numpy as np
import pytest

from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trajectory.grammars import GRAMMARS, as_texts
from ascendrun.programs.trajectory.grammars.bins import compass, speed_word
from ascendrun.programs.trajectory.grammars.guide import PUBLISHED, digits_of, guide_words
from ascendrun.programs.trajectory.leakage import LabelLeakError, check_leak, check_same_segments
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.points.tracks import Track
from ascendrun.programs.trajectory.tokens import MASK, PAD, UNKNOWN, Words, encode, make_vocabulary


def make_track(**changes: object) -> Track:
    track = Track(
        "t",
        "s",
        np.array([1631859102, 1631859171]),
        np.array([59.373173, 59.373333]),
        np.array([6.043317, 6.043462]),
        np.array([1.5, 0.1]),
        np.array([27.1, np.nan]),
        "Bulk_Carrier",
        None,
    )
    return replace(track, **changes)


def test_the_guide_grammar_writes_time_cell_speed_and_course_of_each_point():
    words = guide_words(make_track(), resolution=10)
    assert words.text() == (
        "YEAR_2021 MONTH_9 DAY_17 HOUR_6 MINUTE_11 SECOND_42 H3_res_10 H3_base_4 H3_cell_1_6 H3_cell_2_0 H3_cell_3_3 "
        "H3_cell_4_6 H3_cell_5_5 H3_cell_6_2 H3_cell_7_2 H3_cell_8_2 H3_cell_9_4 H3_cell_10_1 SPD_STOP COG_NE "
        "POINT_END "
        "YEAR_2021 MONTH_9 DAY_17 HOUR_6 MINUTE_12 SECOND_51 H3_res_10 H3_base_4 H3_cell_1_6 H3_cell_2_0 H3_cell_3_3 "
        "H3_cell_4_6 H3_cell_5_5 H3_cell_6_2 H3_cell_7_2 H3_cell_8_2 H3_cell_9_4 H3_cell_10_1 SPD_STOP COG_UNKNOWN "
        "POINT_END"
    )


@pytest.mark.parametrize("cell", ["8a0983d5250ffff", "8a30d1cb1a37fff", "8ac319082647fff"])
def test_the_children_of_a_cell_differ_in_their_last_word_only(cell):
    """S0-B6: the published digits are off by one, and the children of a cell look alike."""
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


@pytest.mark.parametrize(
    "degrees, word",
    [(337.4, "NW"), (337.5, "N"), (0, "N"), (22.4, "N"), (22.5, "NE"), (180, "S"), (float("nan"), "UNKNOWN")],
)
def test_courses_fall_into_sectors_of_45_degrees_around_the_compass_points(degrees, word):
    assert compass(degrees) == word


@pytest.mark.parametrize(
    "knots, word",
    [(0, "STOP"), (1.99, "STOP"), (2, "SLOW"), (5, "MID"), (10, "FAST"), (15, "HIGH"), (float("nan"), "UNKNOWN")],
)
def test_speeds_fall_into_five_words(knots, word):
    assert speed_word(knots) == word


@pytest.mark.parametrize("grammar", list(GRAMMARS))
def test_the_class_is_never_in_the_text(grammar):
    """S0-B1: the published texts hold the class word at every point."""
    tracks = generate(60, seed=1)
    plain = as_texts(tracks, grammar=grammar, resolution=10)
    renamed = as_texts(
        [make_track(id=t.id, time=t.time, lat=t.lat, lon=t.lon, sog=t.sog, cog=t.cog, label="X") for t in tracks],
        grammar=grammar,
        resolution=10,
    )
    assert plain == renamed
    check_leak(plain, [str(track.label) for track in tracks])


@pytest.mark.parametrize("grammar", ["guide", "compact", "motion"])
def test_every_point_has_as_many_words_and_points_without_speed_or_course_have_words_too(grammar):
    track = make_track(sog=np.array([np.nan, np.nan]), cog=np.array([np.nan, np.nan]))
    words = as_texts([track], grammar=grammar, resolution=10)[0]
    assert len({len(point) for point in words.points}) == 1 and len(words.points) == 2


def test_the_leak_check_trips_on_a_class_word_in_any_spelling():
    texts = [Words((), (("SPD_STOP", "oil-tanker"),)), Words((), (("SPD_STOP", "x"),))]
    with pytest.raises(LabelLeakError, match="oil-tanker"):
        check_leak(texts, ["Oil_Tanker", "Cargo"])


def test_the_leak_check_trips_on_a_label_under_another_name():
    texts = [Words((), (("a", f"TYPE_{number % 3}"),)) for number in range(12)]
    with pytest.raises(LabelLeakError, match="TYPE_0 = Cargo"):
        check_leak(texts, [("Cargo", "Tanker", "Tug")[number % 3] for number in range(12)])


def test_words_that_training_hardly_knows_become_unknown():
    texts = [Words(("often",), (("a",),)), Words(("often",), (("b",),))]
    vocabulary = make_vocabulary(texts, min_count=2)
    assert vocabulary == {PAD: 0, UNKNOWN: 1, MASK: 2, "often": 3}
    assert encode(texts[0], vocabulary, 0).ids().tolist() == [3, 1]


def test_the_published_grammars_write_what_the_published_code_wrote():
    cells = ("8a0983d5250ffff", "8a0983d5a50ffff")
    second = {name: words(cells[1], cells[0]) for name, words in PUBLISHED.items()}
    assert second["char_split"][:3] == ("H3_CHAR_0_8", "H3_CHAR_1_a", "H3_CHAR_2_0") and len(second["char_split"]) == 15
    assert second["hierarchical_optimized"] == (
        "H3_RES_a",
        "H3_L1_8a0",
        "H3_L2_8a098",
        "H3_L3_8a0983d",
        "H3_L4_8a0983d5a",
    )
    assert second["semantic"] == ("H3_VER_8", "H3_RES_a", "H3_BASE_0983", "H3_SUB_d5a5", "H3_PRECISE_0ff")
    assert second["grid_based"] == ("GRID_RES_a", "GRID_MAJOR_09", "GRID_MID_83d", "GRID_MINOR_5a5", "GRID_MICRO_0ff")
    assert second["relative"] == (
        "H3_RES_SAME",
        "H3_L1_SAME",
        "H3_L2_SAME",
        "H3_L3_SAME",
        "H3_L4_CHANGE",
        "H3_L4_NEW_5a",
    )
    assert second["simple"] == ("H3_8a0983d5a50ffff",)
    assert second["grouped"] == ("H3_PREFIX_8a098", "H3_MID_3d5a5", "H3_SUFFIX_0ffff")
    assert PUBLISHED["relative"](cells[0], None) == PUBLISHED["hierarchical_optimized"](cells[0], None)
    assert PUBLISHED["cell_based"]("8a0983d5250ffff", None)[:4] == (
        "H3_res_10",
        "H3_base_4",
        "H3_cell_1_4",
        "H3_cell_2_6",
    )


def test_relative_texts_of_uneven_points_are_encoded_and_pickled_whole():
    words = as_texts([make_track(lat=np.array([59.3, 60.0]))], grammar="relative", resolution=10)[0]
    assert len({len(point) for point in words.points}) == 2
    ids = encode(words, make_vocabulary([words], min_count=1), 0)
    assert len(ids) == len(ids.ids()) == len(words.all())


def test_the_guide_s_texts_of_a_segment_are_not_cut():
    """S0-B5: 600 to 660 words a segment against a window of 512. The model takes as many as the longest sample has."""
    track = generate(1, seed=2, min_points=30, max_points=30)[0]
    words = as_texts([track], grammar="guide", resolution=10)[0]
    assert len(encode(words, make_vocabulary([words], min_count=1), 0)) == 30 * 21 > 512


def test_a_machine_without_h3_is_told_what_to_do_and_the_motion_grammar_needs_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "h3", None)
    for grammar in set(GRAMMARS) - {"motion", "motion_size"}:
        with pytest.raises(InvalidDataError, match="--grammar=motion"):
            as_texts([make_track()], grammar=grammar, resolution=10)
    assert as_texts([make_track()], grammar="motion", resolution=10)[0].points


def test_the_motion_grammar_reads_headings_and_size_where_they_are_known():
    plain = as_texts([make_track()], grammar="motion_size", resolution=10)[0]
    told = as_texts(
        [make_track(heading=np.array([27.0, 120.0]), length=180.0, width=32.0)], grammar="motion_size", resolution=10
    )[0]
    assert {"LEN_x", "WID_x", "SLIM_x", "HK_x"} <= set(plain.head) and not {"LEN_x", "WID_x", "HK_x"} & set(told.head)
    assert plain.points[0][2] == "D_x" and told.points[0][2] == "D_0"


def test_one_track_under_two_names_in_two_splits_is_a_leak():
    with pytest.raises(LabelLeakError, match="a in train = b in test"):
        check_same_segments({"train": [("a", "mark"), ("c", "other")], "test": [("b", "mark")]})
    check_same_segments({"train": [("a", "mark"), ("a2", "mark")], "test": [("b", "another")]})
