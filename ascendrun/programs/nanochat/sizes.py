"""Sizes of the program nanochat from its dials, the batch, length and rates that follow from them, and its work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ascendrun.planner.models import Shape, Workload

VOCABULARY_MULTIPLE = 64
WINDOW_MULTIPLE = 128
VE_GATE_CHANNELS, SMEAR_CHANNELS = 12, 24
REFERENCE_DEPTH, REFERENCE_BATCH = 12, 1 << 19
"""The model whose rates were tuned, and the tokens of its steps; other depths are scaled from it."""
BATCH_EXPONENT = 0.383
"""The best batch grows with the tokens of the training to this power (arXiv 2505.13738)."""
SPECIAL = (
    "<|bos|>", *(f"<|{who}_{end}|>" for who in ("user", "assistant", "python", "output") for end in ("start", "end")),
)  # fmt: skip
"""Tokens that every tokenizer has, the last ones, in this order."""
ON_CHATS = ("mid", "sft", "rl")
"""Stages that train a model of an earlier stage on conversations."""
INHERITED: Mapping[str, Any] = {
    "max_seq_len": 2048,
    "total_batch_size": 0,
    "embedding_lr": 0.3,
    "unembedding_lr": 0.008,
    "matrix_lr": 0.02,
    "scalar_lr": 0.5,
}
"""Options that a stage on conversations takes from the model's own training, and their defaults in base."""
OF_STAGE: Mapping[str, tuple[Any, Any, Any]] = {
    "warmup_steps": (40, 0, 0),
    "warmdown_ratio": (0.65, 0.5, 1.0),
    "final_lr_frac": (0.05, 0.0, 0.0),
    "init_lr_frac": (1.0, 0.8, 0.05),
    "num_samples": (1, 1, 16),
    "temperature": (0.6, 0.6, 1.0),
}
"""Defaults in base and in modes that do not train, in mid and sft, and in rl."""
RL_QUESTIONS = 16
"""Questions of a step of rl, if none are given."""


def settled(options: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options with their defaults. `config`: of the model that a stage on conversations starts from."""
    before = (config or {}).get("training") or {}
    found = {**dict.fromkeys((*INHERITED, *OF_STAGE)), **options}
    is_on_chats = options.get("mode") in ON_CHATS
    for name, default in INHERITED.items():
        if found[name] is None or (name == "total_batch_size" and not found[name]):
            found[name] = before.get(name, default) if is_on_chats else default
    is_rl = options.get("mode") == "rl"
    for name, defaults in OF_STAGE.items():
        found[name] = defaults[is_on_chats + is_rl] if found[name] is None else found[name]
    if is_rl:
        found["target_examples_per_step"] = found.get("target_examples_per_step") or RL_QUESTIONS
    elif is_on_chats and found.get("target_examples_per_step"):
        found["total_batch_size"] = found["target_examples_per_step"] * found["max_seq_len"]
    return found


def config_of(sizes: Sizes) -> dict[str, Any]:
    """Return the sizes in the words of config.json: of `classic` as transformers reads them."""
    return {
        "model_type": "nanochat" if sizes.is_classic else "nanochat-current",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": 4 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.context,
        **({} if sizes.is_classic else {"window_pattern": sizes.window_pattern}),
    }


@dataclass(frozen=True)
class Sizes:
    """A model. `preset`: current, or classic, which transformers knows as NanoChat. `head`: width of a head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    window_pattern: str = "SSSL"
    preset: str = "current"

    @classmethod
    def of(cls, options: Mapping[str, Any], vocabulary: int) -> Sizes:
        """Return the sizes of a program's dials: hidden is depth x aspect_ratio, rounded up to whole heads."""
        head = int(options["head_dim"])
        heads = -(-int(options["depth"]) * int(options["aspect_ratio"]) // head)
        return cls(
            layers=int(options["depth"]),
            hidden=heads * head,
            heads=heads,
            kv_heads=int(options["kv_heads"]) or heads,
            vocabulary=vocabulary,
            context=int(options["max_seq_len"]),
            window_pattern=str(options["window_pattern"]).upper(),
            preset=str(options["model_preset"]),
        )

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Sizes:
        """Return the sizes of a config.json. Raises KeyError, TypeError or ValueError if it is of another model."""
        if config["model_type"] not in ("nanochat", "nanochat-current"):
            raise ValueError(config["model_type"])
        is_classic = config["model_type"] == "nanochat"
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            vocabulary=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            window_pattern="SSSL" if is_classic else str(config["window_pattern"]),
            preset="classic" if is_classic else "current",
        )

    @property
    def is_classic(self) -> bool:
        return self.preset == "classic"

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embeddings; logits of those beyond the vocabulary are dropped."""
        return self.vocabulary if self.is_classic else rounded(self.vocabulary, VOCABULARY_MULTIPLE)

    @property
    def window_sizes(self) -> tuple[int, ...]:
        """Tokens before its own that a token attends to at most, by layer; the last layer always has the context."""
        if self.is_classic:
            return (self.context,) * self.layers
        short = rounded(-(-self.context // 4), WINDOW_MULTIPLE)
        pattern = [self.window_pattern[layer % len(self.window_pattern)] for layer in range(self.layers - 1)]
        return (*(short if letter == "S" else self.context for letter in pattern), self.context)

    def has_ve(self, layer: int) -> bool:
        """Every other layer, the last one included."""
        return not self.is_classic and layer % 2 == (self.layers - 1) % 2

    @property
    def value_embeddings(self) -> int:
        return sum(map(self.has_ve, range(self.layers)))

    # --- weights ---

    @property
    def layer_matrices(self) -> int:
        """Weights of all layers."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_dim
        gates = self.value_embeddings * VE_GATE_CHANNELS * self.kv_heads
        return self.layers * (attention + 8 * self.hidden * self.hidden) + gates

    @property
    def embedding(self) -> int:
        return self.padded_vocabulary * self.hidden

    @property
    def looked_up(self) -> int:
        """Weights that are indexed, without arithmetic."""
        return self.embedding + self.value_embeddings * self.padded_vocabulary * self.kv_dim

    @property
    def weights(self) -> int:
        scalars = 0 if self.is_classic else 2 * self.layers + SMEAR_CHANNELS + 2
        return self.layer_matrices + self.embedding + self.looked_up + scalars

    @property
    def num_scaling_params(self) -> int:
        """Weights that the length of a training is measured by: the layers and the last matrix."""
        return self.layer_matrices + self.embedding

    def state_values(self, ranks: int) -> int:
        """Return the values in the optimizer's state on the fullest of the ranks that share it: a momentum for each
        weight of a layer, by whole matrices of one shape, and two moments for each of the others."""
        shapes: dict[tuple[int, int], int] = {}
        for count, rows, columns in (
            (2, self.hidden, self.hidden),
            (2, self.kv_dim, self.hidden),
            (1, 4 * self.hidden, self.hidden),
            (1, self.hidden, 4 * self.hidden),
        ):
            shapes[rows, columns] = shapes.get((rows, columns), 0) + count * self.layers
        matrices = sum(
            -(-count // ranks) * (rows * columns + max(rows, columns)) for (rows, columns), count in shapes.items()
        )
        return matrices + -(-2 * (self.weights - self.layer_matrices) // ranks)

    # --- arithmetic ---

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward pass: 6 for each weight of a matrix, and attention to a whole window."""
        attention = sum(12 * self.hidden * min(window, self.context) for window in self.window_sizes)
        matrices = self.num_scaling_params + (0 if self.is_classic else SMEAR_CHANNELS)
        return float(6 * matrices + attention)

    def cache_bytes(self, rows: int, length: int, *, element_bytes: int = 2) -> int:
        """Return the memory of the keys and values of texts, and of the embeddings that the next token mixes in."""
        mixed = 0 if self.is_classic else 2 * self.hidden
        return rows * length * element_bytes * (2 * self.layers * self.kv_dim + mixed)


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Horizon:
    """`tokens`: of the training that the data ratio asks for. `batch_tokens`: of one step. `rate_scale`: factor of all
    rates but that of the smear and backout scalars. `weight_decay`: of the matrices at the start."""

    tokens: int
    batch_tokens: int
    steps: int
    rate_scale: float
    weight_decay: float


def horizon_of(sizes: Sizes, options: Mapping[str, Any]) -> Horizon:
    """Return the length, batch and scales of a training: by `max_steps`, else `target_flops`, else
    `target_param_data_ratio`, the tokens for each weight."""
    ratio = float(options["target_param_data_ratio"])
    tokens = int(ratio * sizes.num_scaling_params)
    there = Sizes.of({**options, "depth": REFERENCE_DEPTH}, sizes.vocabulary)
    there = there if there.kv_heads <= there.heads else replace(there, kv_heads=there.heads)
    reference = ratio * there.num_scaling_params
    batch = int(options["total_batch_size"])
    if not batch:
        batch = 1 << round(math.log2(REFERENCE_BATCH * (tokens / reference) ** BATCH_EXPONENT))
    scale = math.sqrt(batch / REFERENCE_BATCH)
    steps = int(options["max_steps"])
    if not steps and options["target_flops"]:
        steps = round(float(options["target_flops"]) / (sizes.flops_per_token * batch))
    return Horizon(
        tokens=tokens,
        batch_tokens=batch,
        steps=max(1, steps or tokens // batch),
        rate_scale=scale,
        weight_decay=float(options["weight_decay"]) * scale * (reference / tokens),
    )


def chat_horizon(sizes: Sizes, options: Mapping[str, Any], steps: int) -> Horizon:
    """Return the length and batch of a training on conversations, from its settled options. Matrices do not decay.

    In rl the batch is that of the model's own training, which its rates are for."""
    batch = int(options["total_batch_size"]) or REFERENCE_BATCH
    return Horizon(steps * batch, batch, steps, math.sqrt(batch / REFERENCE_BATCH), 0.0)


# --- work ---


@dataclass(frozen=True)
class ChatShape(Shape):
    """The decoder of this program: two matrices in the feed-forward part, value embeddings, no norms."""

    sizes: Sizes

    @property
    def layer_weights(self) -> int:
        return self.sizes.layer_matrices // self.sizes.layers

    @property
    def outside(self) -> int:
        return self.sizes.weights - self.layers * self.layer_weights


@dataclass(frozen=True)
class ChatWorkload(Workload):
    shares_state: bool = False
    has_muon = True

    def moments(self, ranks: int = 1) -> int:
        assert isinstance(self.model, ChatShape)
        return self.model.sizes.state_values(ranks if self.shares_state else 1)

    @property
    def flops_per_token(self) -> float:
        assert isinstance(self.model, ChatShape)
        return self.model.sizes.flops_per_token


def shape_of(sizes: Sizes) -> ChatShape:
    return ChatShape(
        hidden=sizes.hidden,
        inner=4 * sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head=sizes.head,
        vocabulary=sizes.padded_vocabulary,
        is_tied=False,
        has_bias=False,
        positions=None,
        sizes=sizes,
    )
