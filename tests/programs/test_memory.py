"""What the trainer reckons before a card is taken, beside what its allocator says afterwards."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from ascendrun.planner import cost
from ascendrun.planner.chips import chip_of
from ascendrun.planner.models import LINEAR, shape_of
from ascendrun.planner.workload import Workload
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.qwen_lora import base, sizing
from ascendrun.programs.trainer import dry_run
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.simulate import Simulated, simulate
from ascendrun.programs.trajectory import sizing as trajectory_sizing
from ascendrun.programs.trajectory.model import Sizes, config_of_sizes
from benchmarks.memory.cases import SMALL

WITHIN = 0.15
BILLION = 10**9
FLOAT = Precision(torch.float32, torch.float32, False, "float32")


QUICK = ("alone, float32", "ddp, float32, two pieces")
"""The others take longer, and run when asked for."""
LOOKS = 3
"""What gloo has under way between two ranks counts too, and on a busy machine that piles up in one run of many."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in SMALL]
)
def test_the_estimate_is_near_the_measured_peak(launch, fork_server, tmp_path, name):
    for module in ("peft", "deepspeed") if "zero3" in name else ("peft",):
        fork_server.ask({"import": module})
    found = []
    for attempt in range(LOOKS):
        out = tmp_path / f"out-{attempt}.json"
        launch("memory", [name, "cpu", str(out)], name=f"run-{attempt}", ranks=SMALL[name].ranks).succeed()
        found.append(json.loads(out.read_text()))
        if found[-1]["estimated"] == pytest.approx(found[-1]["measured"], rel=WITHIN):
            return
    pytest.fail(f"not within {WITHIN:.0%} in any of {LOOKS} runs: {found}")


@pytest.mark.parametrize("family, bytes_kept", [("cpu", 4), ("cuda", 1), ("npu", 1)])
def test_dropout_keeps_what_it_keeps_on_the_device(family, bytes_kept):
    numbers, layers = 64 * 1000, 8

    def activations(probability):
        steps = [nn.Dropout(probability) for _ in range(layers)]
        return simulate(
            lambda: nn.Sequential(nn.Linear(4, 64), *steps),
            lambda model, tensors: model(tensors["x"]).sum(),
            {"x": ((1000, 4), torch.float32)},
            precision=FLOAT,
            family=family,
        ).activations

    kept = activations(0.5) - activations(0.0)
    assert layers * bytes_kept * numbers <= kept <= (layers * bytes_kept + 9) * numbers


SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
LORA = {"lora_r": 8, "lora_alpha": 16, "use_dora": False, "use_rslora": False, "packing": True}


@pytest.mark.parametrize(
    "program, dtype, dropout",
    [
        ("qwen_lora", "bfloat16", 0.05),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("qwen_lora", "bfloat16", 0.0),
                ("qwen_lora", "float32", 0.0),
                ("qwen_lora", "float32", 0.05),
                ("trajectory", "bfloat16", 0.0),
                ("trajectory", "float32", 0.0),
            )
        ),
    ],
)
def test_the_formula_is_near_the_simulated_step(program, dtype, dropout):
    """On a GPU the peaks of both were within 4 % of the allocator's for qwen_lora, without dropout."""
    is_frozen, rows, length, learned = program == "qwen_lora", 2, 512, 128
    compute = torch.float32 if dtype == "float32" else torch.bfloat16
    target = memory.Target("cuda", Precision(torch.float32, compute, False, dtype), 1)
    if is_frozen:
        config = base.shape_config("tiny", num_hidden_layers=6, **SHAPE)
        options = {**LORA, "lora_dropout": dropout, "target_modules": list(LINEAR)}
        piece = {"rows": rows, "length": length, "kept": learned, "pieces": 1}
        step = sizing.simulated_step(config, options, piece, target, is_cast=False, recomputes=False)
        shape = shape_of(config.to_dict())
    else:
        config = config_of_sizes(words=2000, hidden=128, layers=6, heads=4, max_length=512, dropout=0.0)
        largest = trajectory_sizing.Pass(rows, length, 0, 1)
        step = trajectory_sizing.simulated(Sizes(config, 3, 0.0, "mean", "causal"), largest, target, checkpointed=False)
        shape, learned = shape_of({**config, "tie_word_embeddings": True}), 0
    work = Workload(
        model=shape,
        trained=step.trained,
        is_frozen=is_frozen,
        steps=1,
        samples_per_step=rows,
        tokens_per_step=1.0,
        mean_length=1.0,
        micro_rows=rows,
        micro_length=length,
        micro_learned=learned,
        micro_batches=1,
        is_exact=True,
        weight_bytes_saved=0,
        has_dropout=bool(dropout),
    )
    devices = cost.Devices("cuda", 1, 1, compute_bytes=memory.width(compute))
    assert cost.activation_bytes(work, devices, recomputes=False) == pytest.approx(step.activations, rel=0.1)


def test_alone_a_step_needs_what_it_held_at_its_most():
    small = Simulated(100, 100, 400, 400, 100, 100, 500, 500, 2100)
    assert memory.needs(small, memory.Target("cpu", FLOAT, 1), strategy="none").tensors == 2100


def test_a_model_too_large_for_replicas_fits_in_parts():
    large = Simulated(
        parameters=32 * BILLION,
        trained=BILLION // 2,
        weights=64 * BILLION,
        trained_bytes=BILLION,
        largest_layer=BILLION,
        outside_layers=3 * BILLION,
        activations=5 * BILLION,
        activations_in_layers=5 * BILLION,
        whole_step=0,
    )
    precision = Precision(torch.bfloat16, torch.bfloat16, False, "bfloat16")
    target = memory.Target("npu", precision, 16, 64 * cost.GB)
    needs = [memory.needs(large, target, strategy=strategy) for strategy in ("ddp", "fsdp2", "zero3")]
    assert [need.fits(target) for need in needs] == [False, True, True]
    assert "ddp over 16 ranks: 7" in str(memory.as_sentence(needs[0], target))


def test_what_is_small_is_told_in_megabytes_and_of_a_process_on_a_cpu():
    small = Simulated(
        parameters=10**6,
        trained=10**6,
        weights=4 * 2**20,
        trained_bytes=4 * 2**20,
        largest_layer=2**20,
        outside_layers=2**20,
        activations=2**20,
        activations_in_layers=2**20,
        whole_step=0,
    )
    precision = Precision(torch.float32, torch.float32, False, "float32")
    target = memory.Target("cpu", precision, 1, 12 * cost.GB)
    line = str(memory.as_sentence(memory.needs(small, target, strategy="none"), target))
    assert line.startswith("one rank: ") and " MiB of 12.0 GiB per process (weights 4.0 MiB, " in line


@pytest.mark.parametrize(
    "batch, ranks, micro, key, values",
    [
        (32, 8, 8, "program.batch-not-divisible", {"unit": 64, "ranks": 8}),
        (100, 16, 1, "program.batch-not-divisible", {"nearest": [96, 112]}),
        (4, 16, 0, "program.ranks-without-sample", {"idle": 12}),
        (2048, 16, 0, "program.batch-over-data", {"samples": 1000}),
    ],
)
def test_batches_that_do_not_divide_are_named_with_the_nearest_that_do(batch, ranks, micro, key, values):
    (problem,) = batch_problems(batch, ranks, micro)
    assert problem.key == key and values.items() <= problem.values.items()


def batch_problems(batch, ranks, micro):
    return dry_run.batch_problems({"global_batch_size": batch, "micro_batch_size": micro}, ranks, 1000)


def test_a_batch_that_divides_is_no_problem():
    assert batch_problems(128, 16, 8) == []


@pytest.mark.parametrize(
    "name, has_bf16, memory_gb",
    [
        ("Ascend910B1", True, 64),
        ("910A", False, 32),
        ("Ascend910ProB", False, 32),
        ("910B4", True, 32),
        ("Ascend910_9391", True, 64),
        ("NVIDIA H200", True, 141),
        ("310P3", False, 21),
    ],
)
def test_chips_are_known_by_the_names_that_torch_gives_them(name, has_bf16, memory_gb):
    chip = chip_of(name)
    assert (chip.has_bf16, chip.memory_gb) == (has_bf16, memory_gb)


def test_a_chip_that_nobody_knows_is_unknown():
    assert chip_of("Ascend9999") is None
