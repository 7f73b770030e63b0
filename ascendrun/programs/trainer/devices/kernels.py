"""Attention, RMSNorm, rotary positions, SwiGLU by the NPU's fused operators, each with the formula that it replaces."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.trainer.devices.accelerator import Accelerator
from ascendrun.programs.trainer.devices.fused_ops import Operators
from ascendrun.text import Text

ATTENTION_NAME = "ascendrun_npu"
TOLERANCE = 2e-2
"""Relative error, for the half precision in which the operators are checked."""


# --- the formulas; every tensor of attention is rows x heads x length x width ---


def attention_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None, *, scale: float
) -> torch.Tensor:
    """Compute attention. `hidden`: True where a token must not attend; None: nowhere. Key heads may be shared."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1).to(value.dtype) @ value


def rms_norm_formula(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotary_formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each half of the width with the other half."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def swiglu_formula(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


# --- the operators ---


def npu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    import torch_npu

    answer = torch_npu.npu_fusion_attention(
        query, key, value, query.shape[1], "BNSD", atten_mask=hidden, scale=scale, keep_prob=1.0 - dropout
    )
    return answer[0]  # type: ignore[no-any-return]


def npu_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    import torch_npu

    return torch_npu.npu_rms_norm(x, weight, epsilon=epsilon)[0]  # type: ignore[no-any-return]


def npu_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    import torch_npu

    return torch_npu.npu_rotary_mul(x, cos, sin)  # type: ignore[no-any-return]


def npu_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    import torch_npu

    return torch_npu.npu_swiglu(torch.cat((gate, up), -1), dim=-1)  # type: ignore[no-any-return]


def trials(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return {name: (operator, formula)} on small shapes, with inputs from the CPU: equal values on every device."""
    chance = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance).to(device=device, dtype=dtype)

    query, key, value = some(2, 4, 32, 64), some(2, 2, 32, 64), some(2, 2, 32, 64)
    hidden = torch.ones(32, 32, dtype=torch.bool).triu(1).expand(2, 1, 32, 32).contiguous().to(device)
    x, weight, gate, up, cos, sin = (
        some(2, 32, 64),
        some(64),
        some(2, 32, 64),
        some(2, 32, 64),
        some(1, 1, 32, 64),
        some(1, 1, 32, 64),
    )
    return {
        "attention": (
            lambda: npu_attention(query, key, value, hidden, scale=0.125),
            lambda: attention_formula(query, key, value, hidden, scale=0.125),
        ),
        "rms_norm": (lambda: npu_rms_norm(x, weight, 1e-6), lambda: rms_norm_formula(x, weight, 1e-6)),
        "rotary": (lambda: npu_rotary(query, cos, sin), lambda: rotary_formula(query, cos, sin)),
        "swiglu": (lambda: npu_swiglu(gate, up), lambda: swiglu_formula(gate, up)),
    }


def sound_kernels(accelerator: Accelerator, dtype: torch.dtype) -> tuple[list[str], list[Text | str]]:
    """Return (operators that match their formula on this device, reasons why the others are not used)."""
    if accelerator.family != "npu":
        return [], []
    sound: list[str] = []
    reasons: list[Text | str] = []
    for name, (operator, formula) in trials(accelerator.device, dtype).items():
        try:
            found, wanted = operator().float().cpu(), formula().float().cpu()
        except (AttributeError, RuntimeError) as error:  # not in an older torch_npu, or unsupported by the chip
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        off = float((found - wanted).abs().max() / wanted.abs().max())
        if off <= TOLERANCE:
            sound.append(name)
        else:
            reasons.append(
                Text("program.kernel-differs", "{name}: differs from its formula by {off:.1%}", name=name, off=off)
            )
    return sound, reasons


# --- putting them into a transformers model ---


def attention_implementation(sound: list[str]) -> str:
    """Return the value of `attn_implementation=`: sdpa, or the fused attention, registered here with transformers."""
    if "attention" not in sound:
        return "sdpa"
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_of_layer)
    return ATTENTION_NAME


def attention_of_layer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with transformers' signature: rows x length x heads x width. A mask is additive or boolean."""
    length, seen = query.shape[2], key.shape[2]
    if attention_mask is None:
        square = torch.ones(length, seen, dtype=torch.bool, device=query.device)
        hidden = square.triu(1 + seen - length)[None, None] if getattr(module, "is_causal", True) else None
    else:
        mask = attention_mask[..., :seen]
        hidden = ~mask if mask.dtype == torch.bool else mask < 0
    if hidden is not None:
        hidden = hidden.expand(query.shape[0], 1, length, seen).contiguous()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    answer = npu_attention(query, key, value, hidden, scale=scale, dropout=dropout)
    return answer.transpose(1, 2).contiguous(), None


def operators_of(sound: list[str]) -> Operators:
    return Operators(
        norm=npu_rms_norm if "rms_norm" in sound else None,
        rotary=npu_rotary if "rotary" in sound else None,
        swiglu=npu_swiglu if "swiglu" in sound else None,
    )
