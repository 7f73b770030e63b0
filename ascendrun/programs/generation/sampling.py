"""The next token of each row: the most likely one, or one drawn by its probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NOT_FINITE = -1
"""The token of a row whose logits are inf or NaN."""
SMALLEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0: the most likely token. `top_k`: only the k most likely, 0: all. `top_p`: only the most likely
    ones that together have this probability. `seed`: of this text; its tokens do not depend on other rows."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def choose(logits: torch.Tensor, settings: Sequence[Sampling], chances: Sequence[float]) -> torch.Tensor:
    """Return a token for each row of `logits`. `chances`: a number from 0 to 1 for each row, which decides."""
    logits = logits.float()
    best = logits.argmax(-1)
    if any(each.temperature > 0 for each in settings):
        drawn = draw(logits, settings, chances)
        is_greedy = torch.tensor([each.temperature <= 0 for each in settings]).to(logits.device)
        best = torch.where(is_greedy, best, drawn)
    return torch.where(torch.isfinite(logits.sum(-1)), best, torch.full_like(best, NOT_FINITE))


def draw(logits: torch.Tensor, settings: Sequence[Sampling], chances: Sequence[float]) -> torch.Tensor:
    """Draw from the distribution's inverse: the first token up to which the probabilities sum to the row's chance."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(logits.device)[:, None]

    scaled = logits / column([each.temperature if each.temperature > 0 else 1.0 for each in settings])
    if any(each.top_k or each.top_p < 1 for each in settings):
        size = logits.shape[-1]
        only_k = all(0 < each.top_k < size for each in settings)
        ordered = scaled.topk(max(each.top_k for each in settings) if only_k else size, -1).values
        places = torch.arange(ordered.shape[-1]).to(logits.device)[None, :]
        is_out = places >= column([each.top_k or size for each in settings])
        probabilities = torch.softmax(ordered.masked_fill(is_out, float("-inf")), -1)
        before = probabilities.cumsum(-1) - probabilities  # of the tokens that are more likely
        is_out |= (before >= column([each.top_p if each.top_p < 1 else 2.0 for each in settings])) & (places > 0)
        least = ordered.masked_fill(is_out, float("inf")).amin(-1, keepdim=True)
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    sums = torch.softmax(scaled, -1).cumsum(-1)
    wanted = (column(chances) * sums[:, -1:]).clamp(min=SMALLEST)  # above 0: a first token without any is not drawn
    return torch.searchsorted(sums, wanted)[:, 0]
