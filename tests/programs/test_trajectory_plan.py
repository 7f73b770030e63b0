"""What a trajectory training would take, reckoned before there is a device, beside what it takes."""

import re

import pytest

from ascendrun.planner import cost, rules
from ascendrun.programs.errors import InvalidDataError, ModelTooLargeError
from ascendrun.programs.trainer.strategies.parallel import training_of
from ascendrun.programs.trajectory.data import make_samples
from ascendrun.programs.trajectory.model import make_guesser, make_model
from ascendrun.programs.trajectory.stages import common
from ascendrun.programs.trajectory.train import make_loop, work_on
from benchmarks.memory.rank import peak_of
from tests.programs import conftest
from tests.programs.conftest import alone

WITHIN = 0.15
FINETUNE = ("--hidden_size=64", "--global_batch_size=24", "--attention=bidirectional", "--max_tokens_per_micro_batch=0")
PRETRAIN = (
    "--hidden_size=96",
    "--num_hidden_layers=3",
    "--global_batch_size=24",
    "--max_tokens_per_micro_batch=700",
    "--random_crop_prob=0",
)
CAUSAL = (
    "--hidden_size=64",
    "--global_batch_size=16",
    "--objective=clm",
    "--gradient_checkpointing=true",
    "--pooling=last",
)


@pytest.fixture
def here(usual_positions):
    return alone()


def options_of(*argv):
    given = "--data_path=generated", "--synthetic_tracks=70", "--grammar=motion"
    return conftest.options_of("trajectory", *given, *argv)


@pytest.mark.parametrize(
    "name, argv",
    [("finetune", FINETUNE), ("pretrain", PRETRAIN), pytest.param("pretrain", CAUSAL, marks=pytest.mark.thorough)],
)
def test_the_estimate_is_near_the_measured_peak(here, tmp_path, name, argv):
    options = options_of(*argv, "--random_crop_prob=0")
    samples = make_samples(options)
    sizes = common.own_sizes(options, samples)

    def train():
        if name == "finetune":
            loop = make_loop(options, samples, make_model(sizes, seed=1), here, tmp_path)
        else:
            loop = make_loop(options, samples, make_guesser(sizes, seed=1), here, tmp_path)
        loop.engine.module.train()
        for step in range(2 * loop.source.plan.steps_per_epoch):  # the second epoch has moments throughout
            for piece in loop.source.share(step).pieces:
                loop.engine.backward(loop.task.loss(loop.engine.model, piece.tensors) / piece.weight)
            loop.engine.finish(1.0)
        loop.source.close()
        return loop.source.plan

    plans = []
    measured = peak_of(lambda: plans.append(train()), here)
    work = work_on(plans[0], {**options, "mode": name}, sizes, ranks=1, family="cpu")
    found = cost.memory_of(
        work, cost.Devices("cpu", 1, 1, compute_bytes=4), cost.Layout("none", options["gradient_checkpointing"])
    )
    assert found.allocated("cpu") == pytest.approx(measured, rel=WITHIN), (work, found)


def test_a_plan_says_steps_what_does_not_divide_and_what_a_card_would_hold(here, capsys):
    common.plan_stage(
        options_of("--world_size=16", "--chip=910B3", "--global_batch_size=20", "--num_train_epochs=3"), here
    )
    said = capsys.readouterr().out
    tracks = [int(each) for each in re.findall(r"(?:pretrain|finetune): (\d+) tracks, [\d,]+ tokens", said)]
    assert len(tracks) == 2
    for count in tracks:
        assert f"steps: {3 * -(-count // 20)}, each of 20 samples" in said
    assert said.count("global_batch_size: 20 is not a multiple of 16") == 2
    assert said.count("of 64.0 GiB (weights") == 2


def test_the_plan_compares_the_strategies(here, capsys):
    """It estimated ddp whatever was asked for."""
    common.plan_stage(options_of("--world_size=4", "--chip=910B3", "--strategy=auto"), here)
    said = capsys.readouterr().out
    assert said.count("strategy: ddp; the fastest that fits") == 2
    assert all(said.count(f"  {strategy}: ") == 2 for strategy in ("ddp", "fsdp2", "zero3"))


def test_what_does_not_fit_is_refused_with_what_to_change(here):
    large = (
        "--world_size=1",
        "--chip=910B4",
        "--global_batch_size=400",
        "--hidden_size=1024",
        "--num_attention_heads=8",
        "--num_hidden_layers=60",
        "--dtype=float16",
    )
    with pytest.raises(ModelTooLargeError, match="(?s)ddp requires .* 32.0 GiB.*micro_batch_size: 1;"):
        common.plan_stage(options_of(*large), here)
    common.plan_stage(options_of(*large, "--gradient_checkpointing=true", "--micro_batch_size=50"), here)


@pytest.mark.parametrize(
    "argv, said",
    [(("--chip=920X",), "unknown chip"), (("--chip=910A", "--dtype=bfloat16"), "910A does not support bfloat16")],
)
def test_a_card_that_nobody_knows_or_that_cannot_is_refused(here, argv, said):
    with pytest.raises(InvalidDataError, match=said):
        common.plan_stage(options_of(*argv), here)


def test_a_card_that_is_planned_for_has_its_own_format_and_memory(here):
    planned = training_of(options_of("--chip=910A"), here, program="trajectory")
    assert (planned.family, rules.scales(planned), planned.memory_bytes) == ("npu", True, 32 * cost.GB)
    assert training_of(options_of("--chip=H100"), here, program="trajectory").family == "cuda"
