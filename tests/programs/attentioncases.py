"""All uses of attention, for every device that is tested: {name: (causal, window, rows of segments, shared heads)}."""

from itertools import product
from typing import Any, Callable

import torch

from ascendrun.programs.devices.attention import Segments, attention, formula

LENGTH = 40
ROWS = ((7, 23), (40,), (1, 1, 30))
"""Lengths of the samples of each row; the rest of a row is padding."""
CASES = {
    f"{'causal' if causal else 'both sides'}, window {window}, {'samples' if packed else 'rows'}, {shared} to a key": (
        causal,
        window,
        packed,
        shared,
    )
    for causal, window, packed, shared in product((True, False), (None, 1, 9, 39), (False, True), (1, 2, 4))
}


def segments() -> Segments:
    return Segments.of_rows(ROWS, LENGTH)


def inputs(shared: int, dtype: torch.dtype = torch.float32, *, length: int = LENGTH) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    shapes = [(len(ROWS), length, 4, 16), *[(len(ROWS), LENGTH, 4 // shared, 16)] * 2]
    return [torch.randn(shape, generator=chance).to(dtype) for shape in shapes]


def answers(use: Callable[..., torch.Tensor], tensors: list[torch.Tensor], **given: Any) -> list[torch.Tensor]:
    """Return the answer and the gradients of a weighted sum of it, on the CPU in float32."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    answer = use(*leaves, **given)
    weight = torch.randn(answer.shape, generator=torch.Generator().manual_seed(4))
    (answer.float() * weight.to(answer.device)).sum().backward()
    return [answer.detach().float().cpu(), *(x.grad.float().cpu() for x in leaves if x.grad is not None)]


def largest_difference(case: str, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest difference of answer and gradients from the formula in float32, relative to the largest of
    each, or to 1."""
    causal, window, packed, shared = CASES[case]
    tensors = inputs(shared, dtype)
    given: dict[str, Any] = {"causal": causal, "window": window, "scale": 0.3}
    here = segments() if packed else None
    wanted = answers(formula, [x.float() for x in tensors], segments=here, **given)
    found = answers(attention, [x.to(device) for x in tensors], segments=here and here.to(device), **given)
    return max(
        float((one - other).abs().max() / max(1.0, float(other.abs().max()))) for one, other in zip(found, wanted)
    )
