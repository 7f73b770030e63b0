"""Sizes and work of a transformer from its configuration: weights, arithmetic per token, linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

W = TypeVar("W", bound="Workload")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """A decoder of transformers. `heads`, `kv_heads`: attention heads; `head`: their width."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    is_tied: bool
    has_bias: bool
    positions: int | None

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one layer, by name."""
        query, key = self.heads * self.head, self.kv_heads * self.head
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }

    @property
    def layer_weights(self) -> int:
        linear = self.linear
        bias = sum(linear[name][1] for name in ("q_proj", "k_proj", "v_proj")) if self.has_bias else 0
        return sum(inputs * outputs for inputs, outputs in linear.values()) + bias + 2 * self.hidden

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Weights outside the layers: embeddings, head, last norm."""
        return self.embedding * (1 if self.is_tied else 2) + self.hidden

    @property
    def of_loss(self) -> int:
        """Weights whose gradients come with the loss: those of the head."""
        return self.embedding

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.outside


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape that a config.json describes; None: it lacks a number, or is of an unknown form."""
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return Shape(
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            has_bias=config.get("model_type", "qwen2") == "qwen2" or bool(config.get("attention_bias")),
            positions=int(config["max_position_embeddings"]) if config.get("max_position_embeddings") else None,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def flops_per_token(
    *, parameters: int, trainable: int, layers: int, hidden: int, mean_length: float, embedding: int = 0
) -> float:
    """Return FLOPs of forward and backward, without recomputation: the work that counts for MFU.

    2 per weight forward, 2 for the gradient of the activations, 2 for that of the weight if it is trained;
    attention adds 12 x layers x hidden x length, halved because causal attention covers half of it on average.
    `embedding`: number of weights that are only indexed, so without arithmetic.
    """
    dense = parameters - embedding
    return 4.0 * dense + 2.0 * max(0, trainable - embedding) + 6.0 * layers * hidden * mean_length


@dataclass(frozen=True)
class RowsOfRanks:
    """The rows that ranks train on: `mean` and at most `longest` tokens long. `steps` None: unknown."""

    ranks: int
    family: str
    steps: int | None
    mean: float
    longest: int


@dataclass(frozen=True)
class Workload:
    """`trained`: number of trained weights; `is_frozen`: they are an adapter beside the model's own weights.

    `steps` None: unknown. `tokens_per_step`, `samples_per_step`: of all ranks. `micro_rows`, `micro_length`,
    `micro_learned`: rows, tokens and positions with a target of the largest pass, of which a step has `micro_batches`.
    `is_exact`: lengths are of this data, or no data has longer ones. `weight_bytes_saved`: of the weights in a
    checkpoint. `has_dropout`: before the adapter's matrices.
    """

    model: Shape
    trained: int
    is_frozen: bool
    steps: int | None
    samples_per_step: int
    tokens_per_step: float
    mean_length: float
    micro_rows: int
    micro_length: int
    micro_learned: int
    micro_batches: int
    is_exact: bool
    weight_bytes_saved: int
    has_dropout: bool = False
    has_muon = False
    """Of all trainings of a program: Muon updates the matrices."""

    @classmethod
    def of_rows(
        cls: type[W], options: Mapping[str, Any], model: Shape, rows: RowsOfRanks, *, learned: float, **values: Any
    ) -> W:
        """Return the work of a training of all weights, of whose tokens a part, `learned`, has a target. `values`: of
        other fields; `most_tokens`: of a pass, 0: no limit."""
        longest, most_tokens = rounded_up(rows.longest, multiple_of(options, rows.family)), values.pop("most_tokens", 0)
        batch = int(options["global_batch_size"])
        most = max(1, most_tokens // longest) if most_tokens else 0
        micro, passes = passes_of(options, batch, rows.ranks, most=most)
        given: dict[str, Any] = {"trained": model.weights, "weight_bytes_saved": 4 * model.weights, **values}
        return cls(
            model=model,
            is_frozen=False,
            steps=rows.steps,
            samples_per_step=batch,
            tokens_per_step=batch * rows.mean,
            mean_length=rows.mean,
            micro_rows=micro,
            micro_length=longest,
            micro_learned=int(learned * micro * longest),
            micro_batches=passes,
            is_exact=True,
            **given,
        )

    def moments(self, ranks: int = 1) -> int:
        """Return the values in the optimizer's state, of one of the ranks that share it: two for each weight."""
        return 2 * self.trained

    @property
    def weights(self) -> int:
        return self.model.weights + (self.trained if self.is_frozen else 0)

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward pass, without recomputation."""
        return flops_per_token(
            parameters=self.weights,
            trainable=self.trained,
            layers=self.model.layers,
            hidden=self.model.hidden,
            mean_length=self.mean_length,
            embedding=0 if self.model.is_tied else self.model.embedding,
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Trained weights and the optimizer's state in float32."""
        return 4 * (self.trained + self.moments())


def multiple_of(options: Mapping[str, Any], family: str) -> int:
    """Return the multiple to which batch lengths are rounded up: accelerators compile for each shape, CPUs do not."""
    return int(options["pad_to_multiple_of"]) or (1 if family == "cpu" else 16)


def rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def passes_of(options: Mapping[str, Any], rows: int, ranks: int, *, most: int = 0) -> tuple[int, int]:
    """Return (rows of the largest pass, passes of a step), of one rank. `most`: rows that a pass may have, 0: all."""
    mine = -(-rows // ranks)
    micro = min(mine, int(options["micro_batch_size"]) or mine, most or mine)
    return micro, -(-mine // micro)


def steps_of(options: Mapping[str, Any], steps_per_epoch: int) -> int:
    steps = int(options["num_train_epochs"]) * steps_per_epoch
    return min(steps, int(options["max_steps"])) if options["max_steps"] else steps
