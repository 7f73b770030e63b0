"""Attention with a causal order, a window and separate samples: one function, computed by each device's own kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

NAME = "ascendrun"
"""The value of transformers' `attn_implementation`."""
BLOCK = 256
"""Queries for which the CPU makes a mask at once, where no kernel knows the window."""
MASK_SIZE = 2048
MOST_SEGMENTS = 2048
"""Of npu_fusion_attention: the side of the mask that sparse modes 2, 3 and 4 expect, and the samples of one call."""


@dataclass(frozen=True)
class Segments:
    """Samples in the same rows that do not attend to each other. A row's padding is a segment too.

    `lengths`: of the segments, in the order of the rows; their sum is rows x length. `offsets`: their starts and the
    last end, int32, on the device. Made on the CPU, so that no kernel waits for the device to know a length.
    """

    lengths: tuple[int, ...]
    offsets: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Segments:
        return cls(tuple(lengths), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]], width: int) -> Segments:
        """`rows`: the lengths of the samples of each row; `width`: of a row with its padding."""
        return cls.of([length for row in rows for length in (*row, width - sum(row)) if length])

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def to(self, device: torch.device, non_blocking: bool = False) -> Segments:
        return replace(self, offsets=self.offsets.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class Pattern:
    """Who attends to whom, and how: the arguments of `attention`."""

    causal: bool = True
    window: int | None = None
    segments: Segments | None = None
    scale: float = 1.0
    dropout: float = 0.0


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pattern], torch.Tensor]
OPAQUE: list[Callable[..., torch.Tensor]] = []
"""What compiled layers call instead of `attention`: its kernels and lengths, numbers of the host, are not compiled."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    segments: Segments | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute attention of rows x length x heads x width; several heads of `q` may share one of `k` and `v`.

    `causal`: a token attends to none after it. `window`: it attends to fewer than `window` tokens back, itself included
    (and as many ahead if not causal). Where `k` is longer than `q`, the queries are the last of its tokens.
    """
    if OPAQUE and torch.compiler.is_compiling():
        given = {"causal": causal, "window": window, "segments": segments, "scale": scale, "dropout": dropout}
        return OPAQUE[0](q, k, v, **given)
    if window is not None and window >= (k.shape[1] if segments is None else segments.longest):
        window = None
    pattern = Pattern(causal, window, segments, q.shape[-1] ** -0.5 if scale is None else scale, dropout)
    return kernel_of(q.device.type)(q, k, v, pattern)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    """The reference of all kernels: it holds every score. `how`: a Pattern."""
    pattern = Pattern(**how)
    assert not pattern.dropout
    shared, (rows, length), seen = q.shape[2] // k.shape[2], q.shape[:2], k.shape[1]
    back = torch.arange(seen - length, seen)[:, None] - torch.arange(seen)[None, :]
    sees = within(back, causal=pattern.causal, window=pattern.window).expand(rows, length, seen)
    if pattern.segments is not None:
        lengths = pattern.segments.lengths
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        sees = sees & (numbers.view(rows, length, 1) == numbers.view(rows, 1, length))
    k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    scores = torch.einsum("rqhw,rkhw->rhqk", q, k).float() * pattern.scale
    scores = scores.masked_fill(~sees[:, None].to(q.device), torch.finfo(scores.dtype).min)
    return torch.einsum("rhqk,rkhw->rqhw", torch.softmax(scores, -1).to(v.dtype), v)


def within(back: torch.Tensor, *, causal: bool, window: int | None) -> torch.Tensor:
    """Return whether a token attends to the one that is `back` tokens before it."""
    sees = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    return sees if window is None else sees & (back.abs() < window)


# --- torch's own kernels, one call a sample: on every device ---


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    if pattern.segments is None:
        return blocks(q, k, v, pattern)
    # A split has one backward operation; a slice of each sample would write a whole gradient for each.
    parts = zip(*(torch.split(x.flatten(0, 1), list(pattern.segments.lengths)) for x in (q, k, v)))
    answers = [blocks(q_one[None], k_one[None], v_one[None], pattern)[0] for q_one, k_one, v_one in parts]
    return torch.cat(answers).view(q.shape)


def blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Attend in one call, or block by block of queries where torch's kernel does not know who attends to whom."""
    causal, window = pattern.causal, pattern.window
    length, seen = q.shape[1], k.shape[1]
    shared = q.shape[2] // k.shape[2]
    # Shared heads are repeated: within torch's kernel they meant the formula, before 2.5 an error.
    k, v = (x.repeat_interleave(shared, 2) if shared > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    more: dict[str, Any] = {"scale": pattern.scale, "dropout_p": pattern.dropout}
    if (window is None or window >= seen) and (not causal or length in (1, seen)):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal and length > 1, **more).transpose(1, 2)
    answers = []
    for start, part in zip(range(0, length, BLOCK), torch.split(q, BLOCK, 2)):
        first, last = start + seen - length, start + part.shape[2] - 1 + seen - length
        low = 0 if window is None else max(0, first - window + 1)
        high = last + 1 if causal else min(seen, last + (window or seen))
        back = torch.arange(first, last + 1)[:, None] - torch.arange(low, high)[None, :]
        sees = within(back, causal=causal, window=window).to(q.device)
        answers.append(
            functional.scaled_dot_product_attention(part, k[:, :, low:high], v[:, :, low:high], attn_mask=sees, **more)
        )
    return torch.cat(answers, 2).transpose(1, 2)


# --- the kernels of devices ---


def npu_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Attend by torch_npu's operator: sparse mode 3 is causal from the last token on, 4 a band, TND has samples."""
    import torch_npu

    causal, window, segments = pattern.causal, pattern.window, pattern.segments
    given: dict[str, Any] = {"scale": pattern.scale, "keep_prob": 1.0 - pattern.dropout}
    if window is not None:
        given.update(sparse_mode=4, pre_tockens=window - 1, next_tockens=0 if causal else window - 1)
    elif causal:
        given.update(sparse_mode=3)
    if "sparse_mode" in given:
        given.update(atten_mask=compressed_mask(q.device))
    if segments is None:
        return torch_npu.npu_fusion_attention(q, k, v, q.shape[2], "BSND", **given)[0]  # type: ignore[no-any-return]
    answers = []
    for start in range(0, len(segments.lengths), MOST_SEGMENTS):
        lengths = segments.lengths[start : start + MOST_SEGMENTS]
        first = sum(segments.lengths[:start])
        q_part, k_part, v_part = (x.flatten(0, 1)[first : first + sum(lengths)] for x in (q, k, v))
        ends = list(accumulate(lengths))
        given.update(actual_seq_qlen=ends, actual_seq_kvlen=ends)
        answers.append(torch_npu.npu_fusion_attention(q_part, k_part, v_part, q.shape[2], "TND", **given)[0])
    return (answers[0] if len(answers) == 1 else torch.cat(answers)).view(q.shape)


@cache
def compressed_mask(device: torch.device) -> torch.Tensor:
    """Return the mask of sparse modes 2, 3 and 4: True above the diagonal, of one size for all lengths."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1).to(device)


def cuda_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Attend by torch's kernel of variable lengths, which knows samples and windows; else by `torch_attention`."""
    causal, window, segments = pattern.causal, pattern.window, pattern.segments
    is_plain = segments is None and window is None
    if pattern.dropout or is_plain or q.shape[1] != k.shape[1] or q.dtype == torch.float32:
        return torch_attention(q, k, v, pattern)
    from torch.nn.attention.varlen import varlen_attn

    if segments is None:
        segments = Segments.of([q.shape[1]] * len(q)).to(q.device)
    back = -1 if window is None else window - 1
    attend: Any = varlen_attn
    # Torch 2.11 has shared heads without a word for them: equal to repeated ones there, answers and gradients.
    more = {"enable_gqa": q.shape[2] != k.shape[2]} if "enable_gqa" in signature(attend).parameters else {}
    q_all, k_all, v_all = (x.flatten(0, 1) for x in (q, k, v))
    answer = attend(
        q_all,
        k_all,
        v_all,
        segments.offsets,
        segments.offsets,
        segments.longest,
        segments.longest,
        scale=pattern.scale,
        window_size=(back, 0 if causal else back),
        **more,
    )
    return answer.view(q.shape)  # type: ignore[no-any-return]


FUSED: dict[str, Kernel] = {"npu": npu_attention, "cuda": cuda_attention}
"""The kernel of each family of devices that has one of its own."""
KERNELS: dict[str, Kernel] = {}
"""The kernel in use by type of device: one whose answers agreed with the formula there. None: torch's own."""


def kernel_of(device_type: str) -> Kernel:
    return KERNELS.get(device_type, torch_attention)


def trial(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the kernel's answers to small inputs, equal on every device, in all its uses."""
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 48, heads, 64, generator=chance).to(device=device, dtype=dtype) for heads in (4, 2, 2))
    segments = Segments.of_rows([[7, 30], [1, 20, 27]], 48).to(device)
    answers = [
        kernel(q, k, v, Pattern(causal, window, each, scale=0.125))
        for causal in (True, False)
        for window in (None, 9)
        for each in (None, segments)
    ]
    return torch.stack(answers)


# --- transformers ---


def register() -> str:
    """Register with transformers. Return the value of `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, of_layer)
    return NAME


def mask_free(model: Any) -> Any:
    """Return the model, without the mask of length x length that transformers before 4.53 makes for an attention that
    it does not know."""
    for module in model.modules():
        if hasattr(module, "_update_causal_mask"):
            module._update_causal_mask = lambda *given, **named: None
    return model


def of_layer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    is_causal: bool | None = None,
    kv_cache: Any = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with transformers' signature: rows x heads x length x width. `segments` comes from the model's call, and
    `kv_cache`, which attends to the tokens of earlier passes too (generation.cache)."""
    if attention_mask is not None:
        raise ValueError(f"attention {NAME!r} has no mask; expected segments")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if kv_cache is not None:
        return kv_cache.attend(module.layer_idx, q, k, v, window=sliding_window, scale=scaling), None
    given: dict[str, Any] = {"causal": causal, "window": sliding_window, "segments": segments}
    return attention(q, k, v, **given, scale=scaling, dropout=dropout), None
