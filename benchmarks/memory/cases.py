"""The configurations that are measured: a Qwen2-like model, how it lies over the ranks, how it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.qwen_lora import base


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
        compute = torch.float32 if self.dtype == "float32" else torch.bfloat16
        weights = torch.bfloat16 if self.dtype == "pure-bfloat16" else torch.float32
        return Precision(weights, compute, False, self.dtype)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"ids": ((self.rows, self.length), torch.int64)}


CASES: dict[str, Case] = {
    "alone, float32": Case("none", ranks=1),
    "alone, bfloat16 by autocast, checkpointed": Case("none", dtype="bfloat16", checkpointed=True, ranks=1, rows=8),
    "alone, LoRA on a bfloat16 base": Case("none", dtype="pure-bfloat16", lora=True, ranks=1),
    "alone, many words, long rows": Case("none", ranks=1, words=32000, layers=2, length=512, rows=2),
    "ddp, float32, two pieces": Case("ddp", pieces=2),
    "fsdp2, float32": Case("fsdp2"),
    "fsdp2, LoRA on a bfloat16 base": Case("fsdp2", dtype="pure-bfloat16", lora=True),
    "zero3, float32": Case("zero3"),
    "zero3, LoRA on a bfloat16 base": Case("zero3", dtype="bfloat16", lora=True),
}


SMALL: dict[str, Case] = {
    "alone, float32": Case("none", ranks=1, hidden=256, layers=3, words=4000, rows=2),
    "alone, bfloat16 by autocast, checkpointed": Case(
        "none", dtype="bfloat16", checkpointed=True, ranks=1, hidden=256, layers=4, words=2000, rows=4
    ),
    "alone, LoRA on a bfloat16 base": Case(
        "none", dtype="pure-bfloat16", lora=True, ranks=1, hidden=256, layers=4, words=2000
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
        from transformers import Qwen2Config

        config = Qwen2Config(
            vocab_size=case.words,
            hidden_size=case.hidden,
            intermediate_size=case.hidden * 11 // 4,
            num_hidden_layers=case.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
        model: Any = base.build(config)
        if case.checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if case.lora:
            from peft import LoraConfig, get_peft_model

            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            model = get_peft_model(model, LoraConfig(r=16, target_modules=targets))
        return model  # type: ignore[no-any-return]

    return build


def step(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=tensors["ids"]).logits[:, :-1]
    labels = tensors["ids"][:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
