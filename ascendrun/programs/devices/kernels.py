"""RMSNorm, rotary positions and SwiGLU by the NPU's fused operators, each with the formula that it replaces."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.nn import functional

from ascendrun.programs.devices import attention
from ascendrun.programs.devices.accelerator import Accelerator
from ascendrun.programs.devices.fused_ops import Operators
from ascendrun.text import Text

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
            reasons.append(
                Text("program.kernel-differs", "{name}: differs from its formula by {off:.1%}", name=name, off=off)
            )
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
