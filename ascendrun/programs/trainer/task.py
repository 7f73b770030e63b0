"""What a program gives to the loop, and what it gets back from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Union

import torch
from torch import nn

from ascendrun.programs.trainer.data import Batch, Unit
from ascendrun.programs.trainer.errors import ProgramError

Part = tuple[torch.Tensor, Union[float, torch.Tensor]]
Loss = Union[torch.Tensor, tuple[torch.Tensor, Mapping[str, Part]]]
"""The summed loss of a batch (not its mean); with it, where wanted, {part: (its summed loss, its weight)}.
A weight that is a tensor on the device is not waited for before the step's end."""


class CannotResumeError(ProgramError):
    """The newest checkpoint belongs to another training."""


class NonFiniteError(ProgramError):
    """The loss or the gradients are no numbers any more; no step was taken with them."""


class SaveError(ProgramError):
    """A checkpoint that this run promised could not be written."""


class Ending(Enum):
    FINISHED = "finished"
    EARLY = "early stopping"
    STOPPED = "stopped"
    OUT_OF_TIME = "time limit"

    @property
    def is_complete(self) -> bool:
        """Nothing is left to train; else the same command goes on from the checkpoint."""
        return self in (Ending.FINISHED, Ending.EARLY)


class Task:
    """What to learn. `parts`: names of the loss's parts, the same on every rank."""

    parts: Sequence[str] = ()

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        """One padded batch of these rows, on the CPU. Runs during the training: see `data.Loader`."""
        raise NotImplementedError

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> Loss:
        """Summed over the batch, whose `tensors` are on the device by now; the loop divides by the weight of all ranks.

        Call `model`, not a module of your own: it may be wrapped. Autocast is on already.
        """
        raise NotImplementedError

    def evaluate(self, step: int) -> dict[str, float]:
        """Scores by name, the same on every rank. All ranks call it together. Empty: there is nothing to score."""
        return {}


@dataclass(frozen=True)
class Settings:
    """Training settings. Steps are optimizer steps; 0 switches an item off.

    `best`: the score that selects the model, "" for none. `early_stopping_patience`: evaluations without a better
    score before the end. `max_tokens_per_micro_batch`: of a pass, where the plan knows the `length_of` a row.
    `on_save_failure`: continue (the last good checkpoint stays) or stop. `profile_dir`: for a trace of a few steps.
    """

    steps: int
    learning_rate: float
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 0
    lr_floor: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0
    micro_batch_size: int = 0
    max_tokens_per_micro_batch: int = 0
    dataloader_num_workers: int = 0
    logging_steps: int = 10
    eval_steps: int = 0
    best: str = ""
    best_is_low: bool = False
    early_stopping_patience: int = 0
    save_steps: int = 0
    save_total_limit: int = 2
    save_in_background: bool = True
    on_save_failure: str = "continue"
    max_time_s: float = 0.0
    flops_per_token: float = 0.0
    peak_tflops: float = 0.0
    profile_dir: str = ""
    profile_steps: int = 3

    @classmethod
    def of(cls, options: Mapping[str, Any], **given: Any) -> Settings:
        """From a program's options of the same names; `given` comes first."""
        named = {each.name: options[each.name] for each in fields(cls) if each.name in options}
        return cls(**{**named, **given})

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        kind, warmup_steps = self.lr_scheduler_type, self.warmup_steps
        fraction = fraction_of_peak(step, self.steps, shape=kind, warmup_steps=warmup_steps, floor=self.lr_floor)
        return self.learning_rate * fraction


def fraction_of_peak(
    step: int, steps: int, *, shape: str = "cosine", warmup_steps: int = 0, floor: float = 0.0
) -> float:
    """In (0, 1]: rises in a line over `warmup_steps`, then falls to `floor` at the last of `steps`. Counts from 0.

    `steps` are optimizer steps of the whole training, epochs and accumulation taken into account; a step
    beyond them, of a training that was made longer, stays at the floor.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    way = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    fall = 0.5 * (1 + math.cos(math.pi * way)) if shape == "cosine" else 1 - way
    return floor + (1 - floor) * fall


def warmup_of(options: Mapping[str, Any], steps: int) -> int:
    """Warm-up steps of a training of `steps`: `warmup_steps`, or the fraction `warmup_ratio` where that is None."""
    given = options["warmup_steps"]
    return min(steps, round(steps * options["warmup_ratio"]) if given is None else int(given))


@dataclass
class Progress:
    """The progress of a training, in plain values that a checkpoint can hold. `step`: steps done. `best_step` None: not
    evaluated yet. `ended`: nothing is left to train."""

    step: int = 0
    best_step: int | None = None
    best_score: float | None = None
    evaluations_since_best: int = 0
    ended: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
