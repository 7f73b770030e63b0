"""Length, batch, rates and schedules of a training equal upstream's for four depths; batches that ranks can share."""

import json
from pathlib import Path

import pytest

from ascendrun.programs.nanochat import model as recipe
from ascendrun.programs.nanochat.model import empty_model
from ascendrun.programs.nanochat.sizes import Sizes, horizon_of
from ascendrun.programs.trainer.schedule import value_at

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("training.json").read_text())["recipes"]
OPTIONS = {
    "model_preset": "current", "aspect_ratio": 64, "head_dim": 128, "kv_heads": 0, "max_seq_len": 2048,
    "window_pattern": "SSSL", "max_steps": 0, "target_flops": 0.0, "target_param_data_ratio": 12.0,
    "total_batch_size": 0, "embedding_lr": 0.3, "unembedding_lr": 0.008, "matrix_lr": 0.02, "scalar_lr": 0.5,
    "weight_decay": 0.28, "warmup_steps": 40, "warmdown_ratio": 0.65, "final_lr_frac": 0.05,
}  # fmt: skip


def made(depth: int, **given):
    options = {**OPTIONS, "depth": depth, **given}
    sizes = Sizes.of(options, 32768)
    return sizes, horizon_of(sizes, options), options


@pytest.mark.parametrize("depth", [4, 12, 20, 26])
def test_sizes_and_horizon_are_those_of_upstream(depth):
    golden = GOLDEN[str(depth)]
    sizes, horizon, _ = made(depth)
    assert sizes.flops_per_token == golden["flops_per_token"]
    assert list(sizes.window_sizes) == golden["windows"]
    counts = golden["counts"]
    assert sizes.weights == counts["total"]
    assert sizes.num_scaling_params == counts["transformer_matrices"] + counts["lm_head"]
    assert sizes.looked_up == counts["wte"] + counts["value_embeds"]
    assert (horizon.steps, horizon.batch_tokens) == (golden["steps"], golden["batch"])
    assert horizon.weight_decay == pytest.approx(golden["weight_decay"], rel=1e-12)


@pytest.mark.parametrize("depth", [4, 12, 20, 26])
def test_groups_and_schedules_are_those_of_upstream(depth):
    golden = GOLDEN[str(depth)]
    sizes, horizon, options = made(depth)
    muon, *others = recipe.setup_optimizer(empty_model(sizes), options, horizon, shard=False).groups
    theirs = [group for group in golden["groups"] if group["kind"] == "adamw"]
    matrices = [group for group in golden["groups"] if group["kind"] == "muon"]
    assert len(muon.params) == sum(group["count"] for group in matrices)
    assert {tuple(each.shape) for each in muon.params} == {tuple(group["shapes"][0]) for group in matrices}
    assert [(list(g.betas), g.eps, g.weight_decay) for g in others] == [
        (group["betas"], group["eps"], group["weight_decay"]) for group in theirs
    ]
    assert [sorted({tuple(each.shape) for each in g.params}) for g in others] == [
        [tuple(shape) for shape in group["shapes"]] for group in theirs
    ]
    for step, scale, momentum, decay in golden["schedule"]:
        for ours, other in zip([*others, muon], [*theirs, matrices[0]]):
            assert value_at(ours.lr, step) == pytest.approx(other["initial_lr"] * scale, rel=1e-12), step
        assert value_at(muon.momentum, step) == pytest.approx(momentum, rel=1e-12), step
        assert value_at(muon.weight_decay, step) == pytest.approx(decay, rel=1e-9, abs=1e-12), step


def test_the_length_follows_from_steps_then_flops_then_tokens():
    sizes, horizon, _ = made(4)
    assert made(4, max_steps=7, target_flops=1e15)[1].steps == 7
    assert made(4, target_flops=1e15)[1].steps == round(1e15 / (sizes.flops_per_token * horizon.batch_tokens))
    assert made(4, total_batch_size=1 << 16)[1].steps == horizon.tokens // (1 << 16)
    assert made(4, total_batch_size=1 << 40)[1].steps == 1
