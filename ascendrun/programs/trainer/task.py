"""Interface between a program and the loop: task, settings, progress and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Union

import torch
from torch import nn

from ascendrun.programs.errors import ProgramError
from ascendrun.programs.trainer.data import Batch, Unit

Part = tuple[torch.Tensor, Union[float, torch.Tensor]]
Loss = Union[torch.Tensor, tuple[torch.Tensor, Mapping[str, Part]]]
"""The summed loss of a batch (not its mean), optionally with {part: (its summed loss, its weight)}.
A weight that is a tensor on the device is read only at the end of the step."""


FREE_TO_CHANGE = (
    "adapter_path", "auto_find_batch_size", "baselines", "calibration", "chip", "compare_dirs", "compare_with",
    "compile", "cpu_offload", "data_cache_dir", "data_path", "dataloader_num_workers", "device", "dist_timeout_s",
    "doc_cap", "eval_batch_size", "eval_on_start", "eval_questions", "eval_split", "eval_tokens",
    "inference_warmup_steps", "invalid_rows", "logging_steps", "loss_scale", "macro_f1_weight", "max_chars",
    "max_model_len", "max_num_seqs",
    "max_time_s", "max_tokens_per_micro_batch", "mc_eval_path", "mc_max_samples", "micro_batch_size", "mixture",
    "model_dir", "model_path", "new_organisms", "num_sample_prompts", "on_save_failure", "organism", "output_dir",
    "peak_tflops", "prepared_dir", "profile_dir", "quantization_bit", "report_to", "resume_from_checkpoint",
    "sample_prompts", "sample_steps", "save_merged_model", "save_probabilities", "save_steps", "save_total_limit",
    "shard_optimizer", "shard_size", "strategy", "target_examples_per_step", "tokenizer", "tokenizer_dir",
    "val_data_path", "vocab_size", "world_size",
)  # fmt: skip
"""Options of all programs that may differ between a checkpoint and the run that resumes from it; data is compared by
content."""


def identity_of(options: Mapping[str, Any], free: Sequence[str], **marks: object) -> dict[str, Any]:
    """Return the values that must be equal in a checkpoint and in the run that resumes from it. `free`: more options of
    the program that need not."""
    return {**{name: value for name, value in options.items() if name not in (*FREE_TO_CHANGE, *free)}, **marks}


class CannotResumeError(ProgramError):
    """The newest checkpoint belongs to another training. The exit code is that of health/failures.py."""

    exit_code = 78


class NonFiniteError(ProgramError):
    """The loss or the gradients are inf or NaN; no checkpoint has the state after that step."""


class SaveError(ProgramError):
    """A checkpoint that this run requires could not be written."""


class Ending(Enum):
    FINISHED = "finished"
    EARLY = "early stopping"
    STOPPED = "stopped"
    OUT_OF_TIME = "time limit"

    @property
    def is_complete(self) -> bool:
        """Whether the training is complete; if not, the same command resumes from the checkpoint."""
        return self in (Ending.FINISHED, Ending.EARLY)


class Task:
    """The training objective. `parts`: names of the loss's parts, the same on every rank."""

    parts: Sequence[str] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return what `collate` needs in a worker process: not this rank (`here`), nor its model (`engine`)."""
        return {name: value for name, value in vars(self).items() if name not in ("here", "engine")}

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        """Return one padded batch of these rows, on the CPU. Runs during the training: see `data.Loader`."""
        raise NotImplementedError

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> Loss:
        """Return the loss summed over the batch, with `tensors` on the device; the loop divides by the total weight.

        Call `model`, not another module: it may be wrapped. Autocast is already active.
        """
        raise NotImplementedError

    evaluations: Mapping[str, int] = {}
    """Steps between two evaluations, by name, 0: never; empty: one, named "", every `Settings.eval_steps`."""

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        """Return the scores of this evaluation by name, the same on every rank; empty: no scores. All ranks call it
        together."""
        return {}


@dataclass(frozen=True)
class Settings:
    """Training settings. Steps are optimizer steps; 0 disables an item.

    `eval_on_start`: evaluate before the first step too; the model may be best as it starts. `best`: the score that
    selects the model, "" for none. `early_stopping_patience`: evaluations without a better score before the end.
    `max_tokens_per_micro_batch`: of a pass, if the plan has the `length_of` a row.
    `on_save_failure`: continue (the last good checkpoint stays) or stop. `profile_dir`: for a trace of a few steps.
    """

    steps: int
    max_grad_norm: float = 1.0
    seed: int = 0
    micro_batch_size: int = 0
    max_tokens_per_micro_batch: int = 0
    dataloader_num_workers: int = 0
    logging_steps: int = 10
    eval_steps: int = 0
    eval_on_start: bool = False
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
        """Make settings from a program's options of the same names; `given` takes precedence."""
        named = {each.name: options[each.name] for each in fields(cls) if each.name in options}
        return cls(**{**named, **given})


@dataclass
class Progress:
    """The progress of a training, in plain values for a checkpoint. `step`: steps done. `best_step` None: not
    evaluated yet. `ended`: the training is complete."""

    step: int = 0
    best_step: int | None = None
    best_score: float | None = None
    evaluations_since_best: int = 0
    ended: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
