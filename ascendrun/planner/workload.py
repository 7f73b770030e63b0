"""The work of one training: its model, its steps, and the largest forward and backward pass of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ascendrun.planner.models import Shape, flops_per_token


@dataclass(frozen=True)
class Workload:
    """`trained`: number of trained weights; `is_frozen`: they are an adapter beside the model's own weights.

    `steps` None: unknown. `tokens_per_step`, `samples_per_step`: of all ranks. `micro_rows`, `micro_length`,
    `micro_learned`: rows, tokens and positions with a target of the largest pass, of which a step has `micro_batches`.
    `is_exact`: lengths are of this data. `weight_bytes_saved`: of the weights in a checkpoint. `has_dropout`: before
    the adapter's matrices.
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


def steps_of(options: Mapping[str, Any], steps_per_epoch: int) -> int:
    steps = int(options["num_train_epochs"]) * steps_per_epoch
    return min(steps, int(options["max_steps"])) if options["max_steps"] else steps
