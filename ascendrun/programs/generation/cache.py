"""Keys and values of the tokens that a model has seen, one row for each text, so that a pass has only the new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Protocol

import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.devices.attention import attention

MULTIPLE = 64
"""Numbers of cached tokens are rounded up to a multiple of this: fewer shapes of an attention."""


class Attends(Protocol):
    """What a model calls in each layer instead of an attention, with rows x length x heads x width of new tokens."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor: ...

    def before(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, rows x length x width, of the token before each; zeros for the first of a text. `layer`: one of
        the cache's own, which no attention has."""
        ...


Call = Callable[[torch.Tensor, torch.Tensor, Attends, torch.Tensor], torch.Tensor]
"""A model: (token ids, their positions, cache, places whose logits are kept) -> rows x kept places x vocabulary."""


def of_model(model: nn.Module) -> Call:
    """Call a torch model as `model(ids, positions=…, cache=…, keep=…)`; it returns the logits of the places `keep`."""
    return lambda ids, positions, cache, keep: model(ids, positions=positions, cache=cache, keep=keep)


def of_transformers(model: Any) -> Call:
    """Call a model of transformers, whose attention is the trainer's (`attention.register`)."""

    def call(ids: torch.Tensor, positions: torch.Tensor, cache: Attends, keep: torch.Tensor) -> torch.Tensor:
        given = {"position_ids": positions, "logits_to_keep": keep, "kv_cache": cache, "use_cache": False}
        return model(input_ids=ids, **given).logits  # type: ignore[no-any-return]

    return call


class Cache:
    """Keys and values by layer: rows x heads x capacity x width. Memory is allocated when a layer first has some."""

    def __init__(self, rows: int = 1, capacity: int = MULTIPLE) -> None:
        self.rows, self.capacity = rows, rounded(capacity)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for as many rows of as many tokens; what is cached stays."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        rows = max(rows, self.rows)
        capacity = self.capacity if capacity <= self.capacity else rounded(max(capacity, 2 * self.capacity))
        for layer, pair in self.layers.items():
            self.layers[layer] = grown(pair[0], rows, capacity), grown(pair[1], rows, capacity)
        self.rows, self.capacity = rows, capacity

    def of_layer(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.layers:
            shape = (self.rows, like.shape[2], self.capacity, like.shape[3])
            self.layers[layer] = like.new_zeros(shape), like.new_zeros(shape)
        return self.layers[layer]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another row."""
        for pair in self.layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]


@dataclass(frozen=True)
class Prefill:
    """A pass of new texts in the rows from `first` on. A row's padding comes after its tokens, which do not see it."""

    cache: Cache | None
    first: int = 0

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        if self.cache is not None:
            for cached, new in zip(self.cache.of_layer(layer, k), (k, v)):
                cached[self.first : self.first + len(new), :, : new.shape[1]] = new.transpose(1, 2)
        return attention(q, k, v, causal=True, window=window, scale=scale)

    def before(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        if self.cache is not None:
            kept = self.cache.of_layer(layer, x[:, :, None])[0]
            kept[self.first : self.first + len(x), 0, : x.shape[1]] = x
        return functional.pad(x[:, :-1], (0, 0, 1, 0))


class Decode:
    """A pass of one more token in each of the first rows. `lengths`: the tokens that are cached of each."""

    def __init__(self, cache: Cache, lengths: Sequence[int], device: torch.device) -> None:
        self.cache, self.seen = cache, min(cache.capacity, rounded(max(lengths) + 1))
        self.lengths = torch.tensor(lengths).to(device)
        self.numbers = torch.arange(len(lengths)).to(device)
        self.back = self.lengths[:, None] - torch.arange(self.seen).to(device)[None, :]
        self.unseen: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        rows, _, heads, width = q.shape
        keys, values = self.cache.of_layer(layer, k)
        keys[self.numbers, :, self.lengths], values[self.numbers, :, self.lengths] = k[:, 0], v[:, 0]
        keys, values = keys[:rows, :, : self.seen], values[:rows, :, : self.seen]
        shared = q.reshape(rows, k.shape[2], heads // k.shape[2], width)
        scores = (shared @ keys.transpose(2, 3)).float() * (width**-0.5 if scale is None else scale)
        if window not in self.unseen:
            unseen = self.back < 0
            self.unseen[window] = (unseen if window is None else unseen | (self.back >= window))[:, None, None]
        scores = scores.masked_fill(self.unseen[window], float("-inf"))
        return (torch.softmax(scores, -1).to(v.dtype) @ values).reshape(rows, 1, heads, v.shape[-1])

    def before(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        kept = self.cache.of_layer(layer, x[:, :, None])[0]
        kept[self.numbers, 0, self.lengths] = x[:, 0]
        return kept[self.numbers, 0, self.lengths - 1][:, None]


def rounded(length: int, multiple: int = MULTIPLE) -> int:
    return -(-length // multiple) * multiple


def grown(tensor: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    fresh = tensor.new_zeros((rows, tensor.shape[1], capacity, tensor.shape[3]))
    fresh[: tensor.shape[0], :, : tensor.shape[2]] = tensor
    return fresh
