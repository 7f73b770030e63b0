"""What a training takes of one device, from the sizes of the model and the passes of its steps, before there is one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.trainer.data import Buckets, Loader
from ascendrun.programs.trainer.devices import cpu_kernels, fused_ops
from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.simulate import Shapes, Simulated, simulate_deep
from ascendrun.programs.trajectory.data import Options, multiple_of
from ascendrun.programs.trajectory.model import Reader, Sizes, TrackClassifier, WordGuesser, make_activations_anew
from ascendrun.programs.trajectory.train import micro_tokens_of
from ascendrun.text import Text

LOOKED_AT = 200
"""Steps of an epoch whose passes are looked at, evenly over it."""


@dataclass(frozen=True)
class Pass:
    """The largest forward and backward pass of one rank. `asked`: words that are to be guessed, 0: the class is.
    `of_step`: how many passes that step has."""

    rows: int
    length: int
    asked: int
    of_step: int


def heaviest(plan: Buckets, options: Options, *, family: str, world_size: int, asked_share: float) -> Pass:
    """`asked_share`: of the words, those to be guessed. Cropping makes tracks shorter, so this is the most."""
    loader = Loader(
        plan,
        lambda units, step: NotImplemented,
        rank=0,
        world_size=world_size,
        steps=0,
        micro_batch=options["micro_batch_size"],
        micro_tokens=micro_tokens_of(options, family),
        length_of=plan.length_of,
    )
    loader.close()
    multiple, found = multiple_of(options, family), Pass(0, 0, 0, 0)
    for step in sorted({int(each) for each in np.linspace(0, plan.steps_per_epoch - 1, LOOKED_AT)}):
        pieces = loader.pieces(plan.units(step))
        for piece in filter(None, pieces):
            lengths = [plan.length_of(unit) for unit in piece]
            width = -(-max(lengths) // multiple) * multiple
            asked = int(asked_share * sum(lengths)) + len(piece) if asked_share else 0
            seen = Pass(len(piece), width, asked, len(pieces))
            found = max(found, seen, key=lambda each: (each.rows * each.length, each.of_step))
    return found


def reckon(
    sizes: Sizes, heavy: Pass, *, precision: Precision, world_size: int, family: str, checkpointed: bool
) -> memory.Need:
    """Of a classifier, or of a guesser of words where the pass asks for some."""
    how = "none" if world_size == 1 else "ddp"
    return memory.needs(
        simulated(sizes, heavy, precision, family=family, checkpointed=checkpointed),
        how=how,
        world_size=world_size,
        precision=precision,
        pieces=heavy.of_step,
    )


def simulated(sizes: Sizes, heavy: Pass, precision: Precision, *, family: str, checkpointed: bool) -> Simulated:
    kind: Callable[[Sizes], Reader] = WordGuesser if heavy.asked else TrackClassifier

    def build(layers: int) -> nn.Module:
        model = kind(replace(sizes, config=with_layers(sizes.config, layers)))
        if checkpointed:
            make_activations_anew(model)
        if family == "cpu":
            fused_ops.fuse(model.backbone, cpu_kernels.OPERATORS, device="cpu")
        return model

    return simulate_deep(
        build,
        int(sizes.config["num_hidden_layers"]),
        guess if heavy.asked else classify,
        shapes_of(heavy),
        precision=precision,
    )


def shapes_of(heavy: Pass) -> Shapes:
    shapes = {"ids": ((heavy.rows, heavy.length), torch.int64), "lengths": ((heavy.rows,), torch.int64)}
    if heavy.asked:
        return {**shapes, **dict.fromkeys(("rows", "places", "words"), ((heavy.asked,), torch.int64))}
    return {**shapes, "labels": ((heavy.rows,), torch.int64)}


def classify(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(tensors["ids"], tensors["lengths"])
    return functional.cross_entropy(logits.float(), tensors["labels"], reduction="sum")


def guess(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(tensors["ids"], tensors["lengths"], tensors["rows"], tensors["places"])
    return functional.cross_entropy(logits.float(), tensors["words"], reduction="sum")


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    shallow = {**copy.deepcopy(config), "num_hidden_layers": layers}
    if shallow.get("layer_types"):
        shallow["layer_types"] = shallow["layer_types"][:layers]
    return shallow


def fixes(
    sizes: Sizes,
    heavy: Pass,
    *,
    precision: Precision,
    world_size: int,
    family: str,
    card_bytes: int,
    checkpointed: bool,
) -> list[Text | str]:
    """What would fit, tried out: fewer tracks a pass, then activations made anew, then both."""

    def fits(rows: int, anew: bool) -> bool:
        smaller = replace(heavy, rows=rows, asked=-(-heavy.asked * rows // heavy.rows), of_step=2)
        need = reckon(sizes, smaller, precision=precision, world_size=world_size, family=family, checkpointed=anew)
        return memory.fits(need, card_bytes, family)

    found: list[Text | str] = []
    for anew in sorted({checkpointed, True}):
        if not fits(1, anew):
            continue
        rows = heavy.rows
        while not fits(rows, anew):
            rows //= 2
        asked = [] if anew == checkpointed else ["--gradient_checkpointing=true"]
        asked += [] if rows == heavy.rows else [f"--micro_batch_size={rows}"]
        found.append(" with ".join(asked))
    return found or [
        Text(
            "program.smaller-model",
            "a smaller --hidden_size, fewer --num_hidden_layers or a smaller --base_model: a pass of one "
            "track does not fit",
        ),
        Text("program.larger-device", "a device with more memory"),
    ]
