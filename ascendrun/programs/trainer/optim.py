"""What a program asks of its optimizer: groups of weights, each with a rule (AdamW or Muon) and rates of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

import torch
from torch import nn

from ascendrun.programs.trainer.schedule import Value


@dataclass(frozen=True)
class Group:
    """Weights with one update rule, adamw or muon. `lr`, `weight_decay`, `momentum`: numbers or functions of the step.

    `momentum`, `ns_steps` and `beta2` are muon's, `betas` and `eps` adamw's.
    """

    params: Sequence[nn.Parameter]
    rule: str
    lr: Value
    weight_decay: Value = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    momentum: Value = 0.95
    ns_steps: int = 5
    beta2: float = 0.9


@dataclass(frozen=True)
class OptimizerPlan:
    """The groups of a model. `shard`, under DDP: every rank keeps the state of its part of the weights only, as it does
    in any case of a sharded model."""

    groups: Sequence[Group]
    shard: bool = False

    def check(self, module: nn.Module) -> None:
        """Raise ValueError unless every trained weight is in exactly one group."""
        names = names_of(module)
        seen: dict[int, int] = {}
        for group in self.groups:
            for weight in group.params:
                seen[id(weight)] = seen.get(id(weight), 0) + 1
                if group.rule == "muon" and weight.ndim < 2:
                    raise ValueError(f"{names.get(id(weight))} is not a matrix, which muon requires")
        for name, weight in module.named_parameters():
            if weight.requires_grad and seen.get(id(weight), 0) != 1:
                raise ValueError(f"{name} is in {seen.get(id(weight), 0)} optimizer groups, expected 1")

    @property
    def has_muon(self) -> bool:
        return any(group.rule == "muon" for group in self.groups)


MakeOptimizer = Callable[[nn.Module], OptimizerPlan]


def adamw(
    module: nn.Module, lr: Value, *, weight_decay: Value = 0.01, betas: tuple[float, float] = (0.9, 0.98)
) -> OptimizerPlan:
    """Return AdamW for all trained weights: matrices decay, biases and norms do not."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if dimensions(weight) >= 2]
    vectors = [weight for weight in trained if dimensions(weight) < 2]
    both = (Group(matrices, "adamw", lr, weight_decay, betas), Group(vectors, "adamw", lr, 0.0, betas))
    return OptimizerPlan([group for group in both if group.params])


def dimensions(weight: torch.Tensor) -> int:
    """Return the dimensions of a weight; one that DeepSpeed has partitioned is flat, and has its shape in ds_shape."""
    return len(getattr(weight, "ds_shape", weight.shape))


def names_of(module: nn.Module) -> dict[int, str]:
    return {id(weight): name for name, weight in module.named_parameters()}
