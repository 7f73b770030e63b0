"""BigBird's sparse attention: a block of tokens attends to the blocks beside it, the first, the last and a few random
ones; the first and the last block attend to all."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch.nn import functional

from ascendrun.programs.codon.genes import Array

PAPER_LENGTHS = (1024, 3072, 4096)
"""Tokens of the sequences of BigBird's paper: their random blocks follow another rule."""
PAPER_REACH = 1024


@cache
def random_blocks(layer: int, length: int, *, heads: int, block: int, count: int, positions: int) -> torch.Tensor:
    """Return the random blocks of heads x blocks but the first and the last x count: those of transformers.

    They follow from the layer and the length alone. `positions`: the longest sequence of the model.
    """
    rng = np.random.RandomState(layer)
    rows = length // block - 2
    if length in PAPER_LENGTHS:
        chosen = [[paper_row(rng, row, block, positions)[:count] for row in range(1, positions // block - 1)]
                  for _ in range(heads)]  # fmt: skip
        return torch.from_numpy(np.array([head[:rows] for head in chosen], dtype=np.int64))
    by_row = [[near_row(rng, row, 5 + 2 * count)[:count] for _ in range(heads)] for row in range(1, rows + 1)]
    return torch.from_numpy(np.array(by_row, dtype=np.int64).swapaxes(0, 1).copy())


def near_row(rng: np.random.RandomState, row: int, reach: int) -> Array:
    """Return the blocks that a block may choose, in a random order: of the first `reach`, outside its window."""
    drawn = rng.permutation(reach)
    barred = [row - 1, row, row + 1, 0, reach - 1]
    barred += [reach - 2] * (row == 1) + [1] * (row == reach - 2)
    return drawn[~np.isin(drawn, barred)]


def paper_row(rng: np.random.RandomState, row: int, block: int, positions: int) -> Array:
    last = positions // block - 1
    reach = PAPER_REACH // block - 1 if PAPER_REACH > 2 * block else last
    allowed = np.arange(1, min(reach, last - 1) + 1)
    return rng.permutation(allowed if row >= last - 2 else allowed[abs(allowed - row) > 1])


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, real: torch.Tensor, chosen: torch.Tensor, block: int
) -> torch.Tensor:
    """Compute attention of rows x length x heads x width, the length a multiple of `block`.

    `real`: of rows x length, False for padding. `chosen`: as `random_blocks`; a block in it twice counts twice.
    """
    rows, length, heads, width = q.shape
    blocks = length // block
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    ends = functional.scaled_dot_product_attention(
        torch.cat([q[:, :, :block], q[:, :, -block:]], 2), k, v, attn_mask=real[:, None, None]
    )
    own = torch.arange(1, blocks - 1)
    window = torch.stack([torch.zeros_like(own), own - 1, own, own + 1, torch.full_like(own, blocks - 1)], 1)
    seen = torch.cat([window.expand(heads, -1, -1), chosen], 2)
    is_first = torch.ones_like(seen, dtype=torch.bool)  # beside an end of the sequence: that block counts once
    is_first[:, 0, 1] = is_first[:, -1, 3] = False
    places = (seen + blocks * torch.arange(heads)[:, None, None]).flatten().to(q.device)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        found = x.reshape(rows, heads * blocks, block, width).index_select(1, places)
        return found.view(rows * heads, blocks - 2, -1, width)

    seen, is_first = seen.to(q.device), is_first.to(q.device)
    mask = real.view(rows, blocks, block)[:, seen] & is_first[..., None]
    inner = functional.scaled_dot_product_attention(
        q[:, :, block:-block].reshape(rows * heads, blocks - 2, block, width),
        gathered(k),
        gathered(v),
        attn_mask=mask.view(rows * heads, blocks - 2, 1, -1),
    ).view(rows, heads, length - 2 * block, width)
    return torch.cat([ends[:, :, :block], inner, ends[:, :, block:]], 2).transpose(1, 2)
