"""Keys and values of the tokens that a model has seen, one row for each text, so that a pass has only the new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

import torch
from torch import Tensor, nn
from torch.nn import functional

from ascendrun.programs.devices.attention import attention

MULTIPLE = 64
"""Numbers of cached tokens are rounded up to a multiple of this: fewer shapes of an attention."""


def of_model(model: nn.Module) -> Call:
    """Call a torch model as `model(ids, positions=…, cache=…, keep=…)`; it returns the logits of the places `keep`."""
    return lambda ids, positions, cache, keep: model(ids, positions=positions, cache=cache, keep=keep)


def of_transformers(model: Any) -> Call:
    """Call a model of transformers, whose attention is the trainer's (`attention.register`)."""

    def call(ids: Tensor, positions: Tensor, cache: Attends, keep: Tensor) -> Tensor:
        given = {"position_ids": positions, "logits_to_keep": keep, "kv_cache": cache, "use_cache": False}
        return model(input_ids=ids, **given).logits  # type: ignore[no-any-return]

    return call


class Cache:
    """Keys and values by layer: rows x heads x capacity x width. Memory is allocated when a layer first has some."""

    def __init__(self, rows: int = 1, capacity: int = MULTIPLE) -> None:
        self.rows, self.capacity = rows, rounded(capacity)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for as many rows of as many tokens; what is cached stays."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        rows = max(rows, self.rows)
        capacity = self.capacity if capacity <= self.capacity else rounded(max(capacity, 2 * self.capacity))
        for layer, pair in self.layers.items():
            self.layers[layer] = grown(pair[0], rows, capacity), grown(pair[1], rows, capacity)
        self.rows, self.capacity = rows, capacity

    def of_layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
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
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None
    ) -> Tensor:
        """Attend in a layer, with rows x length x heads x width of new tokens: what a model calls in place of
        `attention`."""
        if self.cache is not None:
            for cached, new in zip(self.cache.of_layer(layer, k), (k, v)):
                cached[self.first : self.first + len(new), :, : new.shape[1]] = new.transpose(1, 2)
        return attention(q, k, v, causal=True, window=window, scale=scale)

    def before(self, layer: int, x: Tensor) -> Tensor:
        """Return `x`, rows x length x width, of the token before each; zeros for the first of a text. `layer`: one of
        the cache's own, which no attention has."""
        if self.cache is not None:
            kept = self.cache.of_layer(layer, x[:, :, None])[0]
            kept[self.first : self.first + len(x), 0, : x.shape[1]] = x
        return functional.pad(x[:, :-1], (0, 0, 1, 0))


class Decode:
    """A pass of one more token in each of the first rows. `lengths`: the tokens that are cached of each.

    `multiple`: numbers of tokens that are attended to are rounded up to it. 1: each new shape is as fast as an old one,
    and rows of one length attend to views of what they see, without a mask.
    """

    def __init__(self, cache: Cache, lengths: Sequence[int], device: torch.device, multiple: int = 1) -> None:
        self.cache, self.is_exact, longest = cache, multiple == 1, max(lengths)
        self.seen = min(cache.capacity, rounded(longest + 1, multiple))
        self.back: Tensor | None = None
        self.masks: dict[int | None, Tensor] = {}
        self.rows: Any = slice(len(lengths))
        self.at: Any = longest
        """With `rows`: the place of the new token in the cache."""
        if not self.is_exact or min(lengths) < longest:
            self.rows, self.at = torch.arange(len(lengths)).to(device), torch.tensor(lengths).to(device)
            self.back = self.at[:, None] - torch.arange(self.seen).to(device)[None, :]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None
    ) -> Tensor:
        rows, _, heads, width = q.shape
        keys, values = self.cache.of_layer(layer, k)
        keys[self.rows, :, self.at], values[self.rows, :, self.at] = k[:, 0], v[:, 0]
        first = max(0, self.seen - window) if self.back is None and window is not None else 0
        keys, values = keys[:rows, :, first : self.seen], values[:rows, :, first : self.seen]
        shared = q.reshape(rows, k.shape[2], heads // k.shape[2], width)
        scale, mask = width**-0.5 if scale is None else scale, self.mask(window)
        if self.is_exact:
            found = functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask, scale=scale)
        else:
            assert mask is not None
            scores = ((shared @ keys.transpose(2, 3)).float() * scale).masked_fill(mask, float("-inf"))
            found = torch.softmax(scores, -1).to(v.dtype) @ values
        return found.reshape(rows, 1, heads, v.shape[-1])

    def mask(self, window: int | None) -> Tensor | None:
        """Return rows x 1 x 1 x tokens: True for a token that the row sees where `is_exact`, else for one that it does
        not, as `attend` has use for it. None: each row sees all tokens."""
        if self.back is not None and window not in self.masks:
            sees = self.back >= 0 if window is None else (self.back >= 0) & (self.back < window)
            self.masks[window] = (sees if self.is_exact else ~sees)[:, None, None]
        return self.masks.get(window)

    def before(self, layer: int, x: Tensor) -> Tensor:
        kept = self.cache.of_layer(layer, x[:, :, None])[0]
        kept[self.rows, 0, self.at] = x[:, 0]
        return kept[self.rows, 0, self.at - 1][:, None]


Attends = Union[Prefill, Decode]
Call = Callable[[Tensor, Tensor, Attends, Tensor], Tensor]
"""A model: (token ids, their positions, cache, places whose logits are kept) -> rows x kept places x vocabulary."""


def rounded(length: int, multiple: int = MULTIPLE) -> int:
    return -(-length // multiple) * multiple


def grown(tensor: Tensor, rows: int, capacity: int) -> Tensor:
    fresh = tensor.new_zeros((rows, tensor.shape[1], capacity, tensor.shape[3]))
    fresh[: tensor.shape[0], :, : tensor.shape[2]] = tensor
    return fresh
