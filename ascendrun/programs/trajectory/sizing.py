"""Memory of a training on one device, estimated from the model's sizes and the passes of its steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.devices.attention import Segments
from ascendrun.programs.trainer.data import Buckets, deal
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.simulate import Shapes, Simulated, simulate_deep
from ascendrun.programs.trajectory.data import Options, multiple_of
from ascendrun.programs.trajectory.model import (
    Reader,
    Sizes,
    TrackClassifier,
    WordGuesser,
    enable_gradient_checkpointing,
)
from ascendrun.programs.trajectory.train import micro_tokens_of
from ascendrun.text import Text

LOOKED_AT = 200
"""Number of steps of an epoch whose passes are checked, evenly distributed."""


@dataclass(frozen=True)
class Pass:
    """The largest forward and backward pass of one rank. `requested`: tokens to predict, 0: the class is predicted.
    `of_step`: number of passes of that step."""

    rows: int
    length: int
    requested: int
    of_step: int


def largest_pass(plan: Buckets, options: Options, *, family: str, world_size: int, requested_fraction: float) -> Pass:
    """Return the largest pass; cropping makes tracks shorter. `requested_fraction`: share of the tokens to predict."""
    limits = {"micro_batch": options["micro_batch_size"], "micro_tokens": micro_tokens_of(options, family)}
    multiple, found = multiple_of(options, family), Pass(0, 0, 0, 0)
    for step in sorted({int(each) for each in np.linspace(0, plan.steps_per_epoch - 1, LOOKED_AT)}):
        pieces = deal(plan.units(step), 0, world_size, **limits, length_of=plan.length_of)
        for piece in filter(None, pieces):
            lengths = [plan.length_of(unit) for unit in piece]
            width = -(-max(lengths) // multiple) * multiple
            requested = int(requested_fraction * sum(lengths)) + len(piece) if requested_fraction else 0
            seen = Pass(len(piece), width, requested, len(pieces))
            found = max(found, seen, key=lambda each: (each.rows * each.length, each.of_step))
    return found


def estimate(sizes: Sizes, largest: Pass, target: memory.Target, *, checkpointed: bool) -> memory.Need:
    """Estimate a classifier, or a masked language model if the pass has tokens to predict."""
    strategy = "none" if target.world_size == 1 else "ddp"
    step = simulated(sizes, largest, target, checkpointed=checkpointed)
    return memory.needs(step, target, strategy=strategy, pieces=largest.of_step)


def simulated(sizes: Sizes, largest: Pass, target: memory.Target, *, checkpointed: bool) -> Simulated:
    kind: Callable[[Sizes], Reader] = WordGuesser if largest.requested else TrackClassifier

    def build(layers: int) -> nn.Module:
        model = kind(replace(sizes, config=with_layers(sizes.config, layers)))
        if checkpointed:
            enable_gradient_checkpointing(model)
        return model

    return simulate_deep(
        build,
        int(sizes.config["num_hidden_layers"]),
        guess if largest.requested else classify,
        shapes_of(largest, sizes.numbers),
        precision=target.precision,
        family=target.family,
    )


def shapes_of(largest: Pass, numbers: int) -> Shapes:
    shapes = {"ids": ((largest.rows, largest.length), torch.int64), "lengths": ((largest.rows,), torch.int64)}
    if largest.requested:
        return {**shapes, **dict.fromkeys(("rows", "places", "words"), ((largest.requested,), torch.int64))}
    values = {"values": ((largest.rows, numbers), torch.float32)} if numbers else {}
    return {**shapes, **values, "labels": ((largest.rows,), torch.int64)}


def whole_rows(ids: torch.Tensor) -> Segments:
    return Segments.of([ids.shape[1]] * len(ids))


def classify(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    segments, values = whole_rows(tensors["ids"]), tensors.get("values")
    logits = model(tensors["ids"], tensors["lengths"], segments=segments, values=values)
    return functional.cross_entropy(logits.float(), tensors["labels"], reduction="sum")


def guess(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    segments = whole_rows(tensors["ids"])
    logits = model(tensors["ids"], tensors["lengths"], tensors["rows"], tensors["places"], segments)
    return functional.cross_entropy(logits.float(), tensors["words"], reduction="sum")


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    shallow = {**copy.deepcopy(config), "num_hidden_layers": layers}
    if shallow.get("layer_types"):
        shallow["layer_types"] = shallow["layer_types"][:layers]
    return shallow


def fixes(sizes: Sizes, largest: Pass, target: memory.Target, *, checkpointed: bool) -> list[Text | str]:
    """Return changes estimated to fit: fewer tracks per pass; activation checkpointing, with fewer tracks if needed."""

    def fits(rows: int, recompute: bool) -> bool:
        smaller = replace(largest, rows=rows, requested=-(-largest.requested * rows // largest.rows), of_step=2)
        return estimate(sizes, smaller, target, checkpointed=recompute).fits(target)

    found: list[Text | str] = []
    for recompute in sorted({checkpointed, True}):
        if not fits(1, recompute):
            continue
        rows = largest.rows
        while not fits(rows, recompute):
            rows //= 2
        requested = [] if recompute == checkpointed else ["--gradient_checkpointing=true"]
        requested += [] if rows == largest.rows else [f"--micro_batch_size={rows}"]
        found.append(" with ".join(requested))
    return found or [
        Text(
            "program.smaller-model",
            "a smaller --hidden_size, fewer --num_hidden_layers or a smaller --base_model: a pass of one "
            "track does not fit",
        ),
        Text("program.larger-device", "a device with more memory"),
    ]
