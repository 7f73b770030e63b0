"""The configurations that are measured: a Qwen2-like model, how it lies over the ranks, how it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn

from ascendrun.planner.models import LINEAR, Workload, shape_of
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.qwen_lora import base
from ascendrun.programs.qwen_lora.sft_task import forward


@dataclass(frozen=True)
class Case:
    """`pieces`: passes a step, of `rows` x `length` words each."""

    strategy: str
    dtype: str = "float32"
    lora: bool = False
    checkpointed: bool = False
    pieces: int = 1
    hidden: int = 512
    layers: int = 6
    words: int = 8000
    rows: int = 4
    length: int = 256
    ranks: int = 2

    def precision(self) -> Precision:
        return Precision(torch.float32, getattr(torch, self.dtype), False, self.dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of token ids, positions whose next token is predicted, and these tokens."""
        kept = self.length - 1
        return {"ids": (self.rows, self.length), "kept": (kept,), "targets": (self.rows, kept)}

    def config(self) -> Any:
        from transformers import Qwen2Config

        return Qwen2Config(
            vocab_size=self.words,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )

    def work(self) -> Workload:
        """Return what the planner knows of it."""
        shape = shape_of(self.config().to_dict())
        assert shape is not None
        adapters = RANK * shape.layers * sum(map(sum, shape.linear.values()))
        return Workload(
            model=shape,
            trained=adapters if self.lora else shape.weights,
            is_frozen=self.lora,
            steps=None,
            samples_per_step=self.rows,
            tokens_per_step=1.0,
            mean_length=1.0,
            micro_rows=self.rows,
            micro_length=self.length,
            micro_learned=(1 if self.lora else self.rows) * (self.length - 1),
            micro_batches=self.pieces,
            is_exact=True,
            weight_bytes_saved=0,
        )


RANK = 16
"""Of the adapters."""


CASES: dict[str, Case] = {
    "alone, float32": Case("none", ranks=1),
    "alone, bfloat16 by autocast, checkpointed": Case("none", dtype="bfloat16", checkpointed=True, ranks=1, rows=8),
    "alone, LoRA on a bfloat16 base": Case("none", dtype="bfloat16", lora=True, ranks=1),
    "alone, many words, long rows": Case("none", ranks=1, words=32000, layers=2, length=512, rows=2),
    "ddp, float32, two pieces": Case("ddp", pieces=2),
    "fsdp2, float32": Case("fsdp2"),
    "fsdp2, LoRA on a bfloat16 base": Case("fsdp2", dtype="bfloat16", lora=True),
    "zero3, float32": Case("zero3"),
    "zero3, LoRA on a bfloat16 base": Case("zero3", dtype="bfloat16", lora=True),
}


SMALL: dict[str, Case] = {
    "alone, float32": Case("none", ranks=1, hidden=256, layers=3, words=4000, rows=2),
    "alone, bfloat16 by autocast, checkpointed": Case(
        "none", dtype="bfloat16", checkpointed=True, ranks=1, hidden=256, layers=4, words=2000, rows=4
    ),
    "alone, LoRA on a bfloat16 base": Case(
        "none", dtype="bfloat16", lora=True, ranks=1, hidden=256, layers=4, words=2000
    ),
    "ddp, float32, two pieces": Case("ddp", pieces=2, hidden=256, layers=3, words=4000, rows=2),
    "fsdp2, float32": Case("fsdp2", hidden=256, layers=3, words=2000, rows=2),
    "zero3, LoRA on a bfloat16 base": Case(
        "zero3", dtype="bfloat16", lora=True, hidden=384, layers=3, words=2000, rows=2
    ),
}
"""The same kinds, small enough for every run of the tests."""


def builder(case: Case) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: Any = base.build(case.config())
        if case.checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if case.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=RANK, target_modules=list(LINEAR)))
        return model  # type: ignore[no-any-return]

    return build


def step(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return forward(model, tensors).sum()
