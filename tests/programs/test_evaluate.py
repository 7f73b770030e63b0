"""Scores, batches and the classifier's view of a track."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from ascendrun.programs.trajectory.batches import augment
from ascendrun.programs.trajectory.evaluate import majority, merge, score
from ascendrun.programs.trajectory.model import make_model, pad
from ascendrun.programs.trajectory.tokens import Encoded

SIZES = {"words": 30, "classes": 3, "hidden": 16, "layers": 2, "heads": 2, "max_length": 32, "dropout": 0.0}


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
    sample = Encoded(np.array([2, 3]), np.arange(4, 44).reshape(20, 2), 0)

    def cropped(epoch):
        return augment(sample, min_points=5, crop=1.0, hide=0.0, unknown=1, key=(1, epoch, 7)).tolist()

    seen = [cropped(epoch) for epoch in range(20)]
    assert seen[3] == cropped(3)
    assert all(ids[:2] == [2, 3] and len(ids) >= 12 for ids in seen)
    assert len(collections.Counter(map(len, seen))) > 3
    hidden = augment(sample, min_points=5, crop=0.0, hide=0.5, unknown=1, key=(1, 0, 7))
    assert 5 < (hidden == 1).sum() < 37


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_every_word_of_a_track_reaches_the_answer_and_padding_and_neighbours_do_not(pooling):
    model = make_model({**SIZES, "pooling": pooling}, seed=1).eval()
    row = np.arange(2, 12)
    with torch.no_grad():
        usual = model(*pad([row], multiple=1))
        for place in range(len(row)):
            other = row.copy()
            other[place] = 29
            assert not torch.allclose(model(*pad([other], multiple=1)), usual, atol=1e-5), place
        among = model(*pad([row, np.arange(2, 28)], multiple=16))[:1]
    torch.testing.assert_close(among, usual, rtol=1e-4, atol=1e-5)
