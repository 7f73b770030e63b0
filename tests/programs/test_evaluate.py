"""Scores, batches and the classifier's view of a track."""

import collections
import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ascendrun.programs.trajectory import tokens
from ascendrun.programs.trajectory.data import Samples
from ascendrun.programs.trajectory.grammars import as_texts
from ascendrun.programs.trajectory.judge import Judged, judge, missing
from ascendrun.programs.trajectory.model import Sizes, config_of_sizes, make_model, pad
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.points.tracks import FEATURES
from ascendrun.programs.trajectory.scores import (
    MODEL,
    Adjustment,
    choose_adjustment,
    compare,
    fit_temperature,
    measure,
    score,
)
from ascendrun.programs.trajectory.store import Trained, load_trained, merge, save_trained
from ascendrun.programs.trajectory.trees import (
    LEAVES,
    RANDOM_TREES,
    TRIED,
    Trees,
    best_weight,
    confidence,
    grow_both,
    grow_forest,
    grow_trees,
)
from tests.programs.conftest import alone

CONFIG = config_of_sizes(words=30, hidden=16, layers=2, heads=2, max_length=32)


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


def test_a_sample_lost_or_counted_twice_is_noticed():
    row = np.ones(2)
    assert merge([([1], [row]), ([0], [row])], 2, 2).tolist() == [[1, 1], [1, 1]]
    for numbers in ([0, 0], [0, 2], [0]):
        with pytest.raises(AssertionError):
            merge([(numbers, [row] * len(numbers))], 2, 2)


def test_augmentation_follows_from_its_key_and_keeps_the_head():
    sample = tokens.Encoded(np.array([2, 3]), tuple(np.arange(4, 44).reshape(20, 2)), 0)

    groups = tokens.Groups(np.zeros(60, dtype=np.int64))

    def cropped(epoch):
        how = tokens.Hiding(crop=1.0, min_points=5)
        return tokens.augment(sample, how, groups, unknown=1, key=(1, epoch, 7)).ids().tolist()

    seen = [cropped(epoch) for epoch in range(20)]
    assert seen[3] == cropped(3)
    assert all(ids[:2] == [2, 3] and len(ids) >= 12 for ids in seen)
    assert len(collections.Counter(map(len, seen))) > 3
    hidden = tokens.augment(sample, tokens.Hiding(token=0.5), groups, unknown=1, key=(1, 0, 7)).ids()
    assert 5 < (hidden == 1).sum() < 37


def test_a_ship_is_seen_without_its_size_and_with_every_depth_of_its_place():
    tracks = [replace(track, length=90.0, width=15.0) for track in generate(30, seed=2)]
    texts = as_texts(tracks, grammar="motion", resolution=10)
    vocabulary = tokens.make_vocabulary(enumerate(texts), min_count=1)
    groups, sample = tokens.Groups.make(vocabulary), tokens.encode(texts[0], vocabulary, 0)
    depths, sizes = collections.Counter(), collections.Counter()
    for epoch in range(200):
        seen = tokens.augment(sample, tokens.Hiding(place=0.9, size=0.5), groups, unknown=1, key=(1, epoch, 0))
        levels = sorted({*groups.of[seen.head][groups.of[seen.head] > 0].tolist()})
        assert levels == list(range(1, len(levels) + 1))
        depths[len(levels)] += 1
        sizes[bool((groups.of[seen.head] < 0).any())] += 1
        assert np.isnan(seen.values[FEATURES.index("length")]) == (not (groups.of[seen.head] < 0).any())
        assert np.isnan(seen.values[FEATURES.index("lat")]) == (not levels)
    assert len(depths) == len(tokens.PLACE_DEGREES) + 1 and 60 < sizes[True] < 140
    assert not np.isnan(sample.values[FEATURES.index("length")])


def test_numbers_of_a_summary_change_the_answer_and_unknown_ones_are_no_number():
    sizes = Sizes(CONFIG, 3, 0.0, "mean", "causal", [[0.0, 1.0, 4.0], [5.0], []])
    model = make_model(sizes, seed=1).eval()

    def ask(*values):
        with torch.no_grad():
            rows = pad([np.arange(2, 9)], multiple=1)
            return model(*rows, values=torch.tensor([values], dtype=torch.float32))

    nan = float("nan")
    assert ask(0.5, 5.0, 1.0).isfinite().all() and ask(nan, nan, nan).isfinite().all()
    assert not torch.allclose(ask(0.5, 5.0, nan), ask(0.7, 5.0, nan), atol=1e-6)
    assert not torch.allclose(ask(0.0, 5.0, nan), ask(nan, 5.0, nan), atol=1e-6)
    torch.testing.assert_close(ask(4.0, 5.0, nan), ask(99.0, 5.0, nan))


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
    found = choose_adjustment(loud, truth, list(map(str, range(100))), [0.5, 0.5], ["a", "b"], macro_share=-1.0)
    assert found.temperature > 2 and found.prior_shift == 0
    mended = found.apply(loud, [0.5, 0.5])
    assert measure(mended, truth).ece < 0.03 and (mended.argmax(1) == loud.argmax(1)).all()


def test_a_prior_shift_calls_rare_classes_more():
    row = np.array([[0.6, 0.4]])
    assert Adjustment(1.0, 0.0).apply(row, [0.9, 0.1]).argmax() == 0
    assert Adjustment(1.0, 1.0).apply(row, [0.9, 0.1]).argmax() == 1


def test_intervals_are_those_of_ships_and_wider_than_those_of_pieces_that_repeat_a_ship():
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 2, 60)
    called = np.where(rng.uniform(size=60) < 0.7, truth, 1 - truth)
    alone = compare({MODEL: np.eye(2)[called]}, truth.tolist(), [str(i) for i in range(60)])[MODEL]
    names = [str(i // 8) for i in range(480)]
    eight = compare({MODEL: np.eye(2)[called.repeat(8)]}, truth.repeat(8).tolist(), names)[MODEL]
    assert alone.pieces["accuracy"].value == pytest.approx((truth == called).mean(), abs=1e-4)
    assert alone.pieces["accuracy"].low < alone.pieces["accuracy"].value < alone.pieces["accuracy"].high
    assert eight.pieces["accuracy"].low == pytest.approx(alone.pieces["accuracy"].low, abs=0.04)
    assert eight.ships["accuracy"].value == alone.ships["accuracy"].value


def test_a_method_is_called_worse_only_if_the_interval_of_the_difference_says_so():
    rng = np.random.default_rng(5)
    truth = rng.integers(0, 3, 300)
    right, often = np.eye(3)[truth], np.eye(3)[np.where(rng.uniform(size=300) < 0.6, truth, 0)]
    same = np.eye(3)[np.where(rng.uniform(size=300) < 0.6, truth, 0)]
    ships = [str(i) for i in range(300)]
    verdicts = {
        name: each.verdict
        for name, each in compare(
            {MODEL: often, "forest": right, "boosting": same, "majority": np.eye(3)[np.zeros(300, dtype=int)]},
            truth.tolist(),
            ships,
        ).items()
    }
    assert verdicts == {MODEL: None, "forest": "worse", "boosting": "equal", "majority": "better"}


def test_a_ship_of_several_segments_is_judged_once_by_their_mean():
    rows = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    found = compare({MODEL: rows}, [0, 1, 0], ["x", "y", "x"])[MODEL]
    assert found.ships["accuracy"].value == 1.0 and found.pieces["accuracy"].value == pytest.approx(2 / 3, abs=1e-3)


def tracks_of(values: np.ndarray, labels: np.ndarray) -> list[tokens.Encoded]:
    return [tokens.Encoded(np.array([3]), (), int(label), np.float32(row)) for row, label in zip(values, labels)]


@pytest.mark.parametrize("classes", [2, 3])
def test_trees_kept_as_arrays_answer_as_scikit_learn_does_also_after_a_file(tmp_path, classes):
    ensemble = pytest.importorskip("sklearn.ensemble")
    rng = np.random.default_rng(classes)
    values = rng.normal(size=(300, 5)).round(1).astype(np.float32)  # many equal numbers, some at a border
    labels = (values[:, 0] > 0).astype(int) + (values[:, 1] > 0.3) * (classes - 2)
    values[:, 2] = np.nan
    values[rng.uniform(size=300) < 0.3, 3] = np.nan
    labels[labels == classes - 1] += 1  # a class that no training track has
    boosting = ensemble.HistGradientBoostingClassifier(
        max_iter=60, max_leaf_nodes=LEAVES, min_samples_leaf=5, early_stopping=False, random_state=0
    )
    forest = ensemble.ExtraTreesClassifier(RANDOM_TREES, max_features=TRIED, random_state=0)
    seen, asked = values[:200, [0, 1, 3, 4]].astype(float), values[:, [0, 1, 3, 4]].astype(float)
    first, second = (each.fit(seen, labels[:200]).predict_proba(asked) for each in (boosting, forest))
    weights = np.arange(1.0, classes + 2)
    both = (first + second) * weights[boosting.classes_]
    model = make_model(Sizes(CONFIG, classes + 1, 0.0, "mean", "causal", [[0.0, 1.0]] * 5), seed=1)
    model.trees = grow_both(tracks_of(values[:200], labels[:200]), classes + 1, weights)
    save_trained(Trained(model, model.sizes, {}, [*"abcd"][: classes + 1], {}, [0.1]), tmp_path)
    loaded = load_trained(tmp_path).model.trees
    earlier = model.trees.as_tensors()
    del earlier["forest"], earlier["class_weights"]  # a model of a version without a forest
    for trees, told in (
        (model.trees, both / both.sum(1, keepdims=True)),
        (loaded, both / both.sum(1, keepdims=True)),
        (Trees.from_tensors(earlier), first),
    ):
        found = trees.ask(tracks_of(values, labels))
        np.testing.assert_allclose(found[:, boosting.classes_], told, atol=1e-12)
        assert not found[:, classes - 1].any()
        assert trees.expected.tolist() == [True, True, False, False, True]


def test_a_forest_of_more_tracks_has_a_limited_size(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr("ascendrun.programs.trajectory.trees.MOST_LEAVES", 200)
    rng = np.random.default_rng(1)
    few, many = (tracks_of(rng.normal(size=(count, 3)), rng.integers(0, 2, count)) for count in (200, 1000))
    most = 2 * 200  # nodes of a tree
    assert 200 < grow_forest(few, 2).feature.shape[1] < most  # by chance alone: nearly every track has a leaf
    assert grow_forest(many, 2).feature.shape[1] < most


def test_trees_have_the_weight_that_fits_unseen_tracks_and_none_where_an_expected_number_is_absent():
    pytest.importorskip("sklearn")
    values = np.random.default_rng(1).normal(size=(400, 2)).astype(np.float32)
    labels = (values[:, 0] > 0).astype(int)
    train, unseen = (tracks_of(values[part], labels[part]) for part in (slice(200), slice(200, 400)))
    trees, truth = grow_trees(train, 2, rounds=20), np.eye(2)[labels[200:]]
    ships = list(map(str, range(200)))
    assert trees.weighed(np.full((200, 2), 0.5), unseen, ships).weight > 0.8
    assert trees.weighed(truth, unseen, ships).weight < 0.2
    network = np.full((2, 2), 0.5)
    mixed = replace(trees, weight=0.5).vote(network, tracks_of(np.float32([[2.0, 0.0], [2.0, np.nan]]), np.ones(2)))
    assert mixed[0, 1] > 0.7 and mixed[1].tolist() == [0.5, 0.5]
    assert np.allclose(mixed.sum(1), 1)


def answers_of(signal, *, seed, ships, pieces=1):
    """Probabilities of two classes and the truth of some ships, by what is seen of each: 0 is nothing."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(ships) % 2, pieces)
    odds = [
        strength * np.repeat(np.where(np.arange(ships) % 2, 1, -1) + noise * rng.normal(size=ships), pieces)
        for strength, noise in signal
    ]
    rows = [1 / (1 + np.exp(-each)) for each in odds]
    names = np.repeat([f"s{number}" for number in range(ships)], pieces).tolist()
    return [np.stack([1 - row, row], 1) for row in rows], labels, names


def weight_of(signal, *, seed=1, ships=20, pieces=1):
    (network, trees), truth, names = answers_of(signal, seed=seed, ships=ships, pieces=pieces)
    return best_weight(lambda weight: (1 - weight) * network + weight * trees, truth.tolist(), names)


def nats_of(rows, truth):
    return measure(rows, truth.tolist()).nll


USEFUL, USELESS, LOUD = (2.0, 1.0), (0.2, 9.0), (3.0, 9.0)


def test_a_part_that_brings_nothing_does_not_vote_however_few_the_ships():
    for signal in ((USELESS, USEFUL), (LOUD, USEFUL), (USEFUL, LOUD)):
        (network, trees), truth, _ = answers_of(signal, seed=99, ships=4000)  # other ships
        parts = [nats_of(network, truth), nats_of(trees, truth)]
        weights = [weight_of(signal, seed=seed) for seed in range(10)]
        lost = [nats_of((1 - each) * network + each * trees, truth) - min(parts) for each in weights]
        assert np.median(lost) <= 0.02 and max(lost) < 0.15 and max(lost) < 0.5 * abs(parts[0] - parts[1])


def test_parts_that_say_the_same_are_one_and_parts_that_complete_each_other_vote_both():
    (same, _), truth, names = answers_of((USEFUL, USEFUL), seed=1, ships=20)
    assert best_weight(lambda weight: same, truth.tolist(), names) == 1.0
    weights = [weight_of((USEFUL, USEFUL), seed=seed, ships=400) for seed in range(5)]
    assert all(0.3 <= weight <= 0.8 for weight in weights)


def test_the_pieces_of_a_ship_count_as_one_ship():
    assert [weight_of((USEFUL, (2.0, 1.2)), seed=seed, pieces=30) for seed in range(5)] == [
        weight_of((USEFUL, (2.0, 1.2)), seed=seed) for seed in range(5)
    ]


def test_trees_are_as_confident_as_they_are_right_about_ships_they_were_not_grown_on():
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(3)
    values = rng.normal(size=(1000, 4)).astype(np.float32)
    labels = (values[:, 0] + rng.normal(size=1000) > 0).astype(int)
    train, unseen = tracks_of(values[:100], labels[:100]), tracks_of(values[100:], labels[100:])
    trees, ships = grow_both(train, 2, [1.0, 1.0]), [f"s{number}" for number in range(100)]
    heat = confidence(train, ships, 2, [1.0, 1.0])
    alone, calibrated = replace(trees, forest=None), replace(trees, temperature=heat)
    before, after = (measure(each.ask(unseen), labels[100:]) for each in (alone, calibrated))
    assert heat > 1.2 and before.ece > 0.15 and after.ece < 0.08 and after.nll < before.nll
    assert confidence(train[:1], ["a"], 2, [1.0, 1.0]) == 1.0


def test_few_ships_leave_a_temperature_near_one():
    loud, truth = np.tile([0.99, 0.01], (200, 1)), [0, 0, 0, 1] * 50
    few, many = (fit_temperature(loud, truth, [f"s{i % ships}" for i in range(200)]) for ships in (4, 200))
    assert 1 < few < many - 0.5


def test_where_no_training_ship_was_trees_without_the_place_vote_also_after_a_file(tmp_path):
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(2)
    values = rng.normal(size=(300, 2)).astype(np.float32)  # the place, and what tells the class anywhere
    labels = (values[:, 1] > 0).astype(int)
    values[:, 0] = labels + rng.normal(size=300) / 100  # where training was, the place tells it too
    known, sea = tracks_of(values, labels), np.float32([[0.0, 1.0], [np.nan, 1.0], [np.nan, np.nan]])
    trees = grow_trees(known, 2, rounds=20)
    others = grow_trees([replace(each, values=np.float32([np.nan, each.values[1]])) for each in known], 2, rounds=20)
    model = make_model(Sizes(CONFIG, 2, 0.0, "mean", "causal", [[0.0, 1.0]] * 2), seed=1)
    model.trees = replace(trees, places=np.array([3]), elsewhere=others)
    save_trained(Trained(model, model.sizes, {}, ["a", "b"], {}, [0.5, 0.5]), tmp_path)
    network = np.full((3, 2), 0.5)
    for both in (model.trees, load_trained(tmp_path).model.trees):
        here = both.vote(network, tracks_of(sea, np.ones(3)))  # token 3: a known cell
        away = both.vote(network, [replace(each, head=np.array([4])) for each in tracks_of(sea, np.ones(3))])
        assert here[0, 1] < 0.1 and here[1, 1] > 0.9
        assert (away[:2, 1] > 0.9).all() and away[2].tolist() == [0.5, 0.5]
    weighed = model.trees.weighed(np.full((300, 2), 0.5), known, list(map(str, range(300))))
    assert weighed.weight > 0.8 and weighed.elsewhere.weight > 0.8


def judged(train, samples, *, words, classes):
    """What all methods say of samples, beside a model that knows nothing."""
    here = alone()
    records = [SimpleNamespace(ship=str(number)) for number in range(len(samples))]
    facts = {"names": [f"class{i}" for i in range(classes)]}
    data = Samples({"test": records}, {f"w{i}": i for i in range(words)}, facts)
    vars(data)["encoded"] = {"train": train, "test": samples}
    options = {"baselines": ["forest", "boosting", "tokens"]}
    ask = lambda rows: np.full((len(rows), classes), 1 / classes)  # noqa: E731
    return judge(ask, data, "test", here, options, seconds=0.0).methods


@pytest.mark.parametrize("has_summary", [True, False])
def test_baselines_learn_from_the_same_inputs_and_keep_to_their_time(has_summary):
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 120)
    samples = [
        tokens.Encoded(
            np.array([3 + label]), (np.array([5]),), int(label), np.float32([label, np.nan] if has_summary else [])
        )
        for label in labels
    ]
    found = judged(samples[:80], samples[80:], words=6, classes=3)
    assert list(found) == ["model", "majority", "forest", "boosting", "tokens"]
    for name in ("forest", "boosting", "tokens"):
        assert (
            found[name].shape == (40, 3)
            and (found[name].argmax(1) == labels[80:]).all()
            and not found[name][:, 2].any()
        )


def test_without_scikit_learn_the_majority_class_remains_and_the_report_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    samples = [tokens.Encoded(np.array([3]), (), label) for label in (0, 1, 1)]
    assert list(judged(samples, samples, words=4, classes=2)) == ["model", "majority"]
    assert missing().key == "program.no-scikit-learn"


def test_a_simple_method_without_an_error_is_a_leak_suspected_and_one_with_some_is_not(tmp_path):
    truth = [number % 4 for number in range(80)]
    right = np.eye(4)[truth]
    mostly = np.eye(4)[[0, *truth[1:-8], *[0] * 8]]
    judged = Judged(list("abcd"), list(map(str, range(80))), truth, {MODEL: right, "forest": mostly, "tokens": right})
    text = judged.write(tmp_path, "test", {}, seed=1, is_leaky=False)
    assert json.loads((tmp_path / "report.json").read_text())["leak_suspected"] == ["tokens"]
    assert "leak suspected: regression on tokens" in text
