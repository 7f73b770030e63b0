"""A Qwen2 or Qwen3 for tracks, with a head for classes or for masked tokens; built from sizes or a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from ascendrun.programs import errors
from ascendrun.programs.devices import attention, kernels
from ascendrun.programs.devices.accelerator import Accelerator
from ascendrun.programs.devices.attention import Segments
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.tokens import Encoded, Ids
from ascendrun.programs.trajectory.trees import Trees
from ascendrun.text import Text, listed

POOLINGS = ("mean", "last")
ATTENTIONS = ("causal", "bidirectional")
FEED_FORWARD_RATIO = 8 / 3
"""Qwen2's gated feed-forward has three matrices, so a ratio of 8/3 costs as much as 4 without the gate."""


@dataclass(frozen=True)
class Sizes:
    """All data to build the model again. `config`: of transformers, with its model_type. `attention`:
    causal, each token attends to previous tokens; or bidirectional, to all tokens."""

    config: dict[str, Any]
    classes: int
    dropout: float
    pooling: str
    attention: str
    knots: Sequence[Sequence[float]] = ()
    """Quantiles of each number of a track's summary; empty: the classifier does not use the summary."""

    @property
    def numbers(self) -> int:
        """Number of values of a summary that the classifier expects."""
        return len(self.knots)

    @property
    def is_transformers(self) -> bool:
        """Whether transformers' AutoModelForSequenceClassification computes the same: it uses the last token."""
        return self.pooling == "last" and self.attention == "causal" and not self.knots


def config_of_sizes(*, words: int, hidden: int, layers: int, heads: int, max_length: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": round(hidden * FEED_FORWARD_RATIO / 8) * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": max_length,
        "attention_dropout": 0.0,  # on a CPU, attention with dropout takes three times as long, and scores the same
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
        "sliding_window": None,
    }


def config_of_folder(folder: Path, *, words: int) -> dict[str, Any]:
    """Read a Qwen2, Qwen2.5 or Qwen3 configuration. `words`: the new vocabulary size. Raises InvalidDataError."""
    file = folder / "config.json"
    if not file.is_file():
        raise InvalidDataError(listed("program.no-model-config", directory=folder))
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InvalidDataError(listed("program.config-not-json", file=file, error=error)) from error
    if config.get("model_type") not in ("qwen2", "qwen3"):
        raise InvalidDataError(listed("program.model-type", file=file, found=config.get("model_type")))
    config.pop("torch_dtype", None)
    config.pop("dtype", None)
    if not config.get("use_sliding_window"):
        config["sliding_window"] = None  # transformers 4 warns on every rank about an unused window
    config.update(
        vocab_size=words, attention_dropout=0.0, pad_token_id=0, bos_token_id=None, eos_token_id=None, use_cache=False
    )
    try:
        made_of(config)
    except Exception as error:  # various types: a field of a wrong type, inconsistent sizes
        raise InvalidDataError(
            listed("program.model-config-rejected", file=file, error=errors.in_a_line(error))
        ) from error
    return config


def made_of(config: Mapping[str, Any]) -> Any:
    """Make transformers' configuration object. Its errors pass through."""
    return AutoConfig.for_model(**config)


class Reader(nn.Module):
    """The transformer below every head: from a batch of ids, padded on the right, to one state per token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        assert sizes.attention in ATTENTIONS
        self.sizes, self.attention = sizes, sizes.attention
        make: Any = AutoModel.from_config
        made = make(made_of(sizes.config), attn_implementation=attention.register())
        self.backbone: Any = attention.mask_free(made)
        self.dropout = nn.Dropout(sizes.dropout)

    @property
    def hidden(self) -> int:
        return int(self.backbone.config.hidden_size)

    def states(self, ids: torch.Tensor, lengths: torch.Tensor, segments: Segments | None = None) -> torch.Tensor:
        """`segments`: the tracks and their padding, which a causal model never attends to; None: from `lengths`, for
        which the host waits for the device."""
        embedded, more = self.dropout(self.backbone.embed_tokens(ids)), {}
        if self.attention != "causal":
            more = {"is_causal": False, "segments": segments or segments_of(lengths, ids.shape[1]).to(ids.device)}
        states: torch.Tensor = self.backbone(inputs_embeds=embedded, **more).last_hidden_state
        return states


def fuse(model: Reader, accelerator: Accelerator, dtype: torch.dtype) -> list[Text]:
    """Replace operators of the transformer by its device's fused operators, for `dtype`; return the lines to log."""
    sound, reasons = kernels.sound_kernels(accelerator, dtype)
    replaced = kernels.fuse(model.backbone, kernels.operators_of(sound), device=accelerator.device.type)
    return [
        *(listed("program.not-fused", reason=reason) for reason in reasons),
        *([listed("program.fused", names=list(replaced))] if replaced else []),
    ]


def segments_of(lengths: torch.Tensor, width: int) -> Segments:
    """Return the tracks of a batch, one a row, and the padding of each up to `width`."""
    return Segments.of_rows([[length] for length in lengths.tolist()], width)


class Summary(nn.Module):
    """The state of a track's summary: how far each number reaches into each bin between its quantiles, then two layers.
    An unknown number reaches into none, and is marked."""

    low: torch.Tensor
    wide: torch.Tensor

    def __init__(self, knots: Sequence[Sequence[float]], hidden: int, dropout: float) -> None:
        super().__init__()
        bins = max(len(each) for each in knots) - 1
        low, wide = torch.zeros(len(knots), bins), torch.full((len(knots), bins), torch.inf)
        for i, each in enumerate(knots):
            edges = torch.tensor(each, dtype=torch.float64)
            low[i, : max(0, len(each) - 1)], wide[i, : max(0, len(each) - 1)] = edges[:-1], edges.diff()
        self.register_buffer("low", low)
        self.register_buffer("wide", wide)
        self.layers = nn.Sequential(
            nn.Linear(len(knots) * (bins + 1), hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        unknown = values.isnan().unsqueeze(-1)
        reach = ((values.nan_to_num().unsqueeze(-1) - self.low) / self.wide).clamp(0, 1).masked_fill(unknown, 0.0)
        seen = torch.cat([reach, unknown.to(reach.dtype)], -1).flatten(1)
        first: Any = self.layers[0]
        return self.layers(seen.to(first.weight.dtype))  # type: ignore[no-any-return]


class TrackClassifier(Reader):
    """Logits of each class for a batch of tracks, from their tokens and their summary. `trees`: vote with it.

    A causal model at position i depends only on tokens up to i, so the classifier uses the last token
    of the track or the mean over all of them, never position 0.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        assert sizes.pooling in POOLINGS
        self.pooling = sizes.pooling
        self.trees: Trees | None = None
        self.summary = Summary(sizes.knots, 2 * self.hidden, sizes.dropout) if sizes.knots else None
        # transformers' sequence classifiers, for which such a model is exported, have no bias.
        width = self.hidden * (3 if sizes.knots else 1)
        self.head = nn.Linear(width, sizes.classes, bias=not sizes.is_transformers)

    def forward(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        segments: Segments | None = None,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`values`: the summary of each track, NaN: unknown; None: all are unknown."""
        states = self.states(ids, lengths, segments)
        if self.pooling == "last":
            pooled = states[torch.arange(len(ids), device=ids.device), lengths - 1]
        else:
            inside = (torch.arange(ids.shape[1], device=ids.device)[None, :] < lengths[:, None]).unsqueeze(-1)
            pooled = (states * inside).sum(1) / lengths[:, None]
        pooled = self.dropout(pooled)
        if self.summary is not None:
            if values is None:
                values = torch.full((len(ids), self.sizes.numbers), torch.nan, device=ids.device)
            pooled = torch.cat([pooled, self.summary(values).to(pooled.dtype)], -1)
        return self.head(pooled)  # type: ignore[no-any-return]


class WordGuesser(Reader):
    """Logits of each token of the vocabulary, only at the requested positions: most tokens are not predicted."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        wide = self.hidden
        self.words = nn.Sequential(
            nn.Linear(wide, wide),
            nn.GELU(),
            nn.LayerNorm(wide),
            nn.Dropout(sizes.dropout),
            nn.Linear(wide, int(sizes.config["vocab_size"])),
        )

    def forward(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        segments: Segments | None = None,
    ) -> torch.Tensor:
        return self.words(self.states(ids, lengths, segments)[rows, places])  # type: ignore[no-any-return]


def make_model(sizes: Sizes, *, seed: int) -> TrackClassifier:
    """Make a model with the same weights for the same seed on every rank."""
    torch.manual_seed(seed)
    return TrackClassifier(sizes)


def make_guesser(sizes: Sizes, *, seed: int) -> WordGuesser:
    torch.manual_seed(seed)
    return WordGuesser(sizes)


def stack_values(samples: Sequence[Encoded], knots: int) -> torch.Tensor | None:
    """Return the summaries of a batch for a classifier of so many numbers; None: it has none. A text without a summary
    has unknown numbers."""
    unknown = np.full(knots, np.nan, dtype=np.float32)
    rows = [sample.values if len(sample.values) == knots else unknown for sample in samples]
    return torch.from_numpy(np.stack(rows)) if knots else None


def pad(rows: Sequence[Ids], *, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, lengths) of a batch, padded to its longest row rounded up to `multiple`: NPUs compile few shapes."""
    lengths: list[int] = [len(row) for row in rows]
    width = -(-max(lengths) // multiple) * multiple
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return torch.from_numpy(ids), torch.tensor(lengths)


def enable_gradient_checkpointing(reader: Reader) -> None:
    """Recompute activations in the backward pass instead of storing them: less memory, a third more arithmetic."""
    enable: Any = getattr(reader.backbone, "activation_checkpointing_enable", None)  # the name since transformers 5
    if enable is None:
        reader.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        enable({"use_reentrant": False})


# --- pretrained weights ---


def read_checkpoint(reader: Reader, folder: Path, vocabulary: Mapping[str, int]) -> Text:
    """Load all layers from a transformers directory. A token starts as the mean of the pieces into which the
    directory's tokenizer, if present, splits it. Return a log message. Raises InvalidDataError, InvalidWeightsError."""
    from safetensors import safe_open

    from ascendrun.programs.trainer.strategies.fsdp2 import file_of_tensor, read_into

    there = file_of_tensor(folder)
    prefix = "model." if any(name.startswith("model.layers.") for name in there) else ""
    read_into(
        reader.backbone, folder, name_in_file=lambda name: None if name.startswith("embed_tokens.") else prefix + name
    )
    pieces = word_pieces(folder, list(vocabulary))
    if pieces is None:
        return listed("program.layers-only", directory=folder)
    name = f"{prefix}embed_tokens.weight"
    with safe_open(str(folder / there[name]), framework="pt") as opened:
        table: torch.Tensor = opened.get_tensor(name)
    with torch.no_grad():
        for number, ids in enumerate(pieces):
            if ids:
                reader.backbone.embed_tokens.weight[number] = table[ids].float().mean(0)
    return listed("program.layers-and-embeddings", directory=folder)


def word_pieces(folder: Path, words: Sequence[str]) -> list[list[int]] | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # `tokenizers` raises Exception itself
        raise InvalidDataError(
            listed("program.bad-tokenizer", directory=folder, error=errors.in_a_line(error))
        ) from error
    return [list(each.ids) for each in tokenizer.encode_batch(list(words), add_special_tokens=False)]


def take_words(
    reader: Reader, weights: Mapping[str, torch.Tensor], theirs: Mapping[str, int], ours: Mapping[str, int]
) -> int:
    """Load the weights of another model, with tokens matched by name. Return the number of matched tokens."""
    own = reader.state_dict()
    kept = {name: tensor for name, tensor in weights.items() if name.startswith("backbone.") and name in own}
    embedding = "backbone.embed_tokens.weight"
    table = own[embedding].clone()
    known = [(ours[word], number) for word, number in theirs.items() if word in ours]
    for mine, other in known:
        table[mine] = kept[embedding][other]
    reader.load_state_dict({**kept, embedding: table}, strict=False)
    return len(known)
