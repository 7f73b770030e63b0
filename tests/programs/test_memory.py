"""What the trainer reckons before a card is taken, beside what its allocator says afterwards."""

from __future__ import annotations

import json

import pytest
import torch

from ascendrun.programs.trainer import dry_run
from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.devices.chips import chip_of
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.simulate import Simulated
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
    target = memory.Target("npu", precision, 16, 64 * memory.GB)
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
    target = memory.Target("cpu", precision, 1, 12 * memory.GB)
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
