"""The trainings that are killed: each program, each way to hold its model, tiny."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRACKS: Mapping[str, Any] = {
    "data_path": "generated",
    "synthetic_tracks": 80,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "global_batch_size": 10,
    "num_train_epochs": 9,
    "dropout": 0.2,
    "eval_steps": 7,
    "logging_steps": 1,
    "save_steps": 3,
}
ROWS: Mapping[str, Any] = {
    "data_path": "generated",
    "synthetic_samples": 120,
    "global_batch_size": 8,
    "max_steps": 36,
    "learning_rate": 0.01,
    "warmup_steps": 4,
    "cutoff_len": 128,
    "lora_r": 4,
    "lora_dropout": 0.1,
    "logging_steps": 1,
    "eval_steps": 7,
    "num_sample_prompts": 1,
    "max_new_tokens": 4,
    "save_steps": 2,
}


@dataclass(frozen=True)
class Training:
    """`steps`: of its last training; `folders`: where its checkpoints lie below the job's checkpoint folder, one for
    each training that it does one after the other; `results`: files that must come out the same to the last byte.
    Without a `program` it is the script of this directory."""

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
        {**ROWS, "strategy": how},
        36,
        ("adapter/adapter_model.safetensors", "samples.jsonl", "base/model.safetensors"),
        how != "ddp",
    )


PRETRAINED = ("best/pretrained.pt", "final/pretrained.pt")
ALL = {
    training.name: training
    for training in (
        Training("pretrain-masked", "trajectory", {**TRACKS, "mode": "pretrain"}, 54, PRETRAINED),
        Training("pretrain-causal", "trajectory", {**TRACKS, "mode": "pretrain", "objective": "clm"}, 54, PRETRAINED),
        Training(
            "finetune",
            "trajectory",
            {**TRACKS, "mode": "finetune", "baselines": [], "boosted_trees": False, "freeze_backbone_epochs": 3},
            54,
            ("best/model.pt", "final/model.pt", "predictions.jsonl"),
            folders=("head", ""),
        ),
        qwen("ddp"),
        qwen("fsdp2"),
        qwen("zero3"),
    )
}
