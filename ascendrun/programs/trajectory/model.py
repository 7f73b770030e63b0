"""A Qwen2 that reads a track and says which class of ship it is; built from its sizes, without pretrained weights."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2Model

from ascendrun.programs.trajectory.tokens import Ids

POOLINGS = ("mean", "last")
FEED_FORWARD_RATIO = 8 / 3
"""Qwen2's gated feed-forward has three matrices, so 8/3 of the width costs what 4 costs an ungated one."""


class Classifier(nn.Module):
    """Logits of each class for a batch of tracks, padded on the right.

    A causal model knows at position i only what came up to i, so the classifier reads the last word
    of the track or the mean over all of them, never position 0.
    """

    def __init__(self, *, words: int, classes: int, hidden: int, layers: int, heads: int, max_length: int,
                 dropout: float, pooling: str) -> None:
        super().__init__()
        assert pooling in POOLINGS
        self.pooling = pooling
        self.backbone = Qwen2Model(Qwen2Config(
            vocab_size=words, hidden_size=hidden, intermediate_size=round(hidden * FEED_FORWARD_RATIO / 8) * 8,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=max_length, attention_dropout=dropout, pad_token_id=0, use_cache=False))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # No attention mask: a causal model never sees the padding to its right, and the fast kernel needs none.
        embedded = self.dropout(self.backbone.embed_tokens(ids))
        states = self.backbone(inputs_embeds=embedded).last_hidden_state
        if self.pooling == "last":
            pooled = states[torch.arange(len(ids), device=ids.device), lengths - 1]
        else:
            inside = (torch.arange(ids.shape[1], device=ids.device)[None, :] < lengths[:, None]).unsqueeze(-1)
            pooled = (states * inside).sum(1) / lengths[:, None]
        return self.head(self.dropout(pooled))  # type: ignore[no-any-return]


def make_model(sizes: Dict[str, Any], *, seed: int) -> Classifier:
    """The same weights for the same seed on every rank."""
    torch.manual_seed(seed)
    return Classifier(**sizes)


def pad(rows: Sequence[Ids], *, multiple: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """(ids, lengths) of a batch, padded to its longest row rounded up to `multiple`: few shapes to compile on NPUs."""
    lengths: List[int] = [len(row) for row in rows]
    width = -(-max(lengths) // multiple) * multiple
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, :len(row)] = row
    return torch.from_numpy(ids), torch.tensor(lengths)
