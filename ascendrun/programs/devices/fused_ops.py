"""Replacement of the operators in the layers of a transformers model by a device's own; layers are found by type."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn

Formula = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Operators:
    """None: the model's own. `norm` (x, weight, epsilon); `rotary` (x, cos, sin); `swiglu` (gate, up)."""

    norm: Formula | None = None
    rotary: Formula | None = None
    swiglu: Formula | None = None


def fuse(model: nn.Module, operators: Operators, *, device: str) -> list[str]:
    """Replace the model's norms, positions and feed-forwards by these operators, where a layer is of the type that they
    compute. Return names of replacements. `device`: the type of device (`npu`, `cpu`) that will hold the model."""
    replaced: dict[str, int] = {}
    for module in model.modules():
        kind = type(module).__name__
        if operators.norm and kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(_norm_forward(operators.norm), module)
        elif operators.swiglu and is_swiglu(module):
            module.forward = types.MethodType(_swiglu_forward(operators.swiglu), module)
        else:
            continue
        replaced[kind] = replaced.get(kind, 0) + 1
    if operators.rotary:
        for home in {type(module).__module__ for module in model.modules()}:
            code: Any = sys.modules[home]
            if home.startswith("transformers.models.") and hasattr(code, "apply_rotary_pos_emb"):
                if not isinstance(code.apply_rotary_pos_emb, RotaryByDevice):
                    code.apply_rotary_pos_emb = RotaryByDevice(code.apply_rotary_pos_emb)
                code.apply_rotary_pos_emb.operators[device] = operators.rotary
                replaced["apply_rotary_pos_emb"] = 1
    return [f"{name} x {count}" for name, count in sorted(replaced.items())]


def is_swiglu(module: nn.Module) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(hasattr(module, name) for name in parts) and "silu" in type(module.act_fn).__name__.lower()


class RotaryByDevice:
    """transformers' `apply_rotary_pos_emb`, a function that all models of one class share, on any device:
    it calls the operator for the tensors' device, or the original function."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.operators: dict[str, Formula] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *more: Any,
        unsqueeze_dim: int = 1,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turn = self.operators.get(q.device.type)
        if turn is None:
            return self.original(q, k, cos, sin, *more, unsqueeze_dim=unsqueeze_dim, **named)  # type: ignore[no-any-return]
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return turn(q, cos, sin), turn(k, cos, sin)


def _norm_forward(norm: Formula) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return norm(hidden_states, module.weight, module.variance_epsilon)

    return forward


def _swiglu_forward(swiglu: Formula) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-any-return]

    return forward
