"""What the LoRA program's switches change and what they must not, over two ranks, each beside the plain way."""

import json
import random
import re

import pytest
import torch

from ascendrun.facts.chips import chip_of
from ascendrun.planner import cost, fitting
from ascendrun.planner.cost import Layout
from ascendrun.planner.models import shape_of
from ascendrun.planner.training import Training
from ascendrun.programs.devices import attention
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora import base, modes
from ascendrun.programs.qwen_lora.dataset import make_course, make_lessons, read_texts, split
from ascendrun.programs.qwen_lora.rules import RULES, presets, work_of
from ascendrun.programs.qwen_lora.sft_task import forward
from ascendrun.programs.trainer import optim
from ascendrun.programs.trainer.strategies.parallel import choose, refuse
from tests.programs import conftest
from tests.programs.conftest import alone
from tests.programs.test_qwen_runs import STRATEGIES, TINY

BRIEF = "--max_steps=4", "--val_size=0", "--num_sample_prompts=0", "--save_steps=0", "--gradient_checkpointing=false"
GENERATED = ("--data_path=generated", "--synthetic_samples=120", "--max_steps=4")
FLOAT = Precision(torch.float32, torch.float32, False, "float32")
HALF = Precision(torch.float32, torch.float16, True, "float16")
PIECE = {"rows": 4, "length": 512, "kept": 64, "pieces": 1}

thorough = pytest.mark.thorough


@pytest.fixture
def losses(launch):
    """losses(*options): of a tiny training over two ranks."""

    def run(*options):
        name = "-".join(option.strip("-") for option in options)
        found = launch("qwen_lora", [*TINY, *BRIEF, *options], ranks=2, name=name).succeed().losses()
        assert len(found) == 4
        return found

    return run


def options_of(*given):
    return conftest.options_of("qwen_lora", *given)


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
@pytest.mark.parametrize("kind", ["--use_dora=true", "--use_rslora=true"])
def test_the_other_kinds_of_adapter_learn_the_same_by_every_way(losses, kind):
    first = losses("--strategy=ddp", kind)
    assert first != losses("--strategy=ddp")
    for strategy in ("fsdp2", "zero3"):
        assert losses(f"--strategy={strategy}", kind) == pytest.approx(first, rel=1e-4), strategy


# --- refused before anything is read or made ---


@pytest.mark.parametrize(
    "given, ranks, precision, says",
    [
        (["--strategy=fsdp2"], 2, HALF, "(?s)does not support the loss scaling of float16.*ddp, zero3"),
        (["--strategy=ddp", "--cpu_offload=true"], 2, FLOAT, "set strategy: fsdp2 or zero3"),
        (["--cpu_offload=true"], 1, FLOAT, "on two or more devices"),
        (["--quantization_bit=4"], 1, FLOAT, "(?s)device memory, which a CPU does not have.*set strategy: fsdp2"),
        (["--model_preset=huge"], 1, FLOAT, "unknown preset 'huge'"),
        (["--data_path="], 1, FLOAT, "args.data_path is required"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason_and_the_way_out(given, ranks, precision, says):
    with pytest.raises(InvalidDataError, match=says):
        refuse(options_of("--data_path=generated", *given), alone(ranks=ranks), precision, *RULES)


@pytest.mark.parametrize(
    "given", [[], ["--strategy=zero3"], ["--strategy=zero3", "--cpu_offload=true"], ["--cpu_offload=true"]]
)
@pytest.mark.parametrize("precision", [FLOAT, HALF])
def test_what_can_work_is_not_refused(given, precision):
    refuse(options_of(*given), alone(ranks=2), precision)


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
def test_a_damaged_base_is_told_in_a_line_that_names_the_file(launch, tokenizer, tmp_path, file, text):
    home = tmp_path / "home"
    base.write_base(home, base.shape_config("tiny", vocab_size=len(tokenizer)), tokenizer, seed=1, mark=0)
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


def planned(*given, device_bytes, ranks=2):
    """What the planner chooses on devices with this memory, and all that it compared."""
    options = options_of(*given)
    training = Training("qwen_lora", options, frozenset(), ranks, ranks, (), "cuda", chip_of("H100"), device_bytes)
    return fitting.make_choice(training, work_of_tiny(options), fitting.devices_of(training))


def work_of_tiny(options):
    return work_of(options, shape_of(presets()["tiny"]), PIECE, steps=1, tokens=4096.0, mean=256.0)


def test_activations_are_kept_while_they_fit_and_made_anew_before_the_base_is_cut_up():
    """S3-B7: no checkpointing whatever the card. S3-B6: the fast way first."""
    roomy = planned(device_bytes=None).chosen
    assert roomy.layout == Layout("ddp")
    less = int(roomy.memory.range.low) - 1
    tight = planned(device_bytes=less).chosen
    assert tight.layout == Layout("ddp", recomputes=True)
    assert tight.memory.parts["activations"] < 0.7 * roomy.memory.parts["activations"]
    forced = planned("--gradient_checkpointing=false", device_bytes=less)
    assert all(not option.layout.recomputes for option in forced.options)


def test_offloading_that_is_asked_for_is_never_forgotten():
    """`strategy: auto` once took the fastest way, which offloads nothing."""
    assert planned("--cpu_offload=true", device_bytes=None).chosen.layout == Layout("fsdp2", offloads=True)


def test_a_way_that_was_asked_for_is_taken_and_activations_are_still_looked_at(capsys):
    options = options_of("--strategy=ddp")
    assert choose(options, alone(), FLOAT, work_of_tiny(options)) == Layout("ddp")
    assert "ddp, activations recomputed: " in capsys.readouterr().out
    options = options_of("--strategy=ddp", "--gradient_checkpointing=true")
    assert choose(options, alone(), FLOAT, work_of_tiny(options)) == Layout("ddp", recomputes=True)
    assert capsys.readouterr().out == ""


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


def test_a_plan_for_a_card_that_lacks_the_dtype_is_refused_in_words():
    with pytest.raises(InvalidDataError, match="does not support bfloat16"):
        modes.plan(options_of(*GENERATED, "--chip=910A", "--dtype=bfloat16"), alone())
    with pytest.raises(InvalidDataError, match="unknown chip"):
        modes.plan(options_of(*GENERATED, "--chip=Z80"), alone())


def test_the_plan_has_a_speed_that_the_cards_can_reach(capsys):
    """S3-B10: 50 to 80 rows of 2048 tokens a second were stated for 32 billion weights on 16 cards."""
    asked = ("--model_preset=qwen2.5-32b", "--world_size=16", "--chip=910B3", "--gradient_checkpointing=true")
    modes.plan(options_of(*GENERATED, *asked), alone())
    said = capsys.readouterr().out
    speed = re.search(r"speed: ([\d,]+) to ([\d,]+) tokens/s", said)
    assert 5 * 2048 / 10 < int(speed.group(2).replace(",", "")) < 50 * 2048
    assert "hsdp" not in said and "of 64.0 GiB" in said


# --- what a LoRA run chooses is what it does: ways, packing, activations, attention, rows to validate on ---


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
    found = fitting.make_choice(training, work, fitting.devices_of(training)).options
    return sorted({option.layout.strategy for option in found})


def test_rows_hold_several_samples_unless_packing_is_turned_off(tokenizer):
    """S3-B7."""
    for packing in ("true", "false"):
        options = options_of(*TINY, "--cutoff_len=512", "--max_steps=3", f"--packing={packing}")
        course = make_course(make_lessons(read_texts(options), tokenizer, options), options, world_size=1)
        assert len(course.samples(0)) == 8 and (len(course.units(0)) < 8) == (packing == "true")


@pytest.mark.parametrize("is_anew", [False, True])
def test_what_was_chosen_of_activations_is_what_a_run_does_and_its_attention_is_fused(
    tmp_path, usual_positions, is_anew
):
    """S3-B7: no bit tells whether a forward pass was made a second time; who counts the passes knows."""
    base.write_model(tmp_path / "base", base.build(base.shape_config("tiny", vocab_size=64)))
    here, chosen = alone(), cost.Layout("ddp", recomputes=is_anew)
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
