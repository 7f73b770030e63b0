"""Layers that are compiled learn what they learn as they are written; where that cannot work, the reason is named."""

from __future__ import annotations

import pytest

from ascendrun.programs.devices.accelerator import Accelerator, Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import parallel
from tests.programs import recorded


@pytest.fixture
def has_compiler():
    if not parallel.has_compiler():
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize(
    "strategy, ranks", [("ddp", 2), *(pytest.param(*case, marks=pytest.mark.thorough) for case in [("fsdp2", 2)])]
)
def test_compiled_layers_learn_the_same(tiny, strategy, ranks):
    options = {"strategy": strategy, "ranks": ranks, "dropout": 0.0, "max_steps": 6, "eval_steps": 3}
    plain = tiny(name="plain", **options).succeed()
    own = tiny(name="compiled", compile="torch", **options).succeed()
    assert "graphs: 0" in plain.text() and "graphs: 0" not in own.text()
    assert own.losses() == pytest.approx(plain.losses(), rel=1e-5)
    for name, weight in plain.final().items():
        assert own.final()[name] == pytest.approx(weight, rel=1e-4, abs=1e-6), name


@pytest.mark.thorough
@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("name", ["trajectory-1", "qwen_lora-ddp-1"])
def test_programs_that_are_compiled_have_the_losses_of_before(launch, name):
    program, ranks, options = recorded.CASES[name]
    schedule = {"lr_scheduler_type": "constant"} if program == "qwen_lora" else {}
    shorter = {**options, **schedule, "max_steps": 4}
    plain, own = (
        launch(program, [*recorded.arguments(shorter), f"--compile={way}"], ranks=ranks, name=way).succeed().losses()
        for way in ("none", "torch")
    )
    assert len(own) == 4 and own == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    "way, device, strategy, reason",
    [
        ("torch", "Ascend910B1", "ddp", "set compile: torchair or"),
        ("torchair", "cpu", "none", "set compile: torch or"),
        ("torchair", "NVIDIA H100 80GB HBM3", "ddp", "does not compile for cuda"),
        ("torch", "NVIDIA H100 80GB HBM3", "zero3", "strategy: zero3, which replaces weights"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(way, device, strategy, reason):
    import torch

    family = {"c": "cpu", "A": "npu", "N": "cuda"}[device[0]]
    here = Runtime(0, 0, 2, None, Accelerator(family, torch.device("cpu"), device, None))
    precision = Precision(torch.float32, torch.float32, False, "")
    with pytest.raises(InvalidDataError, match=reason):
        parallel.check(here, precision, strategy=strategy, shard_size=0, compile=way)


def test_a_compiler_that_is_not_installed_is_named():
    import torch

    module = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    with pytest.raises(InvalidDataError, match="torchair is not installed"):
        parallel.compile_layers(module, "torchair", family="npu")


def test_a_model_without_repeated_layers_and_a_host_without_a_compiler_are_refused(monkeypatch):
    import torch

    monkeypatch.setattr(parallel, "has_compiler", lambda: True)
    with pytest.raises(InvalidDataError, match="repeated layers"):
        parallel.compile_layers(torch.nn.Linear(2, 2), "torch", family="cpu")
    monkeypatch.undo()
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/none/g++",))
    assert not parallel.has_compiler()
