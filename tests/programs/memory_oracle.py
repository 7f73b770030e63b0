"""Steps of the programs for the simulation, each with the planner's work of the same training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ascendrun.planner.models import LINEAR, RowsOfRanks, Workload, shape_of
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.devices.attention import Segments
from ascendrun.programs.qwen_lora import rules as chats
from ascendrun.programs.qwen_lora.base import build, checkpoint_activations, shape_config
from ascendrun.programs.qwen_lora.lora import add_lora
from ascendrun.programs.qwen_lora.sft_task import forward
from ascendrun.programs.trajectory import model as models
from ascendrun.programs.trajectory import rules as tracks
from tests.programs.simulated_step import Simulated, simulate

INT, FLOAT = torch.int64, torch.float32


@dataclass(frozen=True)
class Case:
    """`learned`: positions with a target, of each row (chats) or of all rows."""

    family: str = "cuda"
    dtype: str = "float32"
    recomputes: bool = False
    dropout: float = 0.0
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    inner: int = 344
    words: int = 2000
    rows: int = 2
    length: int = 256
    learned: int = 64

    @property
    def precision(self) -> Precision:
        return Precision(FLOAT, getattr(torch, self.dtype), False, self.dtype)


def chat_step(case: Case) -> tuple[Simulated, Workload]:
    config = shape_config(
        "tiny",
        vocab_size=case.words,
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
    )
    options = {
        "lora_r": 8, "lora_alpha": 16, "lora_dropout": case.dropout, "use_dora": False, "use_rslora": False,
        "target_modules": list(LINEAR), "global_batch_size": case.rows,
    }  # fmt: skip

    def make() -> nn.Module:
        model = build(config)
        if case.recomputes:
            checkpoint_activations(model, strategy="ddp")
        return add_lora(model, options)  # type: ignore[no-any-return]

    shapes = {
        "ids": ((case.rows, case.length), INT),
        "positions": ((case.rows, case.length), INT),
        "kept": ((case.learned,), INT),
        "targets": ((case.rows, case.learned), INT),
    }
    piece = {"rows": case.rows, "length": case.length, "kept": case.learned, "pieces": 1}
    work = chats.work_of(options, shape_of(config.to_dict()), piece, steps=1, tokens=1.0, mean=1.0)
    assert work is not None
    step = simulate(
        make, lambda model, x: forward(model, x).sum(), shapes, precision=case.precision, family=case.family
    )
    return step, work


def pretraining_step(case: Case) -> tuple[Simulated, Workload]:
    return track_step(case, mode="pretrain")


def finetuning_step(case: Case) -> tuple[Simulated, Workload]:
    return track_step(case, mode="finetune")


def track_step(case: Case, *, mode: str) -> tuple[Simulated, Workload]:
    config = models.config_of_sizes(
        words=case.words, hidden=case.hidden, layers=case.layers, heads=case.heads, max_length=case.length
    )
    knots = [[0.0] * 17] * 35
    sizes = models.Sizes(config, 7, case.dropout, "mean", "causal", knots)

    def make() -> nn.Module:
        model = models.WordGuesser(sizes) if mode == "pretrain" else models.TrackClassifier(sizes)
        if case.recomputes:
            models.enable_gradient_checkpointing(model)
        return model

    def step(model: nn.Module, x: dict[str, torch.Tensor]) -> torch.Tensor:
        segments = Segments.of([x["ids"].shape[1]] * len(x["ids"]))
        if mode == "pretrain":
            logits = model(x["ids"], x["lengths"], x["rows"], x["places"], segments)
        else:
            logits = model(x["ids"], x["lengths"], segments=segments, values=x["values"])
        return functional.cross_entropy(logits.float(), x["labels"], reduction="sum")

    learned = case.learned if mode == "pretrain" else case.rows
    shapes = {
        "ids": ((case.rows, case.length), INT),
        "lengths": ((case.rows,), INT),
        "rows": ((learned,), INT),
        "places": ((learned,), INT),
        "values": ((case.rows, 35), FLOAT),
        "labels": ((learned,), INT),
    }
    options: dict[str, Any] = {
        "mode": mode, "objective": "mlm", "mlm_probability": case.learned / case.rows / case.length,
        "global_batch_size": case.rows, "micro_batch_size": 0, "max_tokens_per_micro_batch": 0,
        "pad_to_multiple_of": 1,
    }  # fmt: skip
    shape = tracks.shape_of_config(config, mode=mode, classes=7, numbers=35, bins=16)
    work = tracks.work_of(options, shape, RowsOfRanks(1, case.family, 1, 1.0, case.length))
    assert work is not None
    return simulate(make, step, shapes, precision=case.precision, family=case.family), work
