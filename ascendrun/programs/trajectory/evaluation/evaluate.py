"""Class probabilities of many samples, on all ranks, each sample once: of a model, or of several that vote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ascendrun.planner.workload import multiple_of
from ascendrun.programs.devices.accelerator import choose_precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.evaluation.scores import Adjustment
from ascendrun.programs.trajectory.model import TrackClassifier, pad, stack_values
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.store import Vote
from ascendrun.programs.trajectory.tokens import Encoded, check_known
from ascendrun.text import Text


def predict(model: TrackClassifier, samples: Sequence[Encoded], runtime: Runtime, options: Options) -> Floats:
    """Return class probabilities, one row per sample, the same on every rank. All ranks must call it together.

    Each rank computes every world_size-th sample by length, so the work is even, no sample is counted twice, and ranks
    with fewer batches than others do not wait inside the model. A batch is not larger than a pass of the training: the
    plan has the memory of that.
    """
    batch_size = options["micro_batch_size"] or -(-options["global_batch_size"] // runtime.world_size)
    multiple = multiple_of(options, runtime.family)
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i]), i))
    mine = order[runtime.rank :: runtime.world_size]
    rows: list[Floats] = []
    was_training = model.training
    model.eval()
    precision = choose_precision(options["dtype"], runtime.accelerator)
    with torch.no_grad(), runtime.accelerator.autocast(precision.compute):
        for start in range(0, len(mine), batch_size):
            batch = [samples[i] for i in mine[start : start + batch_size]]
            rows += list(probabilities_of(model, batch, runtime.device, multiple=multiple))
    model.train(was_training)
    return merge(runtime.gather((mine, rows)), len(samples), model.head.out_features)


def merge(parts: Sequence[tuple[list[int], list[Floats]]], count: int, classes: int) -> Floats:
    """Merge all ranks' rows in sample order; every sample must be present exactly once."""
    numbers = [i for mine, _ in parts for i in mine]
    assert sorted(numbers) == list(range(count)), "samples lost or counted twice"
    whole = np.zeros((count, classes))
    for mine, rows in parts:
        if mine:
            whole[mine] = np.stack(rows)
    return whole


def probabilities_of(
    model: TrackClassifier, batch: Sequence[Encoded], device: torch.device, *, multiple: int
) -> Floats:
    """Return class probabilities of a batch, on this device. Requires a model in eval mode and disabled gradients."""
    ids, lengths = pad([sample.ids() for sample in batch], multiple=multiple)
    values = stack_values(batch, model.sizes.numbers)
    logits = model(ids.to(device), lengths.to(device), values=None if values is None else values.to(device))
    answer: Floats = torch.softmax(logits.float(), -1).double().cpu().numpy()
    return answer if model.trees is None else model.trees.vote(answer, batch)


def vote_on(vote: Vote, samples: Sequence[Encoded], here: Runtime, options: Options) -> Floats:
    """Return the mean over the members, adjusted; the same on every rank."""
    return put_together(vote, each_member_on(vote, samples, here, options))


def each_member_on(vote: Vote, samples: Sequence[Encoded], here: Runtime, options: Options) -> list[Floats]:
    if not samples:
        raise InvalidDataError("program.nothing-to-classify", "no track to classify")
    return [predict(member.model, samples, here, options) for member in vote.members]


def put_together(vote: Vote, each: Sequence[Floats]) -> Floats:
    mean: Floats = np.mean(each, axis=0)
    return Adjustment(vote.temperature, vote.prior_shift).apply(mean, vote.members[0].priors)


def check_vocabulary(vote: Vote, samples: Sequence[Encoded], here: Runtime) -> None:
    """Warn if the models have not seen some of the tokens. Raises InvalidDataError if they have not seen most."""
    vocabulary = vote.members[0].vocabulary
    warning = check_known(samples, vocabulary, vocabulary, model=Text("program.the-model", "the model"))
    if warning is not None:
        here.log("program.warning", "warning: {text}", text=warning)


def ids_of(vote: Vote) -> dict[str, int]:
    return {name: i for i, name in enumerate(vote.names)}


def answer(row: Floats, names: Sequence[str], *, with_all: bool) -> dict[str, Any]:
    best = int(row.argmax())
    reply: dict[str, Any] = {"class_name": names[best], "confidence": round(float(row[best]), 4)}
    if with_all:
        reply["probabilities"] = {name: round(float(value), 4) for name, value in zip(names, row)}
    return reply
