"""The trainings that are killed: each program, each way to hold its model, tiny."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRACKS: Mapping[str, Any] = {
    "tracks": 80,
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "batch_size": 10,
    "epochs": 9,
    "dropout": 0.2,
    "eval_every": 7,
    "log_every": 1,
    "checkpoint_every": 3,
}
ROWS: Mapping[str, Any] = {
    "rows": 120,
    "batch_size": 8,
    "max_steps": 36,
    "lr": 0.01,
    "warmup": 4,
    "cutoff_len": 128,
    "lora_r": 4,
    "lora_dropout": 0.1,
    "log_every": 1,
    "eval_every": 7,
    "samples": 1,
    "sample_tokens": 4,
    "checkpoint_every": 2,
}


@dataclass(frozen=True)
class Training:
    """`steps`: of its last training; `folders`: where its checkpoints lie below the job's checkpoint folder, one for
    each training that it does one after the other; `results`: files that must come out the same to the last byte."""

    name: str
    program: str
    arguments: Mapping[str, Any]
    steps: int
    results: Sequence[str]
    is_sharded: bool = False
    folders: Sequence[str] = ("",)


def qwen(how: str) -> Training:
    return Training(
        f"qwen_lora-{how}",
        "qwen_lora",
        {**ROWS, "how": how},
        36,
        ("adapter/adapter_model.safetensors", "samples.jsonl", "base/model.safetensors"),
        how != "ddp",
    )


PRETRAINED = ("best/pretrained.pt", "final/pretrained.pt")
ALL = {
    training.name: training
    for training in (
        Training("pretrain-masked", "trajectory", {**TRACKS, "mode": "pretrain"}, 54, PRETRAINED),
        Training(
            "pretrain-causal", "trajectory", {**TRACKS, "mode": "pretrain", "objective": "causal"}, 54, PRETRAINED
        ),
        Training(
            "finetune",
            "trajectory",
            {**TRACKS, "mode": "finetune", "freeze_epochs": 3},
            54,
            ("best/model.pt", "final/model.pt", "predictions.jsonl"),
            folders=("head", ""),
        ),
        qwen("ddp"),
        qwen("fsdp2"),
        qwen("zero3"),
    )
}
