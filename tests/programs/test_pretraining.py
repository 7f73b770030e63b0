"""Which words pretraining hides, and that each is asked at its own place."""

import numpy as np
import pytest

from ascendrun.programs.trajectory.data import Samples
from ascendrun.programs.trajectory.grammars import as_texts
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.tokens import MASK, SPECIAL, encode, guessable, hide_words, make_vocabulary
from ascendrun.programs.trajectory.train import Pretraining
from tests.programs.conftest import alone


def corpus(grammar):
    texts = as_texts(generate(60, seed=3), grammar=grammar, resolution=6)
    vocabulary = make_vocabulary(enumerate(texts), min_count=1)
    return vocabulary, [encode(words, vocabulary, 0).ids() for words in texts]


@pytest.mark.parametrize("grammar", ["guide", "motion"])
def test_the_share_of_hidden_words_is_the_one_asked_for(grammar):
    """S0-B4: two rules multiplied made 1.19 % of what was called 15 %."""
    vocabulary, rows = corpus(grammar)
    may = guessable(vocabulary)
    hidden = sum(len(hide_words(row, may, vocabulary, rate=0.15, key=(i,))[1]) for i, row in enumerate(rows))
    assert hidden / sum(int(may[row].sum()) for row in rows) == pytest.approx(0.15, abs=0.005)


def test_every_hidden_word_is_asked_at_its_own_place_and_nothing_else_changes():
    """S0-B3: labels counted by words, inputs by ids, so that none of them met."""
    vocabulary, rows = corpus("guide")
    may = guessable(vocabulary)
    for i, row in enumerate(rows):
        seen, places = hide_words(row, may, vocabulary, rate=0.3, key=(i,))
        elsewhere = np.ones(len(row), dtype=bool)
        elsewhere[places] = False
        assert (seen[elsewhere] == row[elsewhere]).all()
        assert may[row[places]].all() and len(set(places.tolist())) == len(places)


def test_most_hidden_words_become_masks_and_the_others_are_drawn_from_all_words():
    """S0-B9: replacements were drawn from five words only."""
    vocabulary, rows = corpus("guide")
    may, words = guessable(vocabulary), list(vocabulary)
    masks = same = 0
    others = set()
    for i, row in enumerate(rows * 4):
        seen, places = hide_words(row, may, vocabulary, rate=0.5, key=(i,))
        masks += int((seen[places] == vocabulary[MASK]).sum())
        same += int((seen[places] == row[places]).sum())
        others |= {words[number] for number in seen[seen != row]} - set(SPECIAL)
    total = sum(len(hide_words(row, may, vocabulary, rate=0.5, key=(i,))[1]) for i, row in enumerate(rows * 4))
    assert masks / total == pytest.approx(0.8, abs=0.02) and 0.09 < same / total < 0.14
    assert len(others) > 0.9 * int(may.sum())


def test_clock_words_and_ends_of_points_are_never_asked():
    vocabulary, _ = corpus("guide")
    may = guessable(vocabulary)
    assert not any(
        may[number]
        for word, number in vocabulary.items()
        if word in (*SPECIAL, "POINT_END") or word.startswith(("YEAR_", "HOUR_", "SECOND_"))
    )
    assert any(may[number] for word, number in vocabulary.items() if word.startswith("H3_cell_"))


def test_what_is_hidden_follows_from_the_key():
    vocabulary, rows = corpus("motion")
    may = guessable(vocabulary)
    one, same, other = (
        hide_words(rows[0], may, vocabulary, rate=0.2, key=key)[0].tolist() for key in ((1, 2, 3), (1, 2, 3), (1, 3, 3))
    )
    assert one == same != other


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_in_a_batch_each_answer_stands_at_the_row_and_place_that_is_asked(objective):
    """S0-B3 once more, behind cropping and padding: rows of unlike length, answers of all in one tensor."""
    texts = as_texts(generate(12, seed=5), grammar="motion", resolution=6)
    vocabulary = make_vocabulary(enumerate(texts), min_count=1)
    encoded = [encode(words, vocabulary, 0) for words in texts]
    samples = Samples({}, vocabulary, {})
    vars(samples)["encoded"] = {"train": encoded, "val": []}
    options = {
        "objective": objective,
        "mlm_probability": 0.3,
        "random_crop_prob": 0.0,
        "place_dropout_prob": 0.0,
        "size_dropout_prob": 0.0,
        "token_mask_prob": 0.0,
        "min_segment_size": 5,
        "pad_to_multiple_of": 16,
    }
    here = alone()
    task = Pretraining(options, samples, here, None, None)
    tensors = task.batch([task.masked(sample, (i,), is_training=True) for i, sample in enumerate(encoded)]).tensors
    originals, shift = [sample.ids() for sample in encoded], int(objective == "clm")
    triples = list(zip(tensors["rows"].tolist(), tensors["places"].tolist(), tensors["words"].tolist()))
    assert len(triples) > 100 and len({len(row) for row in originals}) > 3
    assert {row for row, _, _ in triples} == set(range(12))
    assert all(originals[row][place + shift] == word for row, place, word in triples)
    if shift:
        assert all(np.array_equal(tensors["ids"][i, : len(row)], row) for i, row in enumerate(originals))
