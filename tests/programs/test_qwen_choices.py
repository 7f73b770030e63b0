"""What a LoRA run chooses is what it does: ways, packing, activations, attention, rows to validate on."""

from __future__ import annotations

import random

import pytest
import torch

from ascendrun.facts.chips import chip_of
from ascendrun.planner import cost, plan
from ascendrun.planner.models import shape_of
from ascendrun.planner.training import Training
from ascendrun.programs.devices import attention
from ascendrun.programs.devices.accelerator import Precision, open_accelerator
from ascendrun.programs.qwen_lora import base, chat_template, modes
from ascendrun.programs.qwen_lora.__main__ import OPTIONS
from ascendrun.programs.qwen_lora.dataset import make_course, make_lessons, read_texts, split
from ascendrun.programs.qwen_lora.rules import presets, work_of
from ascendrun.programs.qwen_lora.sft_task import forward
from ascendrun.programs.trainer import optim
from ascendrun.programs.trainer import options as option_table
from ascendrun.programs.trainer.runtime import Runtime

FLOAT = Precision(torch.float32, torch.float32, False, "float32")


def options_of(*given):
    return option_table.parse(given, option_table.read_table(OPTIONS))


def test_ways_are_tried_from_fast_to_slow_and_only_those_that_can_work():
    """S3-B6."""
    for dtype, ranks, has_deepspeed, expected in (
        ("float32", 2, True, ["ddp", "fsdp2", "zero3"]),
        ("float32", 2, False, ["ddp", "fsdp2"]),
        ("float16", 2, True, ["ddp", "zero3"]),
        ("float32", 1, True, ["ddp"]),
    ):
        assert strategies(options_of(f"--dtype={dtype}"), ranks, has_deepspeed) == expected
    assert strategies(options_of("--compile=torch"), 2, True) == ["ddp", "fsdp2"]


def strategies(options, ranks, has_deepspeed):
    """What `strategy: auto` chooses from."""
    training = Training(
        "qwen_lora", options, frozenset(), ranks, ranks, (), "cuda", chip_of("H100"), has_deepspeed=has_deepspeed
    )
    piece = {"rows": 1, "length": 64, "kept": 64, "pieces": 1}
    work = work_of(options, shape_of(presets()["tiny"]), piece, steps=1, tokens=1.0, mean=1.0)
    found = plan.make_choice(training, work, plan.devices_of(training)).options
    return sorted({option.layout.strategy for option in found})


def test_rows_hold_several_samples_unless_packing_is_turned_off():
    """S3-B7."""
    for packing in ("true", "false"):
        options = options_of(
            "--data_path=generated",
            "--synthetic_samples=40",
            "--global_batch_size=8",
            "--cutoff_len=512",
            "--max_steps=3",
            f"--packing={packing}",
        )
        texts = read_texts(options)
        lessons = make_lessons(
            texts,
            chat_template.wrap_tokenizer(chat_template.make_tokenizer(texts.train.conversations, words=400)),
            options,
        )
        course = make_course(lessons, options, world_size=1)
        assert len(course.samples(0)) == 8 and (len(course.units(0)) < 8) == (packing == "true")


@pytest.mark.parametrize("is_anew", [False, True])
def test_what_was_chosen_of_activations_is_what_a_run_does_and_its_attention_is_fused(
    tmp_path, usual_positions, is_anew
):
    """S3-B7: no bit tells whether a forward pass was made a second time; who counts the passes knows."""
    base.write_model(tmp_path / "base", base.build(base.shape_config("tiny", vocab_size=64)))
    here, chosen = Runtime(0, 0, 1, None, open_accelerator("cpu", 0)), cost.Layout("ddp", recomputes=is_anew)
    model, engine, _ = modes.make_engine(
        base.folder_config(tmp_path / "base"),
        options_of("--lora_r=2"),
        tmp_path / "base",
        here,
        FLOAT,
        chosen,
        lambda model: optim.adamw(model, 1e-3),
    )
    assert model.config._attn_implementation == attention.NAME
    passes = []
    first = next(module for name, module in engine.module.named_modules() if name.endswith("layers.0.mlp"))
    first.register_forward_pre_hook(lambda *_: passes.append("forward"))
    tensors = {"ids": torch.arange(12)[None], "kept": torch.arange(4), "targets": torch.arange(4)[None]}
    engine.backward(forward(engine.model.train(), tensors).sum())
    assert len(passes) == 1 + is_anew


def test_which_rows_are_kept_to_validate_on_follows_from_the_seed():
    """S3-B8: shuffled by whatever was drawn before."""
    options = options_of("--val_size=0.2")
    first = [list(part) for part in split(60, options)]
    random.random()
    assert [list(part) for part in split(60, options)] == first and len(first[1]) == 12
