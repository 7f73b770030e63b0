"""In what numbers a training is computed, on chips that have bfloat16 and on those that have not."""

import math
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ascendrun import programs
from ascendrun.programs.devices import accelerator as devices
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer import options as option_table
from ascendrun.programs.trainer.optim import adamw
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import cast
from ascendrun.programs.trainer.strategies.parallel import check, wrap
from ascendrun.programs.trainer.strategies.zero3 import configuration
from ascendrun.text import Text

SAYS_YES = types.SimpleNamespace(is_bf16_supported=lambda: True)
HALF = devices.Precision(torch.float32, torch.float16, True, "float16")
NEW, OLD = ("Ascend910B3", "NVIDIA H200"), ("Ascend910A", "Ascend310P3", "Ascend910ProB")


def card(name: str) -> devices.Accelerator:
    """A device whose torch claims bfloat16 whatever the chip has, as torch does by emulating it."""
    return devices.Accelerator("cuda" if "NVIDIA" in name else "npu", torch.device("cpu"), name, SAYS_YES)


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("wanted", ["auto", "float16"])
def test_float16_never_comes_without_loss_scaling_and_float32_weights(name, wanted):
    """S1-B3: weights in pure float16, AdamW, and a loss scale that nobody read."""
    chosen = devices.choose_precision(wanted, card(name))
    assert (chosen.weights, chosen.compute, chosen.scales) == (torch.float32, torch.float16, True)
    assert chosen.reason.key == ("program.float16" if wanted == "auto" else "program.float16-requested")


@pytest.mark.parametrize("name", NEW)
def test_a_chip_with_bfloat16_needs_no_scaling(name):
    chosen = devices.choose_precision("auto", card(name))
    assert (chosen.weights, chosen.compute, chosen.scales) == (torch.float32, torch.bfloat16, False)
    assert chosen.reason == Text("program.bfloat16", "", name=name)


@pytest.mark.parametrize("name", OLD)
def test_bfloat16_is_refused_with_the_way_out_where_it_would_be_emulated(name):
    """S4-B4: the original asks for bfloat16 on a 910A."""
    with pytest.raises(InvalidDataError, match="does not support bfloat16"):
        devices.choose_precision("bfloat16", card(name))


@pytest.mark.parametrize("name", [*NEW, *OLD, "cpu"])
def test_only_numbers_with_a_fraction_change_their_precision(name):
    """S1-B2: ids and masks were halved before the embedding was looked up."""
    accelerator = devices.Accelerator("cpu", torch.device("cpu"), "cpu", None) if name == "cpu" else card(name)
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    module[1].weight.requires_grad_(False)
    module.register_buffer("positions", torch.arange(5))
    module.register_buffer("angles", torch.ones(5))
    module.register_parameter("table", nn.Parameter(torch.arange(5), requires_grad=False))
    chosen = devices.choose_precision("auto", accelerator)
    cast(module, chosen)
    assert module.positions.dtype == module.table.dtype == torch.int64
    assert module.angles.dtype == torch.float32, "angles of far places are all the same in half precision"
    assert (module[0].weight.dtype, module[1].weight.dtype) == (chosen.weights, chosen.compute)
    ids = torch.tensor([[1, 2, 3]])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=chosen.compute == torch.bfloat16):
        assert module[0](ids).dtype == chosen.weights


def test_a_model_that_only_generates_is_sharded_in_float16_and_one_that_trains_is_not():
    """On a 910A: generation needs no loss scaling, which fully_shard does not have."""
    here = Runtime(0, 0, 2, None, devices.Accelerator("npu", torch.device("cpu"), "Ascend910A", None))
    check(here, replace(HALF, weights=torch.float16, scales=False), strategy="fsdp2", shard_size=0, compile="none")
    with pytest.raises(InvalidDataError, match="fsdp2 does not support the loss scaling"):
        check(here, HALF, strategy="fsdp2", shard_size=0, compile="none")


def test_a_step_whose_float16_gradients_overflow_is_left_out_and_the_next_has_half_the_scale():
    """The search for a scale that a 910A needs; 65536, where it begins, is more than float16 can hold."""
    here = Runtime(0, 0, 1, None, devices.open_accelerator("cpu", 0))
    torch.manual_seed(1)
    engine, resumed = (
        wrap(nn.Linear(4, 4), here, strategy="none", make_optimizer=lambda model: adamw(model, 0.1), precision=HALF)
        for _ in range(2)
    )
    before = engine.module.weight.detach().clone()
    norms = []
    engine.begin(0)
    for _ in range(3):
        with engine.autocast():
            loss = engine.model(torch.ones(2, 4)).sum()
        engine.backward(loss)
        norms.append(float(engine.finish(0.0)))
        if len(norms) < 3:  # twice the scale, by the batch of two
            assert torch.equal(engine.module.weight, before)
    assert math.isinf(norms[0]) and math.isinf(norms[1])
    assert norms[2] == pytest.approx(math.sqrt(20 * 2**2)) and engine.scaler.get_scale() == 2**14
    assert not torch.equal(engine.module.weight, before)
    state = engine.state()
    resumed.load_state(checkpoint.reader([checkpoint.as_plain(state.common)]), state.plain)
    assert resumed.scaler.get_scale() == 2**14, "a resumed run need not search anew"


@pytest.mark.parametrize("given, scale", [(0.0, 65536.0), (128.0, 128.0)])
def test_the_loss_scale_that_is_asked_for_is_the_first(given, scale):
    chosen = devices.precision_of({"dtype": "float16", "loss_scale": given}, card("Ascend910A"))
    assert devices.make_scaler(devices.open_accelerator("cpu", 0), chosen).get_scale() == scale
    assert 2 ** configuration(chosen, trained=9, offload=False)["fp16"]["initial_scale_power"] == scale


@pytest.mark.parametrize("program", ["trajectory", "qwen_lora"])
def test_every_program_chooses_its_precision_by_the_device(program):
    table = option_table.read_table(Path(programs.__file__).parent / program / "options.json")
    assert (table.options["dtype"].default, table.options["loss_scale"].default) == ("auto", 0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp"])
def test_half_precision_gradients_are_summed_over_ranks_in_float32(launch, strategy):
    run = launch("reduced", [strategy], ranks=2).succeed()
    assert "gradient [128.5, 128.5, 128.5, 128.5]" in run.text()


def test_deepspeed_scales_where_float16_is_taken_and_has_no_optimizer_or_schedule_of_its_own():
    """S1-B3 under ZeRO-3. S3-B3: two schedules, in two places, contradicted each other."""
    for precision in (HALF, devices.Precision(torch.float32, torch.bfloat16, False, "bfloat16")):
        told = configuration(precision, trained=9, offload=False)
        assert (told["fp16"]["enabled"], told["bf16"]["enabled"]) == (precision.scales, not precision.scales)
        assert not {"optimizer", "scheduler"} & set(told)


# --- on what kind of device a training or an answer is computed when nobody says it ---


def test_a_machine_with_npus_uses_them_though_no_launcher_tells_of_them(tmp_path):
    (tmp_path / "davinci_manager").touch()
    assert devices.choose_family("auto", {}, tmp_path) != "npu"  # the driver alone is no device
    (tmp_path / "davinci3").touch()
    assert devices.choose_family("auto", {}, tmp_path) == "npu"


def test_what_is_asked_for_goes_before_what_the_launcher_says_and_that_before_what_is_there(tmp_path):
    (tmp_path / "davinci0").touch()
    assert devices.choose_family("auto", {"ASCENDRUN_DEVICE_TYPE": "cpu"}, tmp_path) == "cpu"
    assert devices.choose_family("cuda", {"ASCENDRUN_DEVICE_TYPE": "cpu"}, tmp_path) == "cuda"
