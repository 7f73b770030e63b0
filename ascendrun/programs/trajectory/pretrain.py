"""Pretraining without classes: predict masked tokens, or the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.trainer.data import Batch, Buckets, Unit
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.task import Task
from ascendrun.programs.trajectory.batches import Groups, Hiding, augment, guessable, hide_words
from ascendrun.programs.trajectory.data import Options, Samples, multiple_of
from ascendrun.programs.trajectory.model import WordGuesser, pad, segments_of
from ascendrun.programs.trajectory.tokens import UNKNOWN, Encoded, Ids
from ascendrun.programs.trajectory.train import hiding_of, identity_of, make_engine, make_settings, plan_of

Masked = tuple[Ids, Ids, Ids]
"""One sample: the model's input, the positions to predict, and the correct tokens there."""


class Pretraining(Task):
    """Pretraining task. `objective`: masked or causal. Class labels are not used."""

    def __init__(self, options: Options, samples: Samples, here: Runtime, engine: Engine, plan: Buckets) -> None:
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
        ids, lengths = pad([seen for seen, _, _ in rows], multiple=self.multiple)
        tensors: dict[str, Any] = {
            "ids": ids,
            "lengths": lengths,
            "segments": segments_of(lengths, ids.shape[1]),
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


def make_pretraining(options: Options, samples: Samples, model: WordGuesser, here: Runtime, folder: Path) -> Loop:
    plan = plan_of(unlabelled(samples), options)
    settings = make_settings(options, plan, model, here, best="loss", best_is_low=True)
    engine = make_engine(options, model, here, plan, settings.steps)
    return Loop(
        here,
        engine,
        plan,
        Pretraining(options, samples, here, engine, plan),
        settings,
        folder=folder,
        identity=identity_of(options, samples),
    )
