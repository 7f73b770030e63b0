"""Update rules and rates beside what they are defined by, and optimizer states that several ranks share."""

import math

import pytest
import torch
from torch import nn

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.trainer import optim, optimizer, schedule
from ascendrun.programs.trainer.strategies.parallel import wrap
from tests.programs.conftest import alone, resharded

FLOAT = Precision(torch.float32, torch.float32, False, "float32")


@pytest.fixture
def engine():
    """engine(module, plan of the module): on one rank, on the CPU."""
    here = alone()
    return lambda module, make: wrap(module, here, strategy="none", make_optimizer=make, precision=FLOAT)


# --- rates ---


@pytest.mark.parametrize("steps, rise", [(100, 0.3), (7, 0.3), (37, 0.1), (1000, 0.25), (40, 1.0)])
def test_onecycle_is_that_of_torch_at_every_step(steps, rise):
    weight = nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([weight], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=3e-4, total_steps=steps, pct_start=rise)
    ours = schedule.scaled(3e-4, schedule.onecycle(steps, rise=rise))
    for step in range(steps):
        assert ours(step) == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12, abs=1e-18), step
        theirs.step()
        if step + 1 < steps:
            cycle.step()
    assert rise == 1 or ours(steps + 5) == ours(steps - 1), "a step beyond the end stays at the end"
    assert max(map(schedule.onecycle(10, rise=0.1), range(15))) <= 1, "torch fails where the rise has one step only"


def test_shapes_rise_to_their_peak_and_fall_to_their_floor():
    for shape in (schedule.cosine(100, warmup=10, floor=0.1), schedule.linear(100, warmup=10, floor=0.1)):
        assert [shape(0), shape(9), shape(10), shape(100), shape(500)] == pytest.approx([0.1, 1.0, 1.0, 0.1, 0.1])
        assert shape(55) == pytest.approx(0.55)
    flat = schedule.trapezoid(100, warmup=5, warmdown=0.4, floor=0.05)
    assert [flat(4), flat(30), flat(60), flat(80), flat(100)] == pytest.approx([1.0, 1.0, 1.0, 0.525, 0.05])
    assert schedule.constant(warmup=4)(1) == 0.5 and schedule.constant()(999) == 1.0
    momentum = schedule.ramp(0.85, 0.95, 300)
    assert [momentum(0), momentum(150), momentum(900)] == pytest.approx([0.85, 0.90, 0.95])


# --- update rules ---


def written_formula(weight, gradient, momentum, variance, *, lr, mu, beta2, decay):
    """One step of Muon on one matrix, in float64, as the papers write it."""
    momentum.mul_(mu).add_(gradient, alpha=1 - mu)
    x = (1 - mu) * gradient + mu * momentum
    x = x * (x.norm() / math.sqrt(x.shape[0])) / x.norm(dim=1, keepdim=True)
    x = x / (1.01 * x.norm() + 1e-6)
    if x.shape[0] > x.shape[1]:
        x = x.T
    for a, b, c in optimizer.POLAR_EXPRESS:
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    if weight.shape[0] > weight.shape[1]:
        x = x.T
    x = x * math.sqrt(min(x.shape)) / x.norm()
    along = 1 if weight.shape[0] >= weight.shape[1] else 0
    variance.mul_(beta2).add_(x.square().mean(along, keepdim=True), alpha=1 - beta2)
    reduced = x / variance.sqrt()
    x = reduced * x.norm() / reduced.norm()
    rate = lr * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
    weight.sub_(rate * x + rate * decay * weight * (x * weight >= 0))


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_muon_is_the_written_formula(engine, shape):
    torch.manual_seed(1)
    module = nn.ParameterList([nn.Parameter(torch.randn(shape)) for _ in range(3)])
    momentum = schedule.ramp(0.8, 0.95, 3)
    ours = engine(
        module,
        lambda each: optim.OptimizerPlan(
            [optim.Group(list(each), "muon", lr=0.02, weight_decay=0.3, momentum=momentum, beta2=0.9)]
        ),
    )
    wanted = [weight.detach().double() for weight in module]
    buffers = [torch.zeros(shape, dtype=torch.float64) for _ in wanted]
    kept = (shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])
    variances = [torch.zeros(kept, dtype=torch.float64) for _ in wanted]
    for step in range(4):
        gradients = [torch.randn(shape) for _ in wanted]
        for weight, gradient in zip(module, gradients):
            weight.grad = gradient.clone()
        ours.begin(step)
        ours.finish(0.0)
        for weight, gradient, buffer, variance in zip(wanted, gradients, buffers, variances):
            written_formula(
                weight, gradient.double(), buffer, variance, lr=0.02, mu=momentum(step), beta2=0.9, decay=0.3
            )
        if step == 0:
            for weight, other in zip(module, wanted):
                torch.testing.assert_close(weight.detach().double(), other, rtol=1e-6, atol=1e-6)
    for weight, other in zip(module, wanted):
        torch.testing.assert_close(weight.detach().double(), other, rtol=1e-5, atol=1e-5)


def test_matrices_decay_and_vectors_do_not(engine):
    module = nn.Linear(3, 2)
    ours = engine(module, lambda each: optim.adamw(each, 0.1, weight_decay=0.5))
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight)
    ours.begin(0)
    ours.finish(0.0)
    torch.testing.assert_close(module.weight.detach(), before["weight"] * 0.95)
    assert torch.equal(module.bias.detach(), before["bias"])


def test_groups_have_rates_of_their_own_which_are_functions_of_the_step(engine):
    module = nn.Linear(3, 2, bias=True)
    plan = [
        optim.Group([module.weight], "adamw", lr=schedule.linear(10), weight_decay=lambda step: 0.1 * step),
        optim.Group([module.bias], "adamw", lr=0.5),
    ]
    ours = engine(module, lambda each: optim.OptimizerPlan(plan))
    ours.begin(4)
    told = ours.optimizer.rules[0].inner.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in told] == [(pytest.approx(0.6), 0.4), (0.5, 0.0)]


def test_a_weight_in_no_group_or_in_two_is_named(engine):
    module = nn.Linear(3, 2)
    for groups in ([[module.weight]], [[module.weight, module.bias], [module.bias]]):
        with pytest.raises(ValueError, match="bias is in [02] optimizer groups"):
            engine(module, lambda each, told=groups: optim.OptimizerPlan([optim.Group(g, "adamw", 0.1) for g in told]))
    with pytest.raises(ValueError, match="bias is not a matrix"):
        engine(module, lambda each: optim.OptimizerPlan([optim.Group(list(each.parameters()), "muon", 0.1)]))


def test_a_step_whose_gradients_are_not_finite_is_not_taken(engine):
    module = nn.Linear(3, 2)
    ours = engine(module, lambda each: optim.adamw(each, 0.1))
    before = module.weight.detach().clone()
    for number, is_taken in ((math.nan, False), (math.inf, False), (1.0, True)):
        for weight in module.parameters():
            weight.grad = torch.full_like(weight, number)
        ours.begin(0)
        norm = ours.finish(1.0)
        assert bool(torch.isfinite(norm)) == is_taken
        assert torch.equal(module.weight.detach(), before) != is_taken


# --- states over ranks ---

MUON = {"muon": True, "dropout": 0.0, "max_steps": 10, "cut_elements": 64}


def test_sharded_states_learn_the_same_and_each_rank_holds_its_part(tiny):
    """Three matrices of each shape, over two, three and four ranks: some have fewer, or none."""
    one = tiny(name="one", **MUON).succeed()
    whole = held(one, 0)
    for ranks in (2, 3, 4):
        run = tiny(ranks=ranks, name=f"ranks-{ranks}", shard=True, **MUON).succeed()
        assert run.losses() == pytest.approx(one.losses(), rel=1e-5)
        for name, weight in run.final().items():
            assert weight == pytest.approx(one.final()[name], rel=1e-3, abs=2e-6), (ranks, name)
        for rank in range(ranks):
            mine = held(run, rank)
            assert mine["model"] == whole["model"]
            assert mine.get("momentum", 0) <= math.ceil(3 / ranks) / 3 * whole["momentum"]
            small = 16 + 48 + 16 + 16  # elements of a block's vectors, which every rank updates
            assert mine["exp_avg"] <= whole["exp_avg"] / ranks + 3 * small + 31 + 2


@pytest.mark.parametrize(
    "ranks, how",
    [
        (2, {"strategy": "fsdp2"}),
        pytest.param(3, {"strategy": "fsdp2"}, marks=pytest.mark.thorough),
        pytest.param(4, {"strategy": "hsdp", "shard_size": 2}, marks=pytest.mark.thorough),
    ],
)
def test_muon_of_a_sharded_model_learns_the_same_and_each_rank_holds_its_part(tiny, ranks, how):
    one, run = tiny(name="one", **MUON).succeed(), tiny(ranks=ranks, name="sharded", **how, **MUON).succeed()
    assert run.losses() == pytest.approx(one.losses(), rel=1e-5)
    for name, weight in run.final().items():
        assert weight == pytest.approx(one.final()[name], rel=1e-3, abs=2e-6), name
    shards, whole = how.get("shard_size", ranks), held(one, 0)
    for rank in range(ranks):
        assert held(run, rank).get("momentum", 0) <= math.ceil(3 / shards) / 3 * whole["momentum"]
        assert held(run, rank)["exp_avg"] < whole["exp_avg"]


def test_muon_that_continues_on_other_ranks_by_another_strategy_ends_with_the_same_weights(tiny):
    """2 ranks of fsdp2, 1 rank, 3 ranks of fsdp2, each from the checkpoint of the one before."""
    how = {**MUON, "max_steps": 12, "save_steps": 4, "save_total_limit": 3, "strategy": "fsdp2"}
    ways = {4: {"ranks": 1, "strategy": "none"}, 8: {"ranks": 3}}
    straight = tiny(ranks=2, name="two", **how).succeed()
    resharded(straight, lambda way, name: tiny(name=name, **{**how, **way}), ways)


def held(run, rank):
    return next(line for line in run.metrics(rank) if line.get("event") == "held")
