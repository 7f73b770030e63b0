"""The training tasks: classification with a weighted loss, and pretraining that predicts masked or next tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ascendrun.planner.models import Workload, flops_per_token, multiple_of, steps_of
from ascendrun.programs.devices import accelerator
from ascendrun.programs.trainer import optim, schedule
from ascendrun.programs.trainer.data import Batch, Buckets, Unit
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.parallel import wrap_for
from ascendrun.programs.trainer.task import Settings, Task, identity_of
from ascendrun.programs.trajectory import model as models
from ascendrun.programs.trajectory.data import Options, Samples
from ascendrun.programs.trajectory.rules import micro_tokens_of, shape_of_config, work_of
from ascendrun.programs.trajectory.scores import score
from ascendrun.programs.trajectory.store import predict
from ascendrun.programs.trajectory.tokens import UNKNOWN, Encoded, Groups, Hiding, Ids, augment, guessable, hide_words

FREE = "host", "mode", "port"
"""Options beside those of `identity_of` that may differ between a checkpoint and the run that resumes from it."""
LR_FLOOR = 0.05
BETAS = (0.9, 0.98)


class Classification(Task):
    """Training task: predict the class of a ship from a segment of its track."""

    def __init__(
        self, options: Options, samples: Samples, here: Runtime, engine: Engine, plan: Buckets, numbers: int
    ) -> None:
        """`numbers`: of the summary of a track."""
        self.options, self.samples, self.here, self.plan = options, samples, here, plan
        self.engine, self.numbers, self.multiple = engine, numbers, multiple_of(options, here.family)
        self.train_set = samples.encoded["train"]
        by_class = class_weights(samples.labels("train"), len(samples.names), options["class_weights"])
        by_piece = ship_weights([record.ship for record in samples.records["train"]], options["ship_weights"])
        self.weights = [by_class[sample.label] * own for sample, own in zip(self.train_set, by_piece)]
        self.groups = Groups.make(samples.vocabulary)
        by_ship: dict[str, list[int]] = {}
        for number, record in enumerate(samples.records["train"]):
            by_ship.setdefault(record.ship, []).append(number)
        self.pieces = list(by_ship.values())
        self.each_loss = nn.CrossEntropyLoss(reduction="none", label_smoothing=options["label_smoothing_factor"])

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        epoch = step // self.plan.steps_per_epoch
        numbers = [self.piece(number, epoch) for unit in units for number in unit]
        samples = [self.sample(number, epoch) for number in numbers]
        rows = [sample.ids() for sample in samples]
        labels = [sample.label for sample in samples]
        weights = [self.weights[number] for number in numbers]
        ids, lengths = models.pad(rows, multiple=self.multiple)
        values = models.stack_values(samples, self.numbers)
        tensors = {
            "ids": ids,
            "lengths": lengths,
            "segments": models.segments_of(lengths, ids.shape[1]),
            "labels": torch.tensor(labels),
            "weights": torch.tensor(weights),
            **({} if values is None else {"values": values}),
        }
        return Batch(tensors, weight=sum(weights), tokens=sum(map(len, rows)), samples=len(rows))

    def piece(self, number: int, epoch: int) -> int:
        """Return the piece of a draw: itself, or with --sample_by=ship one of the ship whose turn it is."""
        if self.options["sample_by"] == "piece":
            return number
        draw = number + epoch * len(self.train_set)
        turn, ship = divmod(draw, len(self.pieces))
        return self.pieces[ship][turn % len(self.pieces[ship])]

    def sample(self, number: int, epoch: int) -> Encoded:
        return augment(
            self.train_set[number],
            hiding_of(self.options),
            self.groups,
            unknown=self.samples.vocabulary[UNKNOWN],
            key=(self.options["seed"], epoch, number),
        )

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(tensors["ids"], tensors["lengths"], tensors["segments"], tensors.get("values"))
        losses: torch.Tensor = self.each_loss(logits.float(), tensors["labels"])
        return (losses * tensors["weights"]).sum()

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        model: Any = self.engine.whole().module
        probabilities = predict(model, self.samples.encoded["val"], self.here, self.options)
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
    options: Options, samples: Samples, model: models.TrackClassifier, here: Runtime, folder: Path
) -> models.TrackClassifier | None:
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
    fresh: Any = copy.deepcopy(loop.engine.whole().module)  # without the hooks that the engine left on the weights
    fresh.backbone.requires_grad_(True)
    return fresh  # type: ignore[no-any-return]


def make_loop(options: Options, samples: Samples, model: models.Reader, here: Runtime, folder: Path) -> Loop:
    """Return the classification of a TrackClassifier, or the pretraining of a WordGuesser."""
    best = options["metric_for_best_model"] if options["load_best_model_at_end"] else ""
    kind: Any = Classification
    rows = samples.encoded["train"]
    if isinstance(model, models.WordGuesser):
        kind, rows, best = Pretraining, unlabelled(samples), "loss"
    plan = plan_of(rows, options)
    settings = Settings.of(
        options,
        steps=steps_of(options, plan.steps_per_epoch),
        max_tokens_per_micro_batch=micro_tokens_of(options, here.family),
        eval_steps=options["eval_steps"] or plan.steps_per_epoch,
        flops_per_token=flops_of(model, float(np.mean(plan.lengths))),
        best=best,
        best_is_low=best == "loss",
    )
    engine = make_engine(options, model, here, plan, settings.steps)
    task = kind(options, samples, here, engine, plan, model.sizes.numbers)
    identity = identity_of(options, FREE, data=samples.digest[:16])
    return Loop(here, engine, plan, task, settings, folder=folder, identity=identity)


def plan_of(samples: Sequence[Encoded], options: Options) -> Buckets:
    return Buckets.of(options, [len(sample) for sample in samples])


def make_engine(options: Options, model: models.Reader, here: Runtime, plan: Buckets, steps: int) -> Engine:
    warmup = max(1, schedule.warmup_of(options, steps))
    rate = schedule.of_options(options, steps, warmup=warmup, floor=LR_FLOOR)
    precision = accelerator.precision_of(options, here.accelerator)
    if options["gradient_checkpointing"]:
        models.enable_gradient_checkpointing(model)
    for line in models.fuse(model, here.accelerator, precision.compute):
        here.log(line)
    work = work_on(plan, options, model.sizes, ranks=here.world_size, family=here.family)
    return wrap_for(
        options,
        model,
        here,
        work=work,
        make_optimizer=lambda module: optim.adamw(module, rate, weight_decay=options["weight_decay"], betas=BETAS),
        precision=precision,
    )


def work_on(plan: Buckets, options: Options, sizes: models.Sizes, *, ranks: int, family: str) -> Workload | None:
    """Return the work of a training on these tracks, for the planner; None: the model has an unknown form."""
    bins = max(map(len, sizes.knots), default=1) - 1
    shape = shape_of_config(sizes.config, mode=options["mode"], classes=sizes.classes, numbers=sizes.numbers, bins=bins)
    return work_of(options, shape, plan.rows_of(ranks, family, steps_of(options, plan.steps_per_epoch)))


def flops_of(model: models.Reader, mean_length: float) -> float:
    config = model.backbone.config
    weights = list(model.parameters())
    return flops_per_token(
        parameters=sum(weight.numel() for weight in weights),
        layers=config.num_hidden_layers,
        trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
        hidden=config.hidden_size,
        mean_length=mean_length,
        embedding=model.backbone.embed_tokens.weight.numel(),
    )


def hiding_of(options: Options) -> Hiding:
    return Hiding(
        place=options["place_dropout_prob"],
        size=options["size_dropout_prob"],
        token=options["token_mask_prob"],
        crop=options["random_crop_prob"],
        min_points=options["min_segment_size"],
    )


def class_weights(labels: Sequence[int], classes: int, kind: str) -> list[float]:
    """Return the weight of each class, with mean 1 over the samples; a class without samples has weight 0."""
    counts = np.bincount(labels, minlength=classes).astype(np.float64)
    power = {"none": 0.0, "sqrt": 0.5, "balanced": 1.0}[kind]
    weights = np.where(counts > 0, np.maximum(counts, 1.0) ** -power, 0.0)
    return [float(weight) for weight in weights * counts.sum() / (weights * counts).sum()]


def ship_weights(ships: Sequence[str], kind: str) -> list[float]:
    """Return the weight of each piece, with mean 1, by the number of pieces of its ship: `class_weights` by ship."""
    names, numbers = np.unique(np.asarray(ships), return_inverse=True)
    weights = class_weights(numbers.reshape(-1).tolist(), len(names), kind)
    return [weights[number] for number in numbers.reshape(-1)]


Masked = tuple[Ids, Ids, Ids]
"""One sample: the model's input, the positions to predict, and the correct tokens there."""


class Pretraining(Task):
    """Pretraining task. `objective`: masked or causal. Class labels are not used."""

    def __init__(
        self, options: Options, samples: Samples, here: Runtime, engine: Engine, plan: Buckets, numbers: int = 0
    ) -> None:
        self.options, self.vocabulary, self.here = options, samples.vocabulary, here
        self.engine, self.plan, self.multiple = engine, plan, multiple_of(options, here.family)
        self.train_set, self.val_set = unlabelled(samples), samples.encoded["val"]
        self.may, self.groups = guessable(samples.vocabulary), Groups.make(samples.vocabulary)

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        epoch = step // self.plan.steps_per_epoch
        return self.batch(
            [
                self.masked(self.train_set[number], (self.options["seed"], epoch, number), is_training=True)
                for unit in units
                for number in unit
            ]
        )

    def masked(self, sample: Encoded, key: Sequence[int], *, is_training: bool) -> Masked:
        hiding = replace(hiding_of(self.options), token=0.0) if is_training else Hiding()
        ids = augment(sample, hiding, self.groups, unknown=self.vocabulary[UNKNOWN], key=key).ids()
        if self.options["objective"] == "clm":
            places = np.flatnonzero(ids[1:] != self.vocabulary[UNKNOWN])
            return ids, places, ids[places + 1]
        hidden, places = hide_words(ids, self.may, self.vocabulary, rate=self.options["mlm_probability"], key=key)
        return hidden, places, ids[places]

    def batch(self, rows: Sequence[Masked]) -> Batch:
        ids, lengths = models.pad([seen for seen, _, _ in rows], multiple=self.multiple)
        tensors: dict[str, Any] = {
            "ids": ids,
            "lengths": lengths,
            "segments": models.segments_of(lengths, ids.shape[1]),
            "rows": torch.from_numpy(np.repeat(np.arange(len(rows)), [len(places) for _, places, _ in rows])),
            "places": torch.from_numpy(np.concatenate([places for _, places, _ in rows])),
            "words": torch.from_numpy(np.concatenate([words for _, _, words in rows])),
        }
        tokens = int(lengths.sum())
        return Batch(tensors, weight=float(len(tensors["words"])), tokens=tokens, samples=len(rows))

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(tensors["ids"], tensors["lengths"], tensors["rows"], tensors["places"], tensors["segments"])
        return functional.cross_entropy(logits.float(), tensors["words"], reduction="sum")

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        """Score the validation ships, with the same masked tokens at every evaluation and the training vocabulary."""
        mine = list(range(self.here.rank, len(self.val_set), self.here.world_size))
        size, sums = self.options["global_batch_size"], [0.0, 0.0, 0.0, 0.0]
        model = self.engine.whole().module
        for start in range(0, len(mine), size):
            batch = self.batch(
                [self.masked(self.val_set[i], (i,), is_training=False) for i in mine[start : start + size]]
            )
            tensors = {name: tensor.to(self.here.device) for name, tensor in batch.tensors.items()}
            logits = model(
                tensors["ids"], tensors["lengths"], tensors["rows"], tensors["places"], tensors["segments"]
            ).float()
            right = float((logits.argmax(-1) == tensors["words"]).sum())
            nats = float(functional.cross_entropy(logits, tensors["words"], reduction="sum"))
            sums = [old + new for old, new in zip(sums, (nats, right, batch.weight, float(batch.tokens)))]
        nats, right, masked, tokens = self.here.sum(sums)
        return {
            "loss": nats / max(1.0, masked),
            "masked_accuracy": right / max(1.0, masked),
            "mask_ratio": masked / tokens,
        }


def unlabelled(samples: Samples) -> list[Encoded]:
    """Return the training ships, and those of unknown class; never a ship of the other splits."""
    return [*samples.encoded["train"], *samples.encoded.get("unlabelled", [])]
