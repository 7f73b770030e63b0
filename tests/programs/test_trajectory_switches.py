"""Every switch of a trajectory training reaches what it is to change, each beside the same training without it."""

import collections
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.strategies.parallel import refuse_options
from ascendrun.programs.trajectory.data import Samples, make_samples
from ascendrun.programs.trajectory.grammars import as_texts
from ascendrun.programs.trajectory.model import make_guesser, make_model
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.stages import common, training
from ascendrun.programs.trajectory.stages.common import plan_stage
from ascendrun.programs.trajectory.stages.trained import adjusted
from ascendrun.programs.trajectory.store import Trained, Vote, predict
from ascendrun.programs.trajectory.tokens import UNKNOWN, encode, make_vocabulary
from ascendrun.programs.trajectory.train import (
    Classification,
    Pretraining,
    class_weights,
    make_engine,
    make_loop,
    plan_of,
    ship_weights,
)
from tests.programs import conftest
from tests.programs.conftest import alone

PLAIN = (
    "--data_path=generated",
    "--synthetic_tracks=60",
    "--grammar=motion",
    "--hidden_size=16",
    "--num_hidden_layers=1",
    "--num_attention_heads=2",
    "--global_batch_size=8",
    "--random_crop_prob=0",
    "--token_mask_prob=0",
    "--dropout=0",
    "--label_smoothing_factor=0",
    "--class_weights=none",
    "--place_dropout_prob=0",
    "--size_dropout_prob=0",
)


def options_of(*argv):
    return conftest.options_of("trajectory", *PLAIN, *argv)


@pytest.fixture(scope="module")
def samples():
    return make_samples(options_of())


@pytest.fixture
def here(usual_positions):
    return alone()


@pytest.mark.parametrize("stage", [training.train, training.pretrain_stage, plan_stage])
def test_a_base_that_cannot_be_read_is_told_before_any_data_is_read(here, tmp_path, stage):
    given = ("--base_model=absent", "--data_path=absent.csv", f"--output_dir={tmp_path}/out")
    with pytest.raises(InvalidDataError, match="absent: config.json not found"):
        stage(options_of("--num_attention_heads=4", *given), here)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "given, says",
    [
        ("--hidden_size=30", "hidden_size: 30 must be an even multiple of num_attention_heads"),
        ("--inputs=place,colour", "inputs: colour not found"),
        ("--baselines=oracle", "baselines: oracle not found"),
        ("--column_map=lat", "column_map: lat: expected NAME=COLUMN"),
        ("--folds=1", "folds: 1 with fold: -1"),
        ("--fold=0", "folds: 0 with fold: 0"),
        ("--folds=2 --fold=2", "folds: 2 with fold: 2"),
        ("--folds=2 --prepared_dir=there", "folds cannot be combined with prepared_dir"),
        ("--folds=2 --split=segment", "folds requires split: ship"),
    ],
)
def test_contradictions_are_told_by_the_ranks_too(here, given, says):
    with pytest.raises(InvalidDataError, match=says):
        refuse_options("trajectory", options_of("--num_attention_heads=4", *given.split()), here)


def test_a_next_word_that_the_model_can_see_is_not_to_be_guessed(here):
    given = ("--objective=clm", "--attention=bidirectional")
    with pytest.raises(InvalidDataError, match="(?s)clm cannot be combined.*objective: mlm, or attention: causal"):
        refuse_options("trajectory", options_of("--mode=pretrain", *given), here)
    refuse_options("trajectory", options_of("--mode=finetune", *given), here)


def test_a_dtype_that_the_device_lacks_is_told_before_any_data_is_read(start):
    run = start("--dtype=float16", "--data_path=absent.csv")
    assert run.wait() == [1]
    assert "error: --dtype=float16 is slow and inexact on a CPU" in run.text() and "Traceback" not in run.text()


@pytest.fixture
def task(samples, here):
    """task(*options): the classifier's task with the engine of its model, untrained."""

    def make(*argv):
        options = options_of(*argv)
        plan, model = plan_of(samples.encoded["train"], options), make_model(common.own_sizes(options, samples), seed=1)
        engine = make_engine(options, model, here, plan, steps=1)
        return Classification(options, samples, here, engine, plan, model.sizes.numbers)

    return make


def rows_of(batch):
    return [ids[:length].tolist() for ids, length in zip(batch.tensors["ids"], batch.tensors["lengths"])]


@pytest.mark.parametrize("how, rare", [("none", 1.0), ("sqrt", 9**0.5), ("balanced", 9.0)])
def test_a_rare_class_weighs_more_as_asked_and_the_mean_over_all_tracks_stays_one(how, rare):
    common, other, absent = class_weights([0] * 90 + [1] * 10, 3, how)
    assert other / common == pytest.approx(rare) and absent == 0
    assert 0.9 * common + 0.1 * other == pytest.approx(1)


def test_a_ship_with_many_pieces_weighs_as_much_as_one_with_few_where_ships_count():
    weights = ship_weights(["many"] * 9 + ["one"], "balanced")
    assert sum(weights[:9]) == pytest.approx(weights[9]) and sum(weights) == pytest.approx(10)
    assert ship_weights(["many"] * 9 + ["one"], "none") == [1.0] * 10


def test_an_epoch_by_ship_takes_each_ship_equally_often_and_its_pieces_in_turn(task):
    asked = task("--sample_by=ship")
    asked.pieces = [[0, 1, 2, 3], [4]]
    asked.train_set = asked.train_set[:5]
    drawn = [[asked.piece(number, epoch) for number in range(5)] for epoch in range(8)]
    counts = collections.Counter(number for epoch in drawn for number in epoch)
    assert counts == {0: 5, 1: 5, 2: 5, 3: 5, 4: 20}
    assert all(2 <= epoch.count(4) <= 3 for epoch in drawn)


def test_the_loss_is_the_smoothed_one_of_each_track_by_the_weight_of_its_class(task):
    asked = task("--class_weights=balanced", "--label_smoothing_factor=0.2")
    asked.engine.module.eval()
    batch = asked.collate([(number,) for number in range(20)], 0)
    labels = batch.tensors["labels"]
    weights = torch.tensor(class_weights(asked.samples.labels("train"), len(asked.samples.names), "balanced"))[labels]
    assert len(set(weights.tolist())) > 1 and batch.weight == pytest.approx(float(weights.sum()))
    said = functional.log_softmax(
        asked.engine.module(batch.tensors["ids"], batch.tensors["lengths"], values=batch.tensors["values"]), -1
    )
    each = -0.8 * said[torch.arange(20), labels] - 0.2 * said.mean(1)
    torch.testing.assert_close(asked.loss(asked.engine.module, batch.tensors), (each * weights).sum())


def test_training_sees_tracks_with_words_hidden_or_cropped_anew_each_epoch(task):
    units = [(number,) for number in range(20)]
    whole = rows_of(task().collate(units, 0))
    hiding = task("--token_mask_prob=0.3")
    unknown = hiding.samples.vocabulary[UNKNOWN]
    hidden = rows_of(hiding.collate(units, 0))
    changed = [one == unknown for row, before in zip(hidden, whole) for one, was in zip(row, before) if one != was]
    assert all(changed) and 0.2 < len(changed) / sum(map(len, whole)) < 0.4
    assert rows_of(hiding.collate(units, hiding.plan.steps_per_epoch)) != hidden
    cropping = task("--random_crop_prob=1", "--min_segment_size=5")
    assert sum(map(len, rows_of(cropping.collate(units, 0)))) < 0.9 * sum(map(len, whole))
    assert rows_of(cropping.collate(units, cropping.plan.steps_per_epoch)) != rows_of(cropping.collate(units, 0))


def test_pretraining_crops_what_it_trains_on_and_never_what_it_is_judged_by(samples, here):
    task = Pretraining(options_of("--random_crop_prob=1", "--min_segment_size=5"), samples, here, None, None)
    for is_training in (True, False):
        seen = [
            len(task.masked(sample, (i,), is_training=is_training)[0])
            for i, sample in enumerate(samples.encoded["train"])
        ]
        assert (sum(seen) < 0.9 * sum(map(len, samples.encoded["train"]))) == is_training


def test_a_track_longer_than_512_words_reaches_the_model_whole(here):
    """S0-B5, behind the grammar: no batch is cut, and the model has a place for every word."""
    texts = as_texts(generate(4, seed=2, min_points=30, max_points=30), grammar="guide", resolution=10)
    vocabulary = make_vocabulary(enumerate(texts), min_count=1)
    train = [encode(words, vocabulary, 0) for words in texts]
    records = [SimpleNamespace(ship=str(number)) for number in range(4)]
    long = Samples({"train": records}, vocabulary, {"names": ["one"], "text": {}})
    vars(long)["encoded"] = {"train": train, "val": []}
    options = options_of()
    sizes = common.own_sizes(options, long)
    assert sizes.config["max_position_embeddings"] >= long.longest() == 630
    task = Classification(options, long, here, None, plan_of(train, options), sizes.numbers)
    assert rows_of(task.collate([(0,), (1,), (2,), (3,)], 0)) == [
        [vocabulary[word] for word in words.all()] for words in texts
    ]


@pytest.mark.parametrize("make", [make_model, make_guesser])
def test_dropout_is_as_large_as_asked_in_the_words_and_the_head_and_none_in_the_attention(samples, make):
    for rate in (0.0, 0.3):
        model = make(common.own_sizes(options_of(f"--dropout={rate}"), samples), seed=1)
        assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {rate}
        assert {layer.self_attn.attention_dropout for layer in model.backbone.layers} == {0.0}


def test_dropout_is_off_while_tracks_are_judged_and_on_again_afterwards(task, samples, here):
    model = task("--dropout=0.5").engine.module
    quiet = copy.deepcopy(model).eval()
    model.train()
    one, other = (
        predict(each, samples.encoded["val"], here, options_of("--global_batch_size=8")) for each in (model, quiet)
    )
    assert np.array_equal(one, other)
    assert model.training and not quiet.training


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_a_word_sees_the_words_after_it_only_where_attention_goes_both_ways(samples, attention):
    """S0-B2, and S0-B3: a causal reader that looks ahead is told the word it has to guess."""
    model = make_guesser(common.own_sizes(options_of(f"--attention={attention}"), samples), seed=1).eval()
    ids = torch.arange(2, 12)[None]
    changed = ids.clone()
    changed[0, -1] = 20
    with torch.no_grad():
        first, second = (model.states(each, torch.tensor([10]))[0, :-1] for each in (ids, changed))
    assert torch.equal(first, second) == (attention == "causal")


def test_a_hidden_word_is_guessed_from_the_state_at_its_own_place(samples):
    """S0-B3, in the model: answers stand at (row, place) of what was read."""
    model = make_guesser(common.own_sizes(options_of(), samples), seed=1).eval()
    ids, lengths = torch.arange(2, 26).view(2, 12), torch.tensor([12, 12])
    with torch.no_grad():
        states = model.states(ids, lengths)
        said = model(ids, lengths, torch.tensor([1, 0]), torch.tensor([7, 3]))
        torch.testing.assert_close(said, model.words(torch.stack([states[1, 7], states[0, 3]])))


def test_activations_are_made_anew_only_where_that_is_asked_for(samples, here, tmp_path):
    for asked in ("false", "true"):
        options = options_of(f"--gradient_checkpointing={asked}")
        model = make_model(common.own_sizes(options, samples), seed=1)
        loop = make_loop(options, samples, model, here, tmp_path)
        passes = []
        model.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=passes: seen.append("forward"))
        loop.engine.backward(loop.task.loss(loop.engine.model, loop.source.share(0).pieces[0].tensors))
        loop.source.close()
        assert len(passes) == (2 if asked == "true" else 1)


def test_matrices_decay_as_asked_and_vectors_do_not(samples, here):
    options = options_of("--weight_decay=0.3")
    engine = make_engine(
        options,
        make_model(common.own_sizes(options, samples), seed=1),
        here,
        plan_of(samples.encoded["train"], options),
        steps=10,
    )
    decays = {(weight.ndim > 1, group.weight_decay) for group in engine.plan.groups for weight in group.params}
    assert decays == {(True, 0.3), (False, 0.0)}


@pytest.mark.parametrize(
    "wanted, kept", [("macro_f1", ("macro_f1", False)), ("loss", ("loss", True)), (None, ("", False))]
)
def test_the_model_that_is_kept_is_the_best_by_the_score_that_was_asked_for(samples, here, tmp_path, wanted, kept):
    options = options_of(f"--metric_for_best_model={wanted}" if wanted else "--load_best_model_at_end=false")
    loop = make_loop(options, samples, make_model(common.own_sizes(options, samples), seed=1), here, tmp_path)
    loop.source.close()
    assert (loop.settings.best, loop.settings.best_is_low) == kept


@pytest.mark.parametrize("how", ["none", "temperature", "prior"])
def test_the_adjustment_that_is_asked_for_is_chosen_on_the_validation_ships(task, samples, here, how):
    """A classifier that says one class of all tracks, a rare one there, for it was common in training."""
    model, names = task().engine.module, samples.names
    rare, *_, common = np.argsort(np.bincount(samples.labels("val"), minlength=len(names))).tolist()
    said, priors = np.full(len(names), 0.2), np.full(len(names), 0.1)
    said[[rare, common]], priors[rare] = (0.4, 0.21), 0.7
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.from_numpy(np.log(said)))
    vote = Vote((Trained(model, None, samples.vocabulary, names, samples.text, priors.tolist()),))
    found, validation = adjusted(vote, options_of(f"--calibration={how}"), samples, here)
    assert (found.temperature != 1, found.prior_shift > 0) == (how != "none", how == "prior")
    assert (validation["vote"]["accuracy"] > validation["members"][0]["accuracy"]) == (how == "prior")
