"""Faults of Lightning on NPUs, each of which the plugin makes impossible; tests/npu has those that need a device."""

import ast
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

if os.environ.get("CI") != "true":
    pytest.importorskip("pytorch_lightning", reason="bin/setup-env lightning")

import pytorch_lightning as pl

import ascendrun.lightning as plugin
from ascendrun.lightning import accelerator, package
from ascendrun.programs.devices.accelerator import Accelerator
from ascendrun.programs.errors import InvalidDataError

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
SOURCES = Path(plugin.__file__).parent


class Device:
    """As torch.npu."""

    @staticmethod
    def is_bf16_supported():
        return True


def npu(name):
    return Accelerator("npu", torch.device("cpu"), name, Device)


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.py")), ids=lambda path: path.name)
def test_no_private_name_of_lightning_or_torch_npu_is_used(path):
    """torch_device_guard, _DEVICE, _PATH and native_device moved between versions."""
    foreign = {"pl", "fabric", "torch_npu", "trainer", "pl_module"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("lightning", "torch_npu"):
            raise AssertionError(ast.unparse(node))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in foreign:
            assert not node.attr.startswith("_") or node.attr == "__version__" or node.attr == "__name__"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "part":
            assert "._" not in ast.unparse(node)


def test_the_accelerator_has_all_methods_and_is_known_by_name():
    assert not plugin.NPUAccelerator.__abstractmethods__
    assert plugin.NPUAccelerator().name() == "npu" and not plugin.NPUAccelerator.is_available()
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException):  # known, and not on this machine
        pl.Trainer(accelerator="npu", **QUIET)
    with pytest.raises(InvalidDataError):
        plugin.NPUAccelerator().setup_device(torch.device("cpu"))


@pytest.mark.parametrize(
    "name, chip, compute, scales",
    [
        ("auto", "Ascend910A", torch.float16, True),
        ("auto", "Ascend910B3", torch.bfloat16, False),
        ("16", "Ascend910B3", torch.float16, True),
        ("16-mixed", "Ascend910A", torch.float16, True),
        (16, "Ascend910A", torch.float16, True),
        ("bf16", "Ascend910B3", torch.bfloat16, False),
        ("bf16-mixed", "Ascend910B3", torch.bfloat16, False),
        (32, "Ascend910A", torch.float32, False),
    ],
)
def test_the_names_of_all_versions_give_the_precision_of_the_chip(name, chip, compute, scales):
    found = accelerator.choose(name, npu(chip))
    assert (found.compute, found.scales) == (compute, scales)


def test_fsdp_is_refused_by_lightning_and_without_loss_scaling_only_by_the_plugin():
    from ascendrun.lightning.setup import refuse_scaling

    with pytest.raises(ValueError, match="requires a GPU"):
        pl.Trainer(strategy="fsdp", accelerator="cpu", **QUIET)
    refuse_scaling(accelerator.choose("auto", npu("Ascend910B3")))
    with pytest.raises(InvalidDataError):
        refuse_scaling(accelerator.choose("auto", npu("Ascend910A")))


@pytest.mark.parametrize("name, chip", [("bf16-mixed", "Ascend910A"), ("64", "Ascend910B3")])
def test_a_precision_that_the_chip_does_not_have_is_refused(name, chip):
    with pytest.raises(InvalidDataError):
        accelerator.choose(name, npu(chip))


def test_workers_of_a_process_with_an_npu_are_spawned_and_others_forked():
    for family, expected in (("npu", "spawn"), ("cpu", None)):
        strategy = plugin.OneDevice(Accelerator(family, torch.device("cpu"), "Ascend910B3", Device))
        loader = DataLoader([1, 2], num_workers=1)
        strategy.process_dataloader(loader)
        context = loader.multiprocessing_context
        assert (context and context.get_start_method()) == expected


def test_the_global_rank_is_neither_the_local_rank_nor_a_product():
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    found = plugin.LaunchedEnvironment({**environ, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    found.set_global_rank(3)
    found.set_world_size(4)
    assert (found.global_rank(), found.local_rank(), found.node_rank(), found.world_size()) == (5, 1, 1, 6)
    assert found.creates_processes_externally and (found.main_address, found.main_port) == ("10.0.0.1", 1234)


def test_variables_of_a_launcher_that_cannot_be_are_refused_together():
    with pytest.raises(InvalidDataError) as caught:
        plugin.LaunchedEnvironment({"RANK": "one", "WORLD_SIZE": "2"})
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert name in str(caught.value)
    with pytest.raises(InvalidDataError):
        plugin.LaunchedEnvironment({"RANK": "1", "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    "version, is_supported",
    [("1.8.6", False), ("1.9.4", False), ("1.9.5", True), ("2.0.0", False), ("2.1.4", False), ("2.2.0", True),
     ("2.6.6", True), ("2.7.0.dev0", True), ("3.0", False)],
)  # fmt: skip
def test_versions_are_supported_or_refused_by_a_table(version, is_supported):
    assert (package.reason_against(version) is None) == is_supported


def test_a_schedule_has_the_length_of_the_new_training():
    weights = [torch.nn.Parameter(torch.zeros(1))]
    saved = torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(weights, 0.1), max_lr=0.1, total_steps=10).state_dict()
    checkpoint = {"lr_schedulers": [dict(saved)]}
    plugin.Supervision(plugin.StepCheckpoints(Path("/nowhere")), save_steps=1).on_load_checkpoint(
        None, None, checkpoint
    )
    longer = torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(weights, 0.1), max_lr=0.1, total_steps=30)
    longer.load_state_dict(checkpoint["lr_schedulers"][0])
    assert longer.total_steps == 30


def test_a_value_that_is_not_plain_is_refused_with_its_place():
    from ascendrun.lightning.callback import plain

    problems = []
    state = {"a": [torch.nn.Parameter(torch.ones(1)), (True, None)], "b": {"path": Path("x"), "bad": object()}}
    kept = plain(state, "hyper_parameters", problems)
    assert type(kept["a"][0]) is torch.Tensor and kept["a"][1] == (True, None) and kept["b"]["path"] == "x"
    assert [problem.values["place"] for problem in problems] == ["hyper_parameters/b/bad"]
