"""The model: a BigBird that predicts masked codons, its sparse attention, and its inputs.

Names of weights and results are those of transformers' BigBirdForMaskedLM: with `attention_type: original_full`, and in
training with attention `block_sparse` with that: a block of tokens attends to the blocks beside it, the first, the last
and a few random ones; the first and the last block attend to all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from typing import Any, Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.context import Context
from ascendrun.programs.codon.genes import MASKS, Array
from ascendrun.programs.codon.rules import BLOCK, BLOCK_SPARSE, FULL, RANDOM_BLOCKS, sparse_from
from ascendrun.programs.devices.attention import Segments, attention
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.data import Batch, pad, seed_of
from ascendrun.text import listed

ACTIVATIONS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}
"""How each approximates GELU."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MODELLING = "modeling_codon"
"""File of the classes for transformers, in the directory of a model with a context."""


@dataclass(frozen=True)
class Config:
    """Sizes of a model, named and with the defaults as in its config.json. `type_vocab_size`: organisms.

    `context_residues`: on each side, of the table that is added to the logits; 0: there is none.
    """

    vocab_size: int = len(v.TOKENS)
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 4096
    type_vocab_size: int = len(v.ORGANISMS)
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    use_bias: bool = True
    block_size: int = BLOCK
    num_random_blocks: int = RANDOM_BLOCKS
    rescale_embeddings: bool = False
    context_residues: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Config:
        """Take the sizes from a config.json or from options. Raises InvalidDataError for sizes that do not fit."""
        known = {each.name: given[each.name] for each in fields(cls) if given.get(each.name) is not None}
        config = cls(**known)
        problems = {
            "hidden_act": config.hidden_act not in ACTIVATIONS and list(ACTIVATIONS),
            "vocab_size": config.vocab_size != len(v.TOKENS) and len(v.TOKENS),
            "hidden_size": config.hidden_size % config.num_attention_heads
            and (f"{-(-config.hidden_size // config.num_attention_heads) * config.num_attention_heads}"),
        }
        for name, expected in problems.items():
            if expected:
                raise InvalidDataError(
                    listed("program.codon-config", name=name, value=getattr(config, name), expected=expected)
                )
        return config

    def as_json(self) -> dict[str, Any]:
        """Return the content of config.json for transformers."""
        kinds: dict[str, Any] = {"model_type": "big_bird", "architectures": ["BigBirdForMaskedLM"]}
        if self.context_residues:
            classes = {"AutoConfig": "CodonConfig", "AutoModelForMaskedLM": "CodonForMaskedLM"}
            kinds = {"model_type": "codon", "architectures": [classes["AutoModelForMaskedLM"]]}
            kinds["auto_map"] = {name: f"{MODELLING}.{each}" for name, each in classes.items()}
        ends = {"sep_token_id": v.SEP, "bos_token_id": v.CLS, "eos_token_id": v.SEP}
        return {**kinds, "attention_type": "original_full", **asdict(self), **ends}


class Embeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, hidden, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.scale = math.sqrt(hidden) if config.rescale_embeddings else 1.0

    def forward(self, ids: torch.Tensor, organisms: torch.Tensor) -> torch.Tensor:
        words = self.word_embeddings(ids)
        words = words * self.scale if self.scale != 1.0 else words
        summed = (
            words + self.token_type_embeddings(organisms)[:, None] + self.position_embeddings.weight[: ids.shape[1]]
        )
        return self.LayerNorm(self.dropout(summed))  # type: ignore[no-any-return]


class Output(nn.Module):
    """A projection back to the sum of a layer, and its norm."""

    def __init__(self, inputs: int, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + before)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        names = ("query", "key", "value")
        inside = nn.ModuleDict({name: nn.Linear(hidden, hidden, bias=config.use_bias) for name in names})
        self.attention = nn.ModuleDict({"self": inside, "output": Output(hidden, config)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, inner)})
        self.output = Output(inner, config)
        self.heads = config.num_attention_heads
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        rows, length, hidden = x.shape
        inside: Any = self.attention["self"]
        q, k, values = (
            inside[name](x).view(rows, length, self.heads, hidden // self.heads) for name in ("query", "key", "value")
        )
        x = self.attention["output"](attend(q, k, values).reshape(rows, length, hidden), x)
        inner = functional.gelu(self.intermediate["dense"](x), approximate=self.activation)
        return self.output(inner, x)  # type: ignore[no-any-return]


class Predictions(nn.Module):
    """The last layers: from a position to the tokens, by the embeddings of the tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.transform = nn.ModuleDict({"dense": nn.Linear(hidden, hidden), "LayerNorm": norm})
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.transform["dense"](x), approximate=self.activation)
        return functional.linear(self.transform["LayerNorm"](x), words, self.bias)


class CodonModel(nn.Module):
    """`attention`: BLOCK_SPARSE is for long sequences in training; all others are attended to whole (FULL)."""

    def __init__(self, config: Config, *, recomputes: bool = False, attention: str = FULL) -> None:
        super().__init__()
        self.config, self.recomputes, self.attention = config, recomputes, attention
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        pooler = nn.Linear(config.hidden_size, config.hidden_size).requires_grad_(False)  # unused: kept for others
        self.bert = nn.ModuleDict(
            {"embeddings": Embeddings(config), "encoder": nn.ModuleDict({"layer": layers}), "pooler": pooler}
        )
        self.cls = nn.ModuleDict({"predictions": Predictions(config)})
        self.context = Context(config.type_vocab_size, config.context_residues) if config.context_residues else None

    @property
    def words(self) -> nn.Embedding:
        embeddings: Any = self.bert["embeddings"]
        return embeddings.word_embeddings  # type: ignore[no-any-return]

    def forward(
        self,
        ids: torch.Tensor,
        organisms: torch.Tensor,
        segments: Segments | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits of rows x length x tokens. `organisms`: of each row. `segments`: None without padding.

        `places`: of the flattened rows x length, the only ones that are computed; the result is places x tokens.
        """
        x = self.bert["embeddings"](ids, organisms)
        attend_of = self.full(segments)
        width, block = ids.shape[1], self.config.block_size
        is_long = width > sparse_from(block, self.config.num_random_blocks)
        if self.training and self.attention == BLOCK_SPARSE and is_long:
            x = functional.pad(x, (0, 0, 0, -width % block))
            attend_of = self.sparse(functional.pad(ids != v.PAD, (0, -width % block)))
        encoder: Any = self.bert["encoder"]
        for number, layer in enumerate(encoder["layer"]):
            attend = attend_of(number)
            if self.recomputes and self.training:
                x = checkpoint(layer, x, attend, use_reentrant=False)
            else:
                x = layer(x, attend)
        x = x[:, :width]
        if places is not None:
            x = x.flatten(0, 1)[places]
        logits: torch.Tensor = self.cls["predictions"](x, self.words.weight)
        return logits if self.context is None else logits + self.context(ids, organisms, places)

    def full(self, segments: Segments | None) -> Callable[[int], Attend]:
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        attend = partial(attention, causal=False, segments=segments, dropout=dropout)
        return lambda layer: attend

    def sparse(self, real: torch.Tensor) -> Callable[[int], Attend]:
        """Return the attention of each layer. `real`: False for padding, which fills the last block."""
        config = self.config
        sizes = {"heads": config.num_attention_heads, "block": config.block_size, "count": config.num_random_blocks}

        def attend_of(layer: int) -> Attend:
            chosen = random_blocks(
                layer, real.shape[1], positions=max(config.max_position_embeddings, real.shape[1]), **sizes
            )
            return partial(sparse_attention, real=real, chosen=chosen, block=config.block_size)

        return attend_of


def make_model(config: Config, *, seed: int, **given: Any) -> CodonModel:
    """Return a model with new weights, the same on all ranks: normal matrices, norms of 1, biases and context of 0.

    `given`: more arguments of CodonModel.
    """
    with torch.device("meta"):
        model = CodonModel(config, **given)
    model = model.to_empty(device="cpu")
    chance = torch.Generator().manual_seed(seed_of(seed, 21))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not name.startswith("context."):
                weight.normal_(0.0, config.initializer_range, generator=chance)
            else:
                weight.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
        model.words.weight[config.pad_token_id] = 0.0
    return model


def with_organisms(
    weights: Mapping[str, torch.Tensor], config: Config, count: int
) -> tuple[dict[str, torch.Tensor], Config]:
    """Return weights and sizes for more organisms: a new one starts from the mean of the others, without a context."""
    name, context = "bert.embeddings.token_type_embeddings.weight", "context.table.weight"
    known = weights[name]
    new = known.mean(0, keepdim=True).expand(max(0, count - len(known)), -1)
    grown = {name: torch.cat([known, new])}
    if context in weights:
        rows = len(weights[context]) // len(known) * len(new)
        grown[context] = functional.pad(weights[context], (0, 0, 0, rows))
    return {**weights, **grown}, replace(config, type_vocab_size=len(known) + len(new))


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


AS_MASK, AS_OTHER = 0.8, 0.1
"""Fractions of the selected codons that become their residue's mask token or any codon; the rest stay."""


def masked_for(options: Mapping[str, Any], ids: Array, *, key: Sequence[int]) -> tuple[Array, Array]:
    """Return (inputs, targets) of a sequence in training. With a schedule its rate is drawn up to 1, and all selected
    codons become masks, as they are in optimization: `cosine` is MaskGIT's, `uniform` that of masked diffusion. The
    rate of `full` is always 1."""
    if options["mask_schedule"] == "constant":
        return masked(ids, rate=options["mlm_probability"], key=key)
    drawn = float(np.random.default_rng([7, *key]).uniform())
    rate = {"uniform": 1.0 - drawn, "cosine": math.cos(math.pi / 2 * drawn), "full": 1.0}[options["mask_schedule"]]
    return masked(ids, rate=rate, key=key, as_mask=1.0, as_other=0.0)


def masked(
    ids: Array, *, rate: float, key: Sequence[int], as_mask: float = AS_MASK, as_other: float = AS_OTHER
) -> tuple[Array, Array]:
    """Return (inputs, targets) of a sequence: each codon is selected with probability `rate`, and is its target.

    The target of all other tokens is -1. `key` (seed, step, row) determines the result.
    """
    rng = np.random.default_rng([6, *key])
    draw = np.where(ids >= v.FIRST_CODON, rng.uniform(size=len(ids)) / rate, 1.0)
    inputs = np.where(draw < as_mask, MASKS[ids].astype(np.int64), ids)
    other = np.flatnonzero((draw >= as_mask) & (draw < as_mask + as_other))
    inputs[other] = rng.integers(v.FIRST_CODON, len(v.TOKENS), size=len(other))
    return inputs, np.where(draw < 1.0, ids, -1)


def hidden(ids: Array) -> tuple[Array, Array]:
    """Return (inputs, targets) with all codons masked: the protein alone."""
    return MASKS[ids].astype(np.int64), np.where(ids >= v.FIRST_CODON, ids, -1)


def batch_of(
    rows: Sequence[Array], made: Sequence[tuple[Array, Array]], organisms: Array, *, multiple: int = 1
) -> Batch:
    """Return the tensors of CodonModel.forward and the targets of its places, on the CPU."""
    ids = pad([inputs for inputs, _ in made], value=v.PAD, multiple=multiple)
    width = ids.shape[1]
    places = [row * width + np.flatnonzero(targets >= 0) for row, (_, targets) in enumerate(made)]
    targets = np.concatenate([targets[targets >= 0] for _, targets in made]).astype(np.int64)
    tensors = {
        "ids": ids,
        "organisms": torch.from_numpy(np.asarray(organisms, dtype=np.int64)),
        "places": torch.from_numpy(np.concatenate(places)),
        "targets": torch.from_numpy(targets),
    }
    lengths = [len(row) for row in rows]
    if min(lengths) < width:
        tensors["segments"] = Segments.of_rows([[length] for length in lengths], width)  # type: ignore[assignment]
    return Batch(tensors, weight=float(len(targets)), tokens=sum(lengths), samples=len(rows))
