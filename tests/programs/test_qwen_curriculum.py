"""Which samples a step takes: the table's shares, exactly, whatever the ranks."""

from fractions import Fraction

import numpy as np
import pytest

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora import curriculum
from ascendrun.programs.qwen_lora.rules import InvalidStagesError, read_stages, stage_of
from ascendrun.text import Text

GUIDE = ["0.3=80/20/0", "0.7=40/40/20", "1=25/35/40"]
LEVELS = ["explain", "reasoning", "topology"]
STAGES = tuple(read_stages(GUIDE, 3))


def strays(stages, *, steps, batch_size):
    """How far the counts of any window are from the table's at most; how far those from the first step on."""
    unit, wanted = curriculum.targets(stages, steps=steps, batch_size=batch_size)
    given = curriculum.quotas(stages, steps=steps, batch_size=batch_size)
    assert (np.diff(given, axis=0) >= 0).all() and (np.diff(given.sum(1)) == batch_size).all()
    error = given * unit - wanted
    window = (error.max(0) - error.min(0)).max()
    return Fraction(int(window), unit), Fraction(int(abs(error).max()), unit)


@pytest.mark.parametrize("batch_size", [2, 4, 6, 8, 16, 48, 64, 128])
@pytest.mark.parametrize("steps", [10, 61, 206])
def test_any_window_of_steps_is_within_one_sample_of_the_guides_table(batch_size, steps):
    window, so_far = strays(STAGES, steps=steps, batch_size=batch_size)
    assert window <= 1 and so_far < 1


@pytest.mark.parametrize("table", [["1=61/28/11"], ["0.5=1/1/1", "1=5/3/90"], ["0.1=7/2/1", "0.2=1/0/0", "1=13/29/31"]])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_where_numbers_allow_no_better_it_is_less_than_two(table, batch_size):
    window, so_far = strays(read_stages(table, 3), steps=90, batch_size=batch_size)
    assert window < 2 and so_far < 1


def test_the_late_stage_is_reached_with_three_epochs():
    """S3-B1: progress by whole epochs is 0, .33, .67 and never gets there."""
    course = make_course(rows=(40, 40, 10), steps=3 * 90 // 8, batch_size=8)
    late = [step for step in range(course.steps) if course.stage(step) == 2]
    assert len(late) / course.steps == pytest.approx(0.3, abs=1 / course.steps)
    taken = [number for step in late for number in course.samples(step)]
    assert sum(number >= 80 for number in taken) / len(taken) == pytest.approx(0.4, abs=0.02)
    assert [stage_of(step, 10, STAGES) for step in range(10)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def make_course(*, rows=(30, 30, 6), steps=40, batch_size=8, seed=3, row_tokens=0, spread=1, lengths=None):
    starts = np.cumsum([0, *rows])
    numbers = [list(range(start, start + count)) for start, count in zip(starts, rows)]
    return curriculum.Course(
        curriculum.Table(tuple(LEVELS), STAGES),
        numbers,
        lengths or [10] * sum(rows),
        steps=steps,
        seed=seed,
        batch_size=batch_size,
        row_tokens=row_tokens,
        spread=spread,
    )


def test_a_short_level_repeats_all_its_rows_before_one_comes_again():
    course = make_course(steps=200)
    given = [number for step in range(200) for number in course.samples(step)]
    short = np.bincount(given, minlength=66)[60:]
    assert short.min() > 10 and short.max() - short.min() <= 1
    rounds = np.array([number for number in given if number >= 60][:60]).reshape(10, 6)
    assert (np.sort(rounds) == range(60, 66)).all() and len({tuple(each) for each in rounds.tolist()}) > 5


def test_a_step_asked_for_alone_is_that_of_the_whole_course():
    """A resume in mid-stage; S3-B8: the order hangs on the seed, not on some global state."""
    whole = [make_course().units(step) for step in range(40)] and make_course()
    in_order = [whole.units(step) for step in range(40)]
    np.random.seed(1)
    assert [make_course().units(step) for step in (39, 17, 0, 25)] == [in_order[step] for step in (39, 17, 0, 25)]
    assert make_course(seed=4).units(17) != in_order[17]


def test_ranks_change_the_rows_but_not_the_samples_of_a_step():
    lengths = [5 + 7 * i % 40 for i in range(66)]
    alone = make_course(lengths=lengths, row_tokens=64)
    many = make_course(lengths=lengths, row_tokens=64, spread=4)
    for step in range(40):
        assert sorted(sum(alone.units(step), ())) == sorted(sum(many.units(step), ()))
        assert len(many.units(step)) % 4 == 0


def test_rows_are_even_and_none_is_longer_than_allowed():
    lengths = [3, 60, 31, 30, 29, 8, 8, 64, 1, 2]
    rows = curriculum.pack_evenly(range(10), lengths, row_tokens=64, spread=2)
    used = [sum(lengths[number] for number in row) for row in rows]
    assert max(used) <= 64 and len(rows) == 4 and sorted(sum(rows, ())) == list(range(10))
    assert len(curriculum.pack_evenly([0, 1], lengths, row_tokens=64, spread=8)) == 2


def choose(rows_of, wanted="auto"):
    return curriculum.choose_table(rows_of, wanted=wanted, levels=LEVELS, stages=GUIDE)


def test_rows_without_difficulty_are_trained_on_as_usual_with_the_guides_warning():
    table = choose({None: 10})
    assert not table.is_curriculum and table.notes == (Text("program.no-curriculum", "", why=curriculum.NO_DIFFICULTY),)
    with pytest.raises(InvalidDataError, match="requires samples with a difficulty"):
        choose({None: 10}, wanted="on")


def test_difficulties_that_the_table_cannot_place_are_refused():
    with pytest.raises(InvalidDataError, match="3 of 10 samples have no difficulty"):
        choose({None: 3, "explain": 7})
    with pytest.raises(InvalidDataError, match="the data has hard, expected explain"):
        choose({"hard": 3, "explain": 7})
    assert not choose({"hard": 3, None: 7}, wanted="off").is_curriculum


def test_a_level_without_rows_gives_its_share_to_the_next_easier_one():
    table = choose({"explain": 2000, "reasoning": 500})
    assert table.levels == ("explain", "reasoning")
    assert table.stages[2][1] == (Fraction(1, 4), Fraction(3, 4))
    assert table.notes == (
        Text("program.level-missing", "", level="topology", home="reasoning"),
        Text("program.few-samples", "", count=500, level="reasoning", advised=curriculum.FEW_ROWS),
    )
    assert choose({"reasoning": 2000, "topology": 2000}).notes == (
        Text("program.level-missing", "", level="explain", home="reasoning"),
    )


def test_how_often_each_level_is_seen_is_printed():
    """Half of all samples are easy ones, of which there are few."""
    table = curriculum.Table(("explain", "reasoning"), tuple(read_stages(["1=50/50"], 2)))
    course = curriculum.Course(table, [[0, 1], [2, 3, 4, 5]], [5] * 6, steps=4, batch_size=4, seed=0, row_tokens=0)
    uses = [text.values for text in course.describe() if text.key == "program.level-use"]
    assert uses == [
        {"level": "explain", "rows": 2, "count": 8, "times": 4.0},
        {"level": "reasoning", "rows": 4, "count": 8, "times": 2.0},
    ]


@pytest.mark.parametrize(
    "texts, says",
    [
        (["0.3=80/20"], "has 2 parts; expected 3"),
        (["x=1/1/1"], "expected END=PART"),
        (["1=0/0/0"], "not all 0"),
        (["0.7=1/1/1", "0.3=1/1/1", "1=1/1/1"], "must rise"),
        (["0.7=1/1/1"], "the last be 1"),
        (["1=2/-1/1"], "0 or more"),
    ],
)
def test_a_table_that_is_none_is_refused(texts, says):
    with pytest.raises(InvalidStagesError) as refused:
        read_stages(texts, 3)
    assert says in str(refused.value.problem.message)
