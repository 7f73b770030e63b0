"""The classification task of the trainer: batches of tracks, a weighted loss, scores that select the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ascendrun.programs.trainer import metrics
from ascendrun.programs.trainer.data import Batch, Buckets, Unit
from ascendrun.programs.trainer.devices import accelerator
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Adam, Engine
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings, Task, warmup_of
from ascendrun.programs.trajectory.batches import augment
from ascendrun.programs.trajectory.data import Options, Samples, multiple_of
from ascendrun.programs.trajectory.evaluation.evaluate import predict
from ascendrun.programs.trajectory.evaluation.scores import score
from ascendrun.programs.trajectory.model import Reader, TrackClassifier, enable_gradient_checkpointing, fuse, pad
from ascendrun.programs.trajectory.tokens import UNKNOWN, Encoded, Ids

FREE_TO_CHANGE = (
    "mode", "model_path", "data_path", "prepared_dir", "output_dir", "device", "resume_from_checkpoint",
    "logging_steps", "save_steps", "save_total_limit", "dist_timeout_s", "micro_batch_size",
    "max_tokens_per_micro_batch", "auto_find_batch_size", "dataloader_num_workers", "max_time_s", "profile_dir",
    "peak_tflops", "host", "port", "inference_warmup_steps", "save_probabilities", "crops", "eval_split",
    "macro_f1_weight", "calibration", "chip", "world_size",
)  # fmt: skip
"""Options that may differ between a checkpoint and the run that resumes from it; data is compared by content."""
LR_FLOOR = 0.05
BETAS = (0.9, 0.98)
CPU_MICRO_TOKENS = 2048
"""A pass then fits in a core's cache: 6,400 tokens per CPU second instead of 4,400, hidden size 128."""


class Classification(Task):
    """Training task: predict the class of a ship from a segment of its track."""

    def __init__(
        self, options: Options, samples: Samples, model: TrackClassifier, here: Runtime, plan: Buckets
    ) -> None:
        self.options, self.samples, self.model, self.here, self.plan = options, samples, model, here, plan
        self.train_set = samples.encoded["train"]
        self.class_weights = class_weights(samples.labels("train"), len(samples.names), options["class_weights"])
        self.each_loss = nn.CrossEntropyLoss(reduction="none", label_smoothing=options["label_smoothing_factor"])

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        epoch = step // self.plan.steps_per_epoch
        numbers = [number for unit in units for number in unit]
        rows = [self.row(number, epoch) for number in numbers]
        labels = [self.train_set[number].label for number in numbers]
        weights = [self.class_weights[label] for label in labels]
        ids, lengths = pad(rows, multiple=multiple_of(self.options, self.here.family))
        tensors = {"ids": ids, "lengths": lengths, "labels": torch.tensor(labels), "weights": torch.tensor(weights)}
        return Batch(tensors, weight=sum(weights), tokens=sum(map(len, rows)), samples=len(rows))

    def row(self, number: int, epoch: int) -> Ids:
        options = self.options
        return augment(
            self.train_set[number],
            min_points=options["min_segment_size"],
            crop=options["random_crop_prob"],
            hide=options["token_mask_prob"],
            unknown=self.samples.vocabulary[UNKNOWN],
            key=(options["seed"], epoch, number),
        )

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(tensors["ids"], tensors["lengths"])
        losses: torch.Tensor = self.each_loss(logits.float(), tensors["labels"])
        return (losses * tensors["weights"]).sum()

    def evaluate(self, step: int) -> dict[str, float]:
        probabilities = predict(self.model, self.samples.encoded["val"], self.here, self.options)
        truth = self.samples.labels("val")
        scores = score(truth, probabilities.argmax(1).tolist(), self.samples.names)
        nll = -np.log(np.maximum(probabilities[np.arange(len(truth)), truth], 1e-12)).mean()
        return {
            "macro_f1": scores.macro_f1,
            "accuracy": scores.accuracy,
            "loss": float(nll),
            "mean": (scores.macro_f1 + scores.accuracy) / 2,
        }


def train_head(
    options: Options, samples: Samples, model: TrackClassifier, here: Runtime, folder: Path
) -> TrackClassifier | None:
    """Train the head for --freeze_backbone_epochs, with frozen layers below; None: stopped by a signal."""
    model.backbone.requires_grad_(False)
    loop = make_loop(
        {**options, "num_train_epochs": options["freeze_backbone_epochs"], "keep_best_by": "last"},
        samples,
        model,
        here,
        folder / "head",
    )
    loop.resume(options["resume_from_checkpoint"])
    if not loop.run().is_complete:
        return None
    fresh = copy.deepcopy(model)  # without the hooks that DDP left on the weights
    fresh.backbone.requires_grad_(True)
    return fresh


def make_loop(options: Options, samples: Samples, model: TrackClassifier, here: Runtime, folder: Path) -> Loop:
    plan = plan_of(samples.encoded["train"], options)
    best = options["metric_for_best_model"] if options["load_best_model_at_end"] else ""
    settings = make_settings(options, plan, model, here, best=best, best_is_low=best == "loss")
    engine = make_engine(options, model, here)
    return Loop(
        here,
        engine,
        plan,
        Classification(options, samples, model, here, plan),
        settings,
        folder=folder,
        identity=identity_of(options, samples),
    )


def plan_of(samples: Sequence[Encoded], options: Options) -> Buckets:
    return Buckets(
        [len(sample) for sample in samples],
        batch_size=options["global_batch_size"],
        seed=options["seed"],
        window=options["length_bucket_batches"],
    )


def make_settings(options: Options, plan: Buckets, model: Reader, here: Runtime, **given: Any) -> Settings:
    steps = steps_of(options, plan)
    return Settings.of(
        options,
        steps=steps,
        warmup_steps=max(1, warmup_of(options, steps)),
        lr_floor=LR_FLOOR,
        max_tokens_per_micro_batch=micro_tokens_of(options, here.family),
        eval_steps=options["eval_steps"] or plan.steps_per_epoch,
        flops_per_token=flops_of(model, float(np.mean(plan.lengths))),
        **given,
    )


def steps_of(options: Options, plan: Buckets) -> int:
    steps = int(options["num_train_epochs"]) * plan.steps_per_epoch
    return min(steps, options["max_steps"]) if options["max_steps"] else steps


def micro_tokens_of(options: Options, family: str) -> int:
    """Return the tokens per pass; 0: no limit. Accelerators need few large passes, of few shapes."""
    asked = int(options["max_tokens_per_micro_batch"])
    return asked if asked >= 0 else CPU_MICRO_TOKENS if family == "cpu" else 0


def make_engine(options: Options, model: Reader, here: Runtime) -> Engine:
    adam = Adam(lr=options["learning_rate"], weight_decay=options["weight_decay"], betas=BETAS)
    precision = accelerator.choose_precision(options["dtype"], here.accelerator)
    if options["gradient_checkpointing"]:
        enable_gradient_checkpointing(model)
    for line in fuse(model, here.accelerator, precision.compute):
        here.log(line)
    return wrap(model, here, strategy="ddp", adam=adam, precision=precision)


def flops_of(model: Reader, mean_length: float) -> float:
    config = model.backbone.config
    weights = list(model.parameters())
    return metrics.flops_per_token(
        parameters=sum(weight.numel() for weight in weights),
        layers=config.num_hidden_layers,
        trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
        hidden=config.hidden_size,
        mean_length=mean_length,
        embedding=model.backbone.embed_tokens.weight.numel(),
    )


def class_weights(labels: Sequence[int], classes: int, kind: str) -> list[float]:
    """Return the weight of each class, with mean 1 over the samples; a class without samples has weight 0."""
    counts = np.bincount(labels, minlength=classes).astype(np.float64)
    power = {"none": 0.0, "sqrt": 0.5, "balanced": 1.0}[kind]
    weights = np.where(counts > 0, np.maximum(counts, 1.0) ** -power, 0.0)
    return [float(weight) for weight in weights * counts.sum() / (weights * counts).sum()]


def identity_of(options: Mapping[str, Any], samples: Samples) -> dict[str, Any]:
    """Return the values that must be equal in a checkpoint and in the run that resumes from it."""
    kept = {name: value for name, value in options.items() if name not in FREE_TO_CHANGE}
    return {**kept, "data": samples.digest[:16]}
