"""Where the three golden steps start, for upstream and for the test: weights and tokens by a formula, not stored."""

from collections.abc import Sequence

import torch

MOMENTA = (0.85, 0.9, 0.95)
WORDS, LENGTH = 50, 150
"""Rows are longer than the short window of 128 tokens."""


def first_weight(number: int, shape: Sequence[int]) -> torch.Tensor:
    """Return values between -0.3 and 0.3 without a pattern that training would keep."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + 1000 * number
    return (0.3 * torch.sin(places * places * 0.37)).float().view(list(shape))


def tokens() -> torch.Tensor:
    """Return steps x micro-batches x rows x tokens."""
    places = torch.arange(3 * 2 * 2 * (LENGTH + 1))
    return ((places * places * 7 + places * 13) % 101 % WORDS).view(3, 2, 2, LENGTH + 1)
