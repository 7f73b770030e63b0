"""Every program, every way to hold its model and every launcher, as family npu on two hosts of two cards: the
losses are those of the same job on the CPU over gloo. It takes half an hour and more: bin/test --thorough, or

    .venv-npu/bin/python -m pytest tests/npu/test_matrix.py --thorough
"""

import json
import time
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import (  # noqa: F401  # fixtures
    ascendrun,
    cluster,
    machine_left_as_found,
    no_leftovers,
    start_cluster,
)
from tests.npu.two_hosts import CARDS, Done, submit, write_job  # noqa: F401
from tests.programs.conftest import REPO

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

LAUNCHERS = {"spawn": 2, "torchrun": 2, "deepspeed": 2, "none": 1}
"""Ranks that each starts on a node."""
QWEN = {
    "data_path": "generated",
    "synthetic_samples": 120,
    "global_batch_size": 8,
    "max_steps": 6,
    "learning_rate": 0.001,
    "warmup_steps": 2,
    "cutoff_len": 128,
    "lora_r": 4,
    "logging_steps": 1,
    "eval_steps": 0,
    "num_sample_prompts": 1,
    "max_new_tokens": 4,
    "dtype": "float32",
    "lora_dropout": 0.0,
}
TRAJECTORY = {
    "data_path": "generated",
    "synthetic_tracks": 80,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "global_batch_size": 10,
    "num_train_epochs": 2,
    "logging_steps": 1,
    "dropout": 0.0,
    "dtype": "float32",
}
MESHTEST = {
    "message_sizes": ["65536"],
    "max_iterations": 3,
    "time_per_size_s": 0.1,
    "matmul_s": 0.01,
    "matmul_size": 128,
}


def shipped(file, **args):
    """A job file of this checkout, made small."""
    job = yaml.safe_load((REPO / "jobs" / file).read_text())
    kept = {
        name: value for name, value in job["args"].items() if not (name == "warmup_ratio" and "warmup_steps" in args)
    }
    return {**job, "args": {**kept, **args}}


CASES = {
    "qwen_lora-ddp": shipped("qwen-tiny.yaml", **QWEN, strategy="ddp"),
    "qwen_lora-fsdp2": shipped("qwen-tiny.yaml", **QWEN, strategy="fsdp2"),
    "qwen_lora-zero3": shipped("qwen-tiny.yaml", **QWEN, strategy="zero3"),
    "trajectory-ddp": shipped("quickstart.yaml", **TRAJECTORY),
    "script-ddp": {
        "name": "script",
        "command": ["python", "train.py", "--epochs", "6"],
        "workdir": {"path": str(REPO / "templates" / "script")},
    },
}


@pytest.fixture(scope="module")
def module_cluster():
    """Two hosts, with room for what all jobs of this file leave there."""
    with start_cluster(2, disk="1G") as made:
        yield made


@pytest.fixture(scope="module")
def references():
    """What was computed on the CPU, by job and ranks on a node."""
    return {}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_cpu(case, launcher, submit, references, table):  # noqa: F811
    ranks = LAUNCHERS[launcher]
    # What a bundled program computes does not depend on how many ranks do it.
    same = case, ranks if case == "script-ddp" else CARDS
    if same not in references:
        references[same] = submit(CASES[case], family="cpu", per_node=same[1]).succeed().losses()
    began_s = time.monotonic()
    found = submit({**CASES[case], "launcher": launcher}).succeed().losses()
    wanted = references[same]
    assert found.keys() == wanted.keys() and len(found) >= 6
    off = max(abs(found[step] - wanted[step]) / abs(wanted[step]) for step in wanted)
    table.append((case, launcher, 2 * ranks, len(found), f"{off:.1e}", f"{time.monotonic() - began_s:.0f} s"))
    assert off < 1e-4


def test_the_job_for_two_servers_runs_as_it_is_shipped_but_small(submit, table):  # noqa: F811
    """In bfloat16, activations made anew, the way chosen by memory."""
    kept = (
        "synthetic_samples",
        "global_batch_size",
        "max_steps",
        "learning_rate",
        "warmup_steps",
        "cutoff_len",
        "logging_steps",
        "lora_dropout",
    )
    job = shipped("qwen32b.yaml", **{name: QWEN[name] for name in kept}, base_model="", data_path="generated")
    del job["setup"], job["checkpoint"]["dir"]
    cpu = {**job, "args": {**job["args"], "dtype": "bfloat16"}}
    wanted = submit(cpu, family="cpu").succeed().losses()
    began_s = time.monotonic()
    done = submit(job).succeed()
    assert "bfloat16: supported by Ascend910B3" in done.said
    found = done.losses()
    assert found.keys() == wanted.keys() and len(found) == QWEN["max_steps"]
    off = max(abs(found[step] - wanted[step]) / wanted[step] for step in wanted)
    table.append(("qwen32b.yaml, bf16", "spawn", 4, len(found), f"{off:.1e}", f"{time.monotonic() - began_s:.0f} s"))
    assert off < 5e-3


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_devices_and_links_are_measured(launcher, submit, references, table):  # noqa: F811
    """Every rank multiplies right: the digest of exact sums is that of the CPU."""
    ranks = LAUNCHERS[launcher]
    job = {"name": "meshtest", "program": "meshtest", "args": MESHTEST}
    if "digest" not in references:
        lines = submit(job, family="cpu", per_node=1).succeed().metrics()
        (references["digest"],) = {line["digest"] for line in lines if line.get("measured") == "device"}
    began_s = time.monotonic()
    lines = submit({**job, "launcher": launcher}).succeed().metrics()
    measured = {line["measured"] for line in lines if "measured" in line}
    assert measured == ({"device", "rail", "mesh"} if ranks == 2 else {"device", "mesh"})
    assert [line["digest"] for line in lines if line.get("measured") == "device"] == [references["digest"]] * ranks
    table.append(("meshtest", launcher, 2 * ranks, "", "equal", f"{time.monotonic() - began_s:.0f} s"))


@pytest.fixture
def pipeline(submit, cluster, ascendrun):  # noqa: F811
    """pipeline(family): (losses by stage, the report on test ships, predicted classes) of the trajectory's stages."""

    def run(family):
        job = shipped("trajectory.yaml", **TRAJECTORY)
        for stage in job["stages"]:
            stage["args"].pop("num_train_epochs", None)
            if stage["name"] == "pretrain":
                stage["args"].pop("pretraining")  # all generated tracks have a class
        done = submit({**job, "name": f"stages-{family}"}, family=family).succeed()
        by_stage = {
            stage["name"]: Done(0, "", done.spool.with_name(f"{done.spool.name}-{number}")).losses()
            for number, stage in enumerate(job["stages"], start=1)
        }
        (report,) = Path(cluster.path("node1", "/root/.ascendrun")).rglob(
            f"*{done.spool.name}*/**/evaluate/report.json"
        )
        lines = (report.parents[1] / "predict" / "predictions.jsonl").read_text().splitlines()
        return by_stage, json.loads(report.read_text())["test"], [json.loads(line)["class_name"] for line in lines]

    return run


def test_every_stage_of_the_trajectory_pipeline_makes_what_it_makes_on_the_cpu(pipeline, table):
    wanted, wanted_report, wanted_classes = pipeline("cpu")
    began_s = time.monotonic()
    found, report, classes = pipeline("npu")
    off = {
        stage: max((abs(found[stage][step] - loss) / loss for step, loss in losses.items()), default=0.0)
        for stage, losses in wanted.items()
    }
    assert [stage for stage, losses in wanted.items() if losses] == ["pretrain", "finetune", "plain"]
    table.append(
        (
            "trajectory-stages",
            "spawn",
            4,
            sum(map(len, wanted.values())),
            f"{max(off.values()):.1e}",
            f"{time.monotonic() - began_s:.0f} s",
        )
    )
    assert max(off.values()) < 1e-4, off
    assert report["confusion"] == wanted_report["confusion"]
    assert classes == wanted_classes and len(classes) > 5
