"""Jobs of family npu on two virtual hosts, each with a network, cards and devices of its own: HCCL's way over TCP."""

import json
import random
from pathlib import Path

import pytest

from ascendrun.planner import cost
from tests.cluster.conftest import (  # noqa: F401  # fixtures
    ascendrun,
    cluster,
    machine_left_as_found,
    no_leftovers,
    start_cluster,
)
from tests.npu.two_hosts import NODES, submit, write_job  # noqa: F401


@pytest.fixture(scope="module")
def module_cluster():
    """Two hosts, with room for what all jobs of this file leave there."""
    with start_cluster(2, disk="1G") as made:
        yield made


@pytest.mark.thorough
def test_codon_trains_over_two_hosts_as_it_does_on_the_cpu(submit, launch):  # noqa: F811
    args = {
        "mode": "pretrain", "data_path": "generated", "synthetic_sequences": 40, "val_size": 0.2, "dropout": 0,
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128,
        "global_batch_size": 8, "micro_batch_size": 2, "num_train_epochs": 2, "learning_rate": 0.01,
        "logging_steps": 1, "dtype": "float32",
    }  # fmt: skip
    found = submit({"name": "genes", "program": "codon", "args": args}, per_node=1).succeed().losses()
    options = [f"--{name}={value}" for name, value in args.items()]
    on_cpu = launch("codon", options, ranks=2, family="cpu").succeed().losses()
    assert len(on_cpu) > 6 and on_cpu[max(on_cpu)] < on_cpu[1]
    assert found == pytest.approx(on_cpu, rel=0, abs=1e-4)


WITHIN = 0.1
ONE_RANK = {"nodes": 1}
"""What a program computes does not depend on how many ranks do it."""
CHATS = {
    "model_preset": "small", "data_path": "/root/chats.json", "global_batch_size": 8,
    "max_steps": 4, "warmup_steps": 1, "cutoff_len": 128, "learning_rate": 0.01, "lora_r": 8, "lora_dropout": 0.0,
    "logging_steps": 1, "eval_steps": 0, "num_sample_prompts": 2, "max_new_tokens": 12, "dtype": "float32",
    "gradient_checkpointing": False,
}  # fmt: skip


@pytest.fixture
def chats(cluster):  # noqa: F811
    """Questions with answers longer than the cutoff, on both hosts."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(300)]
    rows = [{"instruction": f"say {words[n]}", "output": " ".join(chance.choices(words, k=130))} for n in range(40)]
    for name in NODES:
        Path(cluster.path(name, CHATS["data_path"])).write_text(json.dumps(rows))


@pytest.fixture
def forecast(ascendrun, write_job):  # noqa: F811
    """forecast(job, …): what the allocator of a rank has to give by `ascendrun plan`, for the strategy of the job."""

    def read(job, **place):
        done = ascendrun("plan", write_job(job, **place), "-o", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        plan = json.loads(done.stdout)
        assert plan["is_valid"] and not plan["problems"]
        parts = plan["choice"]["chosen"]["memory"]["parts"]
        return sum(size for name, size in parts.items() if name != "overhead") + cost.WORKSPACE["npu"]

    return read


def replies(ascendrun, done):  # noqa: F811
    """The replies that the trained model generated, fetched to the head."""
    (samples,) = (ascendrun.state_dir / "outputs" / done.spool.name).rglob("samples.jsonl")
    return [json.loads(line)["reply"] for line in samples.read_text().splitlines()]


@pytest.mark.parametrize(
    "strategy", ["hsdp", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ddp", "fsdp2"))]
)
def test_a_chat_model_is_planned_trained_and_generates(strategy, submit, forecast, chats, ascendrun):  # noqa: F811
    """The plan has the memory of the allocator; losses and replies are those of the CPU."""
    job = {"name": "chat", "program": "qwen_lora", "args": {**CHATS, "strategy": strategy}, "outputs": ["out/"]}
    planned, done = forecast(job), submit(job).succeed()
    on_cpu = submit({**job, "args": {**CHATS, "strategy": "ddp"}, **ONE_RANK}, family="cpu", per_node=1).succeed()
    assert planned == pytest.approx(done.peak_bytes(), rel=WITHIN)
    assert len(done.losses()) == 4 and done.losses() == pytest.approx(on_cpu.losses(), rel=1e-4)
    assert len(replies(ascendrun, done)) == 2 and replies(ascendrun, done) == replies(ascendrun, on_cpu)


def test_explain_names_the_rank_whose_memory_broke_not_the_one_that_waited(submit, ascendrun):  # noqa: F811
    job = {
        "name": "meshtest",
        "program": "meshtest",
        "args": {"message_sizes": ["65536"], "max_iterations": 3, "time_per_size_s": 0.1},
        "env": {"HCCL_EXEC_TIMEOUT": "68"},
        "restart": {"max_restarts": 0},
    }
    done = submit(job, per_node=1, SPEEDUP=60, FAULTS="hbm-ecc:1@2")
    assert done.code == 1, done.said
    told = ascendrun("explain", "meshtest", "-o", "json")
    found = json.loads(told.stdout)["diagnosis"]
    assert (found["code"], found["ranks"], found["hosts"]) == ("ACL-507054", [1], ["node2"]), told.stderr


TRACKS = {
    "mode": "finetune", "prepared_dir": "/root/prepared", "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "global_batch_size": 16, "max_steps": 5, "dropout": 0, "dtype": "float32",
    "logging_steps": 1, "baselines": [], "boosted_trees": False,
}  # fmt: skip


@pytest.fixture
def tracks(submit):  # noqa: F811
    """Prepared tracks on both hosts."""
    args = {"mode": "prepare", "data_path": "generated", "synthetic_tracks": 80, "output_dir": "/root/prepared"}
    submit({"name": "prepare", "program": "trajectory", "args": args}, per_node=1).succeed()


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("fsdp2", "hsdp"))]
)
def test_a_model_that_is_trained_whole_is_planned_and_trained(strategy, submit, forecast, tracks):  # noqa: F811
    """The plan has the memory of the allocator; the losses are those of the CPU."""
    job = {"name": "tracks", "program": "trajectory", "args": {**TRACKS, "strategy": strategy}}
    planned, done = forecast(job), submit(job).succeed()
    on_cpu = submit({**job, "args": {**TRACKS, "strategy": "ddp"}, **ONE_RANK}, family="cpu", per_node=1).succeed()
    assert len(done.losses()) == 5 and done.losses() == pytest.approx(on_cpu.losses(), rel=1e-4)
    assert planned == pytest.approx(done.peak_bytes(), rel=WITHIN)
