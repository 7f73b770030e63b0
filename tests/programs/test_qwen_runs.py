"""Whole runs of the LoRA program, tiny, on one or two ranks."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from ascendrun.programs.trainer.strategies.zero3 import PERSISTED_ELEMENTS

TINY = (
    "--data_path=generated",
    "--synthetic_samples=120",
    "--global_batch_size=8",
    "--max_steps=9",
    "--learning_rate=0.01",
    "--warmup_steps=2",
    "--cutoff_len=128",
    "--lora_r=4",
    "--logging_steps=1",
    "--eval_steps=5",
    "--num_sample_prompts=1",
    "--max_new_tokens=4",
    "--save_steps=2",
    "--save_total_limit=9",
)
STRATEGIES = ("ddp", "fsdp2", "zero3")


@pytest.fixture
def train(launch):
    """train(*options, ranks=2, name=…): a tiny training."""

    def begin(*options, **more):
        return launch("qwen_lora", [*TINY, *options], **{"ranks": 2, **more})

    return begin


def adapter_of(run):
    return load_file(run.folder / "out" / "adapter" / "adapter_model.safetensors")


def started(run):
    return next(line for line in run.metrics() if line.get("event") == "start")


def numbers_of(run):
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in run.metrics() if "loss" in line}


def levels_of(run):
    names = "samples_explain", "samples_reasoning", "samples_topology"
    return [[line[name] for name in names] for line in run.metrics() if "loss" in line]


def test_the_three_ways_see_the_same_samples_and_learn_the_same(train):
    """The base is read from its files in three ways, and the adapter gathered in three; S3-B5."""
    runs = {
        strategy: train(f"--strategy={strategy}", "--learning_rate=0.001", name=strategy).succeed()
        for strategy in STRATEGIES
    }
    first = runs["ddp"]
    counts = levels_of(first)
    assert [sum(each) for each in counts] == [8] * 9 and counts[0][2] == 0 < counts[8][2]
    for strategy in ("fsdp2", "zero3"):
        other = runs[strategy]
        assert started(other)["parameters"] == started(first)["parameters"] > 0
        assert other.losses() == pytest.approx(first.losses(), rel=1e-4)
        assert levels_of(other) == counts
        assert other.metrics()[-1]["final_loss"] == pytest.approx(first.metrics()[-1]["final_loss"], rel=1e-4)
        pairs = adapter_of(first), adapter_of(other)
        assert set(pairs[0]) == set(pairs[1])
        for name, tensor in pairs[0].items():
            torch.testing.assert_close(tensor, pairs[1][name], rtol=1e-2, atol=2e-3, msg=name)


def test_adapters_too_large_to_stay_whole_on_every_rank_are_gathered_before_they_are_saved(train):
    """S3-B5: ZeRO-3 leaves small weights whole, and only the large ones went out empty."""
    run = train(
        "--strategy=zero3", "--lora_r=1024", "--target_modules=down_proj", "--max_steps=1", "--val_size=0"
    ).succeed()
    assert max(tensor.numel() for tensor in adapter_of(run).values()) > PERSISTED_ELEMENTS


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(strategy, marks=() if strategy == "ddp" else pytest.mark.thorough) for strategy in STRATEGIES],
)
def test_a_rank_killed_in_mid_stage_changes_no_bit_after_the_resume(train, strategy):
    """S3-B9: resume worked for the first epoch only. Nine steps are more than two epochs of 32 rows."""
    options = f"--strategy={strategy}", "--synthetic_samples=34"
    straight = train(*options, name="straight").succeed()
    assert train(*options, name="broken").killed_at(5, 1)[1] == -signal.SIGKILL
    again = train(*options, name="broken").succeed()
    assert "resumed at step" in again.out[0].read_text()
    assert numbers_of(again) == numbers_of(straight)
    one, other = adapter_of(straight), adapter_of(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_nodes_that_share_no_disk_make_the_same_base_each(train, tmp_path):
    """Newer transformers write a model on rank 0 only, and the second node had none."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    train("--strategy=fsdp2", "--max_steps=1", folders=nodes, rank_env={1: {"LOCAL_RANK": "0"}}).succeed()
    files = [{path.name: path.read_bytes() for path in (node / "out" / "base").iterdir()} for node in nodes]
    assert files[0] == files[1] and {"config.json", "model.safetensors", "tokenizer.json"} <= set(files[0])
    assert (nodes[0] / "out" / "adapter").exists() and not (nodes[1] / "out" / "adapter").exists()


def test_a_stopped_run_says_so_and_goes_on(train):
    first = train(name="stopped", ranks=1, stop=(0, 2)).succeed()
    assert "stopped after step" in first.text() and not (first.folder / "out" / "adapter").exists()
    again = train(name="stopped", ranks=1).succeed()
    report = again.report()
    assert report["training"]["steps"] == 9 and sum(report["curriculum"]["samples"].values()) == 72
    assert (again.folder / "out" / "samples.jsonl").read_text().count("\n") == 1


def test_the_loss_falls(train):
    losses = list(
        train("--max_steps=30", "--learning_rate=0.01", "--lora_r=16", "--curriculum=off", "--eval_steps=0", ranks=1)
        .succeed()
        .losses()
        .values()
    )
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


PLAN = (
    "--mode=plan",
    "--max_steps=0",
    "--cutoff_len=2048",
    "--lora_r=64",
    "--gradient_checkpointing=true",
    "--chip=910B4",
)


def test_a_plan_takes_no_card(train):
    """The arithmetic of two nodes of eight, on a machine without any; S3-B10."""
    told = train(*PLAN, "--model_preset=qwen2.5-0.5b", "--world_size=16", ranks=1, name="fits").succeed().text()
    assert "GiB of 32.0 GiB (weights" in told and "strategy: ddp" in told and "speed: " in told


def test_two_runs_of_one_budget_are_compared(train):
    for curriculum in ("on", "off"):
        train(
            f"--curriculum={curriculum}",
            f"--output_dir=../{curriculum}",
            "--val_size=0.2",
            name="run-" + curriculum,
            ranks=1,
        ).succeed()
    run = train("--mode=compare", "--compare_dirs=../on,../off", ranks=1, name="compare").succeed()
    found = json.loads((run.folder / "out" / "comparison.json").read_text())["final"]
    assert {"loss", "loss_explain", "loss_reasoning", "loss_topology"} <= set(found)
    assert "difference" in run.out[0].read_text()


# --- what it takes a rank to hold its share of a base, beside transformers' from_pretrained on every rank ---


def make(folder, **sizes):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, **sizes)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="12MB")
    return 4 * model.num_parameters()


@pytest.fixture
def hold(launch, tmp_path):
    """hold(strategy, ranks=2): what each rank found; hold.whole_bytes of a base in several files."""

    def run(strategy, *, ranks=2):
        asked = {"strategy": strategy, "home": str(tmp_path / "home"), "tiny": str(tmp_path / "tiny")}
        run = launch("loading", [json.dumps(asked)], ranks=ranks, name=strategy).succeed()
        return [json.loads((run.folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]

    make(tmp_path / "tiny", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    run.whole_bytes = make(
        tmp_path / "home", vocab_size=3000, hidden_size=512, intermediate_size=1408, num_hidden_layers=11
    )
    assert len(list((tmp_path / "home").glob("*.safetensors"))) > 5
    return run


def test_a_rank_of_a_shared_base_never_has_a_whole_copy_of_it_and_every_byte_is_read_once(hold):
    """S3-B4: each rank loaded all of it before anything was shared, 512 GB a node."""
    plain = hold("plain", ranks=1)[0]["peak"]
    assert plain > 0.9 * hold.whole_bytes
    for strategy in ("fsdp2", "zero3"):
        ranks = hold(strategy)
        assert sum(each["read"] for each in ranks) == hold.whole_bytes
        assert all(each["peak"] < 0.8 * plain for each in ranks), (strategy, plain, ranks)
