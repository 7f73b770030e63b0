"""RMSNorm, rotary positions and SwiGLU by the NPU's fused operators, each with the formula that it replaces in the
layers of a transformers model, which are found by type."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.devices import attention
from ascendrun.programs.devices.accelerator import Accelerator
from ascendrun.text import Text, listed

TOLERANCE = 2e-2
"""Relative error, for the half precision in which the operators are checked."""


# --- the formulas ---


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

    query, x, weight, gate, up = some(2, 4, 32, 64), some(2, 32, 64), some(64), some(2, 32, 64), some(2, 32, 64)
    cos, sin = some(1, 1, 32, 64), some(1, 1, 32, 64)
    return {
        "rms_norm": (lambda: npu_rms_norm(x, weight, 1e-6), lambda: rms_norm_formula(x, weight, 1e-6)),
        "rotary": (lambda: npu_rotary(query, cos, sin), lambda: rotary_formula(query, cos, sin)),
        "swiglu": (lambda: npu_swiglu(gate, up), lambda: swiglu_formula(gate, up)),
    }


def sound_kernels(accelerator: Accelerator, dtype: torch.dtype) -> tuple[list[str], list[Text | str]]:
    """Return (operators that match their formula on this device, reasons why the others are not used). From then on
    attention on this device uses its kernel if that is one of them."""
    device, fused = accelerator.device, attention.FUSED.get(accelerator.family)
    tried: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    if fused is not None:
        tried["attention"] = (
            lambda: attention.trial(fused, device, dtype),
            lambda: attention.trial(
                lambda q, k, v, pattern: attention.formula(q, k, v, **vars(pattern)), device, dtype
            ),
        )
    if accelerator.family == "npu":
        tried.update(trials(device, dtype))
    sound: list[str] = []
    reasons: list[Text | str] = []
    for name, (operator, formula) in tried.items():
        try:
            found, wanted = operator().float().cpu(), formula().float().cpu()
        except (AttributeError, ImportError, RuntimeError, TypeError) as error:  # too old, or not for this chip
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        off = float((found - wanted).abs().max() / wanted.abs().max())
        if off <= TOLERANCE:
            sound.append(name)
        else:
            reasons.append(listed("program.kernel-differs", name=name, off=off))
    attention.KERNELS.pop(device.type, None)
    if fused is not None and "attention" in sound:
        attention.KERNELS[device.type] = fused
    return sound, reasons


# --- putting them into a transformers model ---


def operators_of(sound: list[str]) -> Operators:
    return Operators(
        norm=npu_rms_norm if "rms_norm" in sound else None,
        rotary=npu_rotary if "rotary" in sound else None,
        swiglu=npu_swiglu if "swiglu" in sound else None,
    )


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

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any, *more: Any, unsqueeze_dim: int = 1, **named: Any) -> Any:
        turn = self.operators.get(q.device.type)
        if turn is None:
            return self.original(q, k, cos, sin, *more, unsqueeze_dim=unsqueeze_dim, **named)
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
