"""RMSNorm and rotary positions on a CPU in fewer memory passes, backward too, with the results of the model's own code.

In a library's code they are a dozen small operations, each of which reads and writes all activations.
"""

from __future__ import annotations

from typing import Any

import torch

from ascendrun.programs.devices.fused_ops import Operators
from ascendrun.programs.devices.kernels import rms_norm_formula


class RmsNorm(torch.autograd.Function):
    """x / rms(x) * weight, over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        answer: torch.Tensor = (x * inverse).mul_(weight)
        return answer

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        grad, width = grads[0], x.shape[-1]
        products = (grad * x).reshape(-1, width)
        of_weight = inverse.reshape(-1) @ products
        slope = (products @ weight).reshape(inverse.shape).mul_(inverse.pow(3)).div_(-width)
        return (grad * weight).mul_(inverse).addcmul_(x, slope), of_weight, None


class Rotary(torch.autograd.Function):
    """Rotation of each half of the width with the other half; backward rotates in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grads[0], cos, sin, -1.0), None, None


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float) -> torch.Tensor:
    """Rotate. The two halves of `cos` are equal, and so are those of `sin`."""
    half = x.shape[-1] // 2
    answer = x * cos
    answer[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    answer[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return answer


def cpu_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    if x.dtype != weight.dtype or x.dtype != torch.float32:
        return rms_norm_formula(x, weight, epsilon)
    return RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return,no-untyped-call]


def cpu_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return Rotary.apply(x, cos, sin)  # type: ignore[no-any-return,no-untyped-call]


OPERATORS = Operators(norm=cpu_rms_norm, rotary=cpu_rotary)
