"""What the LoRA program's switches change and what they must not, over two ranks, each beside the plain way."""

from __future__ import annotations

import json

import pytest
import torch

from ascendrun.planner.chips import chip_of
from ascendrun.programs.devices import attention
from ascendrun.programs.devices.accelerator import Accelerator, Precision, open_accelerator
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora import base, chat_template, modes, sizing
from ascendrun.programs.qwen_lora.__main__ import OPTIONS
from ascendrun.programs.qwen_lora.dataset import read_texts
from ascendrun.programs.trainer import options as option_table
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.choice import refuse
from ascendrun.text import Text

TINY = (
    "--data_path=generated",
    "--synthetic_samples=120",
    "--global_batch_size=8",
    "--max_steps=4",
    "--learning_rate=0.01",
    "--warmup_steps=2",
    "--cutoff_len=128",
    "--lora_r=4",
    "--logging_steps=1",
    "--val_size=0",
    "--num_sample_prompts=0",
    "--save_steps=0",
    "--gradient_checkpointing=false",
)
STRATEGIES = ("ddp", "fsdp2", "zero3")
FLOAT = Precision(torch.float32, torch.float32, False, "float32")
HALF = Precision(torch.float32, torch.float16, True, "float16 with loss scaling: 910A has no bfloat16")
PIECE = {"rows": 4, "length": 512, "kept": 64, "pieces": 1}

thorough = pytest.mark.thorough


@pytest.fixture
def losses(launch):
    """losses(*options): of a tiny training over two ranks."""

    def run(*options):
        name = "-".join(option.strip("-") for option in options)
        found = launch("qwen_lora", [*TINY, *options], ranks=2, name=name).succeed().losses()
        assert len(found) == 4
        return found

    return run


def options_of(*given):
    return option_table.parse(given, option_table.read_table(OPTIONS))


def wrapped_tokenizer():
    return chat_template.wrap_tokenizer(
        chat_template.make_tokenizer(
            read_texts(options_of("--data_path=generated", "--synthetic_samples=20")).train.conversations, words=300
        )
    )


def alone(name="cpu"):
    device = open_accelerator("cpu", 0) if name == "cpu" else Accelerator("npu", torch.device("cpu"), name, None)
    return Runtime(0, 0, 1, None, device)


# --- trained for real ---


@pytest.mark.parametrize(
    "strategy", [pytest.param(strategy, marks=() if strategy == "ddp" else thorough) for strategy in STRATEGIES]
)
def test_activations_made_anew_change_no_bit(losses, strategy):
    """S3-B7. Dropout is drawn again as it was; ZeRO-3 takes the older kind of checkpointing."""
    assert losses(f"--strategy={strategy}", "--gradient_checkpointing=true") == losses(f"--strategy={strategy}")


@thorough
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_offloading_changes_no_result(losses, strategy):
    """With torch's own AdamW: DeepSpeed's for CPUs wants a compiler on every node."""
    assert losses(f"--strategy={strategy}", "--cpu_offload=true") == pytest.approx(
        losses(f"--strategy={strategy}"), rel=1e-5
    )


@thorough
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_learns_what_float32_learns(losses, strategy):
    assert losses(f"--strategy={strategy}", "--dtype=bfloat16") == pytest.approx(
        losses(f"--strategy={strategy}"), rel=5e-3
    )


@thorough
@pytest.mark.parametrize("kind", ["--use_dora=true", "--use_rslora=true"])
def test_the_other_kinds_of_adapter_learn_the_same_by_every_way(losses, kind):
    first = losses("--strategy=ddp", kind)
    assert first != losses("--strategy=ddp")
    for strategy in ("fsdp2", "zero3"):
        assert losses(f"--strategy={strategy}", kind) == pytest.approx(first, rel=1e-4), strategy


# --- refused before anything is read or made ---


@pytest.mark.parametrize(
    "given, ranks, precision, has_zero3, says",
    [
        (["--strategy=fsdp2"], 2, HALF, True, "(?s)no loss scaling, and float16 .*ddp, zero3"),
        (["--strategy=fsdp2"], 1, FLOAT, True, "requires at least 2 ranks, got 1"),
        (["--strategy=zero3"], 1, FLOAT, True, "requires at least 2 ranks, got 1"),
        (
            ["--strategy=zero3"],
            2,
            FLOAT,
            False,
            "(?s)requires deepspeed, .*pip install deepspeed, or set --strategy=fsdp2",
        ),
        (["--strategy=ddp", "--cpu_offload=true"], 2, FLOAT, True, "set --strategy=fsdp2 or --strategy=zero3"),
        (["--cpu_offload=true"], 1, FLOAT, True, "on two or more devices"),
        (["--cpu_offload=true"], 2, HALF, False, "float16 requires deepspeed"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason_and_the_way_out(given, ranks, precision, has_zero3, says):
    with pytest.raises(InvalidDataError, match=says):
        refuse(options_of(*given), world_size=ranks, precision=precision, has_zero3=has_zero3)


@pytest.mark.parametrize(
    "given", [[], ["--strategy=zero3"], ["--strategy=zero3", "--cpu_offload=true"], ["--cpu_offload=true"]]
)
def test_what_can_work_is_not_refused(given):
    refuse(options_of(*given), world_size=2, precision=HALF)
    refuse(options_of(*given), world_size=2, precision=FLOAT, has_zero3="--strategy=zero3" in given)


@pytest.mark.parametrize(
    "given, says",
    [
        ("--dtype=float16", "error: --dtype=float16 is slow and inexact on a CPU"),
        ("--mc_eval_path=absent.jsonl", "error: absent.jsonl: file not found"),
    ],
)
def test_a_refused_run_has_made_nothing(launch, given, says):
    run = launch("qwen_lora", [*TINY, given], name="refused")
    assert run.wait() == [1] and not (run.folder / "out").exists()
    assert says in run.text() and "Traceback" not in run.text()


@pytest.mark.parametrize(
    "file, text",
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "trunc'),
        ("config.json", "[]"),
        ("config.json", '{"model_type": "nosuch"}'),
        ("config.json", '{"model_type": "qwen2", "hidden_size": "big"}'),
        ("config.json", '{"model_type": "qw'),
    ],
)
def test_a_damaged_base_is_told_in_a_line_that_names_the_file(launch, tmp_path, file, text):
    home = tmp_path / "home"
    base.write_base(home, base.shape_config("tiny", vocab_size=300), wrapped_tokenizer(), seed=1, mark=0)
    (home / file).write_text(text)
    run = launch("qwen_lora", [*TINY, f"--base_model={home}"], name="damaged")
    assert run.wait() == [1] and "Traceback" not in run.text()
    (line,) = [each for each in run.text().splitlines() if each.startswith("error: ")]
    assert f"{home}/{file}" in line and "copy the base again" in run.text()


def test_the_window_of_a_model_is_kept_where_the_model_uses_it(tmp_path):
    for used, window in ((True, 256), (False, None)):
        config = base.shape_config("tiny", use_sliding_window=used, sliding_window=256)
        (tmp_path / "config.json").write_text(config.to_json_string())
        assert base.folder_config(tmp_path).sliding_window == window


# --- chosen, and said ---


def estimated(*given, device_bytes):
    target = memory.Target("cpu", FLOAT, 2, device_bytes)
    return sizing.estimate(base.shape_config("tiny"), options_of(*given), PIECE, target)


def test_activations_are_kept_while_they_fit_and_made_anew_before_the_base_is_cut_up():
    """S3-B7: no checkpointing whatever the card. S3-B6: the fast way first."""
    roomy = estimated(device_bytes=None)
    assert roomy.chosen == sizing.Layout("ddp", False, False)
    assert [reason.key for reason in roomy.lines[-1].values["why"]] == ["program.fastest"]
    tight = estimated(device_bytes=roomy.need.on_device("cpu") - 1)
    assert tight.chosen == sizing.Layout("ddp", False, True)
    assert tight.need.activations < 0.7 * roomy.need.activations
    assert tight.lines[-1].values["layout"] == tight.chosen.text()
    forced = estimated("--gradient_checkpointing=false", device_bytes=roomy.need.on_device("cpu") - 1)
    assert forced.chosen.strategy != "ddp" and not forced.chosen.gradient_checkpointing


def test_what_fits_by_no_way_is_told_with_the_least_of_all_needs():
    found = estimated(device_bytes=1000)
    assert found.chosen is None and found.problems[0].key == "program.does-not-fit" and len(found.lines) == 1 + 8
    assert "LoRA" not in str(found.problems[0]), "it is LoRA already"


def test_offloading_that_is_asked_for_is_never_forgotten():
    """`strategy: auto` once took the fastest way, which offloads nothing."""
    assert estimated("--cpu_offload=true", device_bytes=None).chosen == sizing.Layout("fsdp2", True, False)


def test_a_way_that_was_asked_for_is_taken_and_activations_are_still_looked_at():
    layout, lines = sizing.choose(base.shape_config("tiny"), options_of("--strategy=ddp"), PIECE, alone())
    assert layout == sizing.Layout("ddp", False, False)
    assert [why.key for why in lines[-1].values["why"]] == ["program.strategy-requested", "program.activations-fit"]
    layout, lines = sizing.choose(
        base.shape_config("tiny"), options_of("--strategy=ddp", "--gradient_checkpointing=true"), PIECE, alone()
    )
    assert layout.gradient_checkpointing and lines == [Text("program.chosen-requested", "", chosen=layout.text())]


def test_packing_is_on_and_attention_is_ours_whatever_the_base_says(tmp_path):
    """S3-B7: eager attention keeps every score of every head; it is never taken silently."""
    assert options_of()["packing"] is True
    config = base.shape_config("tiny")
    text = json.loads(config.to_json_string())
    text.update(attn_implementation="eager", _attn_implementation="eager")
    (tmp_path / "config.json").write_text(json.dumps(text))
    model = base.empty_model(base.folder_config(tmp_path))
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
        attention.NAME
    }


# --- a speed that no card has ---


def test_the_plan_tells_what_the_cards_cannot_exceed():
    """S3-B10: 50 to 80 rows of 2048 tokens a second were stated for 32 billion weights on 16 cards."""
    config = base.shape_config("qwen2.5-32b")
    piece, target = {"rows": 1, "length": 64, "kept": 64, "pieces": 1}, memory.Target("npu", FLOAT, 16)
    sizes = sizing.simulated_step(config, options_of(), piece, target, is_cast=True, recomputes=False)
    line = sizing.speed_limit(config, sizes, chip_of("910B3"), ranks=16, mean_length=2048)
    assert 5 < line.values["rate"] < 50 and line.values["peak"] == 294.9
    assert sizing.speed_limit(config, sizes, chip_of("310P3"), ranks=16, mean_length=2048) is None


def test_a_plan_for_a_card_that_lacks_the_dtype_is_refused_in_words():
    with pytest.raises(InvalidDataError, match="does not support bfloat16"):
        modes.plan(options_of("--chip=910A", "--dtype=bfloat16"), alone())
    with pytest.raises(InvalidDataError, match="--chip=Z80: unknown chip"):
        modes.plan(options_of("--chip=Z80"), alone())
