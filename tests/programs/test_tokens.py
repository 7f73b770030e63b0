"""The words of a track: right cells, right bins, and never the answer."""

import collections
import sys
from dataclasses import replace

import h3
import numpy as np
import pytest

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory import grammars, tokens
from ascendrun.programs.trajectory.data import Record, text_of
from ascendrun.programs.trajectory.leaks import LabelLeakError, check_leak, check_same_segments
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.points.tracks import FEATURES, Track
from tests.programs.conftest import options_of


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
    words = grammars.as_texts([make_track()], grammar="guide", resolution=10)[0]
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
        written = [grammars.digits_of(child) for child in h3.cell_to_children(ancestor)]
        assert len({words[-1] for words in written}) == len(written) >= 6
        assert len({words[1:-1] for words in written}) == 1
        assert {words[-1] for words in written} <= {f"H3_cell_{resolution}_{digit}" for digit in range(7)}


def test_different_cells_have_different_words_everywhere_also_around_pentagons():
    for base in h3.get_res0_cells():
        cells = h3.cell_to_children(base, 2)
        assert len({grammars.digits_of(cell) for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    "degrees, word",
    [(337.4, "NW"), (337.5, "N"), (0, "N"), (22.4, "N"), (22.5, "NE"), (180, "S"), (float("nan"), "UNKNOWN")],
)
def test_courses_fall_into_sectors_of_45_degrees_around_the_compass_points(degrees, word):
    assert grammars.compass(degrees) == word


@pytest.mark.parametrize(
    "knots, word",
    [(0, "STOP"), (1.99, "STOP"), (2, "SLOW"), (5, "MID"), (10, "FAST"), (15, "HIGH"), (float("nan"), "UNKNOWN")],
)
def test_speeds_fall_into_five_words(knots, word):
    assert grammars.speed_word(knots) == word


@pytest.mark.parametrize("grammar", list(grammars.GRAMMARS))
def test_the_class_is_never_in_the_text(grammar):
    """S0-B1: the published texts hold the class word at every point."""
    tracks = generate(60, seed=1)
    plain = grammars.as_texts(tracks, grammar=grammar, resolution=10)
    renamed = grammars.as_texts([replace(track, label="X") for track in tracks], grammar=grammar, resolution=10)
    assert plain == renamed
    ships = [track.ship for track in tracks]
    assert check_leak(plain, [str(track.label) for track in tracks], ships) == []


@pytest.mark.parametrize("grammar", grammars.GRAMMARS)
def test_points_without_speed_or_course_have_words_too(grammar):
    track = make_track(sog=np.array([np.nan, np.nan]), cog=np.array([np.nan, np.nan]))
    words = grammars.as_texts([track], grammar=grammar, resolution=10)[0]
    assert len(words.points) == 2 and words.points[1]


def test_the_leak_check_trips_on_a_class_word_in_any_spelling():
    texts = [tokens.Words((), (("SPD_STOP", "oil-tanker"),)), tokens.Words((), (("SPD_STOP", "x"),))]
    with pytest.raises(LabelLeakError, match="oil-tanker"):
        check_leak(texts, ["Oil_Tanker", "Cargo"], ["1", "2"])


CLASSES = ("Cargo", "Fishing", "Tanker", "Tug")


def leaking(token_of, *, ships=120):
    """Texts of two pieces a ship: noise, and the tokens of `token_of(number of the class, number of the ship)`."""
    dice = np.random.default_rng(5)
    rows = [(ship, ship % len(CLASSES)) for ship in range(ships) for _ in range(2)]
    noise = [tuple(f"n{i}" for i in dice.integers(40, size=12)) for _ in rows]
    texts = [tokens.Words((), ((*more, *token_of(kind, ship)),)) for more, (ship, kind) in zip(noise, rows)]
    return texts, [CLASSES[kind] for _, kind in rows], [str(ship) for ship, _ in rows]


LEAKS = {
    "each class has its token": lambda kind, ship: (f"CODE_{kind}",),
    "one wrong row of 120": lambda kind, ship: (f"CODE_{0 if ship == 7 else kind}",),
    "three of four classes have one": lambda kind, ship: (f"CODE_{kind}",) if kind else (),
    "a pair of two columns": lambda kind, ship: (f"A_{kind // 2}", f"B_{kind % 2}"),
}


@pytest.mark.parametrize("case", LEAKS)
def test_a_label_under_another_name_is_refused_with_the_tokens_that_tell_each_class(case):
    with pytest.raises(LabelLeakError) as refused:
        check_leak(*leaking(LEAKS[case]))
    found = {row.values["name"]: set(row.values["tokens"]) for row in refused.value.args[0].values["found"]}
    told = {kind: set(LEAKS[case](kind, kind)) for kind in range(4)}
    assert found == {CLASSES[kind]: words for kind, words in told.items() if words}


def test_tokens_of_points_are_named_and_never_refused():
    """A class of one width is found by its width: the points have no class that could be removed."""
    texts, labels, ships = leaking(LEAKS["each class has its token"])
    found = check_leak(texts, labels, ships, of_points=True)
    assert [each.values["name"] for each in found] == sorted(CLASSES)


def test_numbers_as_classes_are_not_sought_in_longer_numbers():
    texts, labels, ships = leaking(lambda kind, ship: ("G4_1017_1021",))
    assert check_leak(texts, [str(101 + CLASSES.index(name)) for name in labels], ships) == []


def test_one_class_that_a_token_tells_is_named_and_chance_is_not():
    warned = check_leak(*leaking(lambda kind, ship: ("CODE",) if kind == 2 else ()))
    assert [(each.values["name"], each.values["tokens"], each.values["f1"]) for each in warned] == [
        ("Tanker", ["CODE"], 1.0)
    ]
    assert check_leak(*leaking(lambda kind, ship: (f"SHIP_{ship}",), ships=8)) == []


def test_words_that_training_hardly_knows_become_unknown():
    texts = [tokens.Words(("often",), (("a",),)), tokens.Words(("often",), (("b",),))]
    vocabulary = tokens.make_vocabulary(enumerate(texts), min_count=2)
    assert tokens.make_vocabulary([("one ship", words) for words in texts], min_count=2) == {
        tokens.PAD: 0,
        tokens.UNKNOWN: 1,
        tokens.MASK: 2,
    }
    assert vocabulary == {tokens.PAD: 0, tokens.UNKNOWN: 1, tokens.MASK: 2, "often": 3}
    assert tokens.encode(texts[0], vocabulary, 0).ids().tolist() == [3, 1]


def test_a_model_refuses_tokens_that_it_never_saw_and_warns_where_some_are_new():
    vocabulary = {word: i for i, word in enumerate([*tokens.SPECIAL, "a", "b"])}
    warnings = {}
    for known in (5, 8, 9):
        row = tokens.encode(tokens.Words((), (("a",) * known, ("new",) * (10 - known))), vocabulary, -1)
        warnings[known] = tokens.check_known([row], vocabulary, vocabulary, model="best")
    assert warnings[9] is None and [warnings[n].values["share"] for n in (5, 8)] == [0.5, 0.8]
    row = tokens.encode(tokens.Words((), (("a", "new", "new"),)), vocabulary, -1)
    with pytest.raises(InvalidDataError, match="33%"):
        tokens.check_known([row], vocabulary, vocabulary, model="best")
    ours = tokens.encode(tokens.Words((), (("a", "b", "b"),)), vocabulary, -1)
    with pytest.raises(InvalidDataError, match="33%"):
        tokens.check_known([ours], vocabulary, {"a": 0}, model="base")
    with pytest.raises(InvalidDataError, match="0%"):
        tokens.check_known([], vocabulary, vocabulary, model="best")


def test_a_model_of_texts_has_no_tokens_for_points(tmp_path):
    options = options_of("trajectory")
    text = text_of(options, [Record("t", "s", "Tug", None, tokens.Words((), (("a",),)), "")])
    assert text["grammar"] == grammars.TEXTS
    with pytest.raises(InvalidDataError, match="texts of the same form"):
        grammars.as_texts([make_track()], **text)


def test_the_guide_s_texts_of_a_segment_are_not_cut():
    """S0-B5: 600 to 660 words a segment against a window of 512. The model takes as many as the longest sample has."""
    track = generate(1, seed=2, min_points=30, max_points=30)[0]
    words = grammars.as_texts([track], grammar="guide", resolution=10)[0]
    assert len(tokens.encode(words, tokens.make_vocabulary([("s", words)], min_count=1), 0)) == 30 * 21 > 512


def test_a_machine_without_h3_is_told_what_to_do_and_the_motion_grammar_needs_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "h3", None)
    for grammar in set(grammars.GRAMMARS) - {"motion"}:
        with pytest.raises(InvalidDataError, match="--grammar=motion"):
            grammars.as_texts([make_track()], grammar=grammar, resolution=10)
    assert grammars.as_texts([make_track()], grammar="motion", resolution=10)[0].points


def test_the_published_digits_are_off_by_one_and_those_of_the_guide_are_not():
    assert grammars.cell_based("8a0983d5250ffff")[:4] == ("H3_res_10", "H3_base_4", "H3_cell_1_4", "H3_cell_2_6")
    assert grammars.digits_of("8a0983d5250ffff")[2:4] == ("H3_cell_1_6", "H3_cell_2_0")


def prefixes(words: tokens.Words) -> set[str]:
    return {word.rsplit("_", 1)[0] for word in words.all()}


def test_the_motion_grammar_reads_headings_and_size_where_they_are_known_and_has_no_word_for_the_unknown():
    told = make_track(heading=np.array([27.0, 120.0]), length=180.0, width=32.0)
    text = grammars.fit_text([told], grammar="motion", resolution=10)
    assert {"length", "width", "swing_mean", "D"} <= prefixes(grammars.as_texts([told], **text)[0])
    assert not {"length", "width", "swing_mean", "D"} & prefixes(grammars.as_texts([make_track()], **text)[0])


@pytest.mark.parametrize("left_out, gone", [("size", "length"), ("place", "lat"), ("summary", "speed_mean")])
def test_an_input_that_is_left_out_is_in_no_word_and_no_number(left_out, gone):
    track = make_track(length=180.0, width=32.0)
    names = [name for name in grammars.INPUTS if name != left_out]
    words = grammars.as_texts([track], grammar="motion", resolution=10, inputs=names)[0]
    assert not (left_out == "place" and any(tokens.IS_CELL.match(word) for word in words.head))
    assert not (left_out == "size" and gone in prefixes(words))
    assert words.values == () if left_out == "summary" else words.values[FEATURES.index(gone)] is None


def test_bins_hold_equally_many_ships_whatever_the_units_of_the_waters_and_however_many_pieces_a_ship_has():
    """Today's fixed edges gave 1,381 of 1,453 pieces the same interval token in waters with other intervals."""
    slow = [replace(track, time=track.time[0] + (track.time - track.time[0]) * 9) for track in generate(200, seed=4)]
    often = [replace(slow[0], id=f"again{i}") for i in range(500)]
    text = grammars.fit_text(slow, grammar="motion", resolution=10)
    intervals = collections.Counter(
        word for words in grammars.as_texts(slow, **text) for word in words.head if word.startswith("interval_median")
    )
    assert len(intervals) > 8 and max(intervals.values()) < 40
    crowded = grammars.fit_text([*slow, *often], grammar="motion", resolution=10)["edges"]
    assert crowded["S"][12] == pytest.approx(text["edges"]["S"][12], rel=0.1)


def test_turns_are_rates_so_a_ship_that_reports_half_as_often_has_the_same_words():
    track = generate(1, seed=3, min_points=20, max_points=20)[0]
    course = np.arange(20) * 6.0
    one = replace(track, time=np.arange(20) * 10, cog=course % 360)
    half = one.of_points(slice(None, None, 2))
    text = grammars.fit_text(generate(50, seed=1), grammar="motion", resolution=10)

    def turns(words):
        return {word for point in words.points for word in point if word.startswith("T_")}

    assert turns(grammars.as_texts([one], **text)[0]) == turns(grammars.as_texts([half], **text)[0]) and turns(
        grammars.as_texts([one], **text)[0]
    )


def test_an_unknown_cell_is_left_out_so_that_the_coarser_ones_remain():
    near, far = generate(1, seed=1)[0], generate(1, seed=1)[0]
    far = replace(far, lat=far.lat + 0.8 * grammars.PLACE_DEGREES[2])
    text = grammars.fit_text([near], grammar="motion", resolution=10)
    known = tokens.make_vocabulary(enumerate(grammars.as_texts([near], **text)), min_count=1)
    ids = tokens.encode(grammars.as_texts([far], **text)[0], known, 0)
    words = {word for word, number in known.items() if number in ids.head}
    cells = {word for word in words if tokens.IS_CELL.match(word)}
    levels = {word[:2] for word in cells if word[0] == "G"}
    assert levels == {f"G{level}" for level in range(len(levels))} and 0 < len(levels) < len(grammars.PLACE_DEGREES)
    assert known[tokens.UNKNOWN] not in ids.head


def test_one_track_under_two_names_in_two_splits_is_a_leak():
    with pytest.raises(LabelLeakError, match="a in train = b in test"):
        check_same_segments({"train": [("a", "mark"), ("c", "other")], "test": [("b", "mark")]})
    check_same_segments({"train": [("a", "mark"), ("a2", "mark")], "test": [("b", "another")]})
