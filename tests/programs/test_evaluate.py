"""Scores, batches and the classifier's view of a track."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from ascendrun.programs.trajectory.batches import augment
from ascendrun.programs.trajectory.evaluation.calibrate import Adjustment, choose_adjustment, measure
from ascendrun.programs.trajectory.evaluation.evaluate import merge
from ascendrun.programs.trajectory.evaluation.scores import majority, score
from ascendrun.programs.trajectory.model import Sizes, config_of_sizes, make_model, pad
from ascendrun.programs.trajectory.stages.evaluate_stage import vote_by_ship
from ascendrun.programs.trajectory.tokens import Encoded

CONFIG = config_of_sizes(words=30, hidden=16, layers=2, heads=2, max_length=32, dropout=0.0)


def test_scores_agree_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    truth, called = rng.integers(0, 3, 200).tolist(), rng.integers(0, 4, 200).tolist()
    scores = score(truth, called, ["a", "b", "c", "d"])
    assert scores.accuracy == pytest.approx(metrics.accuracy_score(truth, called))
    each = metrics.f1_score(truth, called, average=None, labels=range(4))
    assert [row.f1 for row in scores.classes] == pytest.approx(each)
    assert scores.macro_f1 == pytest.approx(metrics.f1_score(truth, called, average="macro", labels=range(3)))
    assert np.array_equal(scores.confusion, metrics.confusion_matrix(truth, called, labels=range(4)))


def test_the_baseline_says_the_most_common_class_of_training():
    baseline = majority([0, 1, 1, 2], [0, 0, 0, 1], ["a", "b", "c"])
    assert baseline.accuracy == 0.25 and baseline.macro_f1 == pytest.approx(0.2)


def test_a_sample_lost_or_counted_twice_is_noticed():
    row = np.ones(2)
    assert merge([([1], [row]), ([0], [row])], 2, 2).tolist() == [[1, 1], [1, 1]]
    for numbers in ([0, 0], [0, 2], [0]):
        with pytest.raises(AssertionError):
            merge([(numbers, [row] * len(numbers))], 2, 2)


def test_augmentation_follows_from_its_key_and_keeps_the_head():
    sample = Encoded(np.array([2, 3]), tuple(np.arange(4, 44).reshape(20, 2)), 0)

    def cropped(epoch):
        return augment(sample, min_points=5, crop=1.0, hide=0.0, unknown=1, key=(1, epoch, 7)).tolist()

    seen = [cropped(epoch) for epoch in range(20)]
    assert seen[3] == cropped(3)
    assert all(ids[:2] == [2, 3] and len(ids) >= 12 for ids in seen)
    assert len(collections.Counter(map(len, seen))) > 3
    hidden = augment(sample, min_points=5, crop=0.0, hide=0.5, unknown=1, key=(1, 0, 7))
    assert 5 < (hidden == 1).sum() < 37


@pytest.mark.parametrize("pooling, attention", [("mean", "causal"), ("last", "causal"), ("mean", "bidirectional")])
def test_every_word_of_a_track_reaches_the_answer_and_padding_and_neighbours_do_not(pooling, attention):
    """S0-B2: a causal model read at position 0 sees the first word alone."""
    model = make_model(Sizes(CONFIG, 3, 0.0, pooling, attention), seed=1).eval()
    row = np.arange(2, 12)
    with torch.no_grad():
        usual = model(*pad([row], multiple=1))
        for place in range(len(row)):
            other = row.copy()
            other[place] = 29
            assert not torch.allclose(model(*pad([other], multiple=1)), usual, atol=1e-5), place
        among = model(*pad([row, np.arange(2, 28)], multiple=16))[:1]
    torch.testing.assert_close(among, usual, rtol=1e-4, atol=1e-5)


def test_a_classifier_that_is_as_often_right_as_it_says_has_no_calibration_error_and_an_overconfident_one_does():
    truth = [0] * 80 + [1] * 20
    honest = measure(np.tile([0.8, 0.2], (100, 1)), truth)
    assert honest.ece == pytest.approx(0.0) and [row.count for row in honest.bins] == [100]
    loud = measure(np.tile([0.99, 0.01], (100, 1)), truth)
    assert loud.ece == pytest.approx(0.19) and loud.nll > honest.nll and loud.brier > honest.brier


def test_temperature_is_found_that_undoes_overconfidence_and_never_changes_what_is_called():
    truth = [0] * 80 + [1] * 20
    loud = np.tile([0.99, 0.01], (100, 1))
    found = choose_adjustment(loud, truth, [0.5, 0.5], ["a", "b"], macro_share=-1.0)
    assert found.temperature > 2 and found.prior_shift == 0
    mended = found.apply(loud, [0.5, 0.5])
    assert measure(mended, truth).ece < 0.03 and (mended.argmax(1) == loud.argmax(1)).all()


def test_a_prior_shift_calls_rare_classes_more():
    row = np.array([[0.6, 0.4]])
    assert Adjustment(1.0, 0.0).apply(row, [0.9, 0.1]).argmax() == 0
    assert Adjustment(1.0, 1.0).apply(row, [0.9, 0.1]).argmax() == 1


def test_a_ship_of_several_segments_is_judged_once_by_their_mean():
    ships, means, truth = vote_by_ship(["x", "y", "x"], np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), [0, 1, 0])
    assert ships == ["x", "y"] and truth == [0, 1] and means[0] == pytest.approx([0.6, 0.4])
