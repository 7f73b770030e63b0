"""The SFT task: batches of packed conversations, the loss on the assistant's replies, and its part per level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.trainer.data import Batch, Unit
from ascendrun.programs.trainer.packing import IGNORED, pack_rows
from ascendrun.programs.trainer.shards import Encoded
from ascendrun.programs.trainer.task import Loss, Part, Task

NO_LEVEL = -1


@dataclass(frozen=True)
class Rows:
    """Factory of batches; holds only data that can be sent to a worker process."""

    samples: Sequence[Encoded]
    levels: Sequence[str]
    pad_id: int
    multiple: int

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        return self.batch(units)

    def batch(self, units: Sequence[Unit]) -> Batch:
        numbers = [number for unit in units for number in unit]
        samples = {number: self.samples[number] for number in numbers}
        ids = {number: sample.ids for number, sample in samples.items()}
        labels = {number: sample.labels for number, sample in samples.items()}
        packed = pack_rows(units, ids, labels, pad_id=self.pad_id, multiple=self.multiple)
        kept, targets = learned_places(packed["labels"], self.multiple)
        groups = {
            level: float(sum(samples[number].level == i for number in numbers)) for i, level in enumerate(self.levels)
        }
        tensors = {"ids": packed["ids"], "kept": kept, "targets": targets}
        if any(len(unit) > 1 for unit in units):
            tensors.update(positions=packed["positions"], segments=packed["segments"])
        if len(self.levels) > 1:
            levels = [[samples[number].level for number in unit] for unit in units]
            tensors["target_levels"] = levels_of(levels, packed["numbers"], kept, targets)
        return Batch(
            tensors,
            weight=float((targets != IGNORED).sum()),
            samples=len(numbers),
            groups=groups,
            tokens=sum(len(ids[number]) for number in numbers),
        )


def levels_of(
    levels: Sequence[Sequence[int]], numbers: torch.Tensor, kept: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the level of each target. `levels`: of the samples of each row; `numbers`: of the sample of each token."""
    found = torch.full_like(targets, NO_LEVEL)
    for row, of_row in enumerate(levels):
        found[row] = torch.tensor([NO_LEVEL, *of_row])[numbers[row, kept]]
    return torch.where(targets == IGNORED, torch.full_like(found, NO_LEVEL), found)


def learned_places(labels: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (positions whose next token is trained on in some row, that token in each row or IGNORED).

    The model predicts only there, which shrinks its largest tensor, positions x vocabulary. The number of positions is
    rounded up with positions that have no target.
    """
    following = torch.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    places = (following != IGNORED).any(0).nonzero().flatten()
    size = -(-max(1, len(places)) // multiple) * multiple
    kept = torch.zeros(size, dtype=torch.int64)
    kept[: len(places)] = places
    targets = torch.full((labels.shape[0], size), IGNORED, dtype=torch.int64)
    targets[:, : len(places)] = following[:, places]
    return kept, targets


def forward(model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
    """Return the losses of all targets, rows x kept positions, in float32."""
    given: dict[str, Any] = {"input_ids": tensors["ids"], "logits_to_keep": tensors["kept"], "use_cache": False}
    if "positions" in tensors:
        given.update(position_ids=tensors["positions"], segments=tensors.get("segments"))
    logits = model(**given).logits.float()
    losses = functional.cross_entropy(
        logits.flatten(0, 1), tensors["targets"].flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view(tensors["targets"].shape)


class Instructions(Task):
    """Training task: predict the assistant's replies."""

    def __init__(self, rows: Rows, *, evaluate: Callable[[str, int], dict[str, float]]) -> None:
        self.rows, self.evaluate = rows, evaluate  # type: ignore[assignment,method-assign]
        self.collate = rows.collate  # type: ignore[method-assign]  # of Rows, because a worker process gets a copy of it
        self.parts = tuple(rows.levels) if len(rows.levels) > 1 else ()

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> Loss:
        losses = forward(model, tensors)
        if not self.parts:
            return losses.sum()
        parts: dict[str, Part] = {}
        for i, level in enumerate(self.parts):
            mine = tensors["target_levels"] == i
            parts[level] = ((losses.detach() * mine).sum(), mine.sum())
        return losses.sum(), parts


def largest_micro_batch(
    rows: Rows,
    plan_units: Callable[[int], Sequence[Unit]],
    *,
    steps: int,
    world_size: int,
    micro_batch: int,
    looked_at: int = 8,
) -> dict[str, int]:
    """Return {rows, length, kept, pieces}: the maxima over the pieces of a few steps, for the memory estimate."""
    from ascendrun.programs.trainer.data import deal

    found = {"rows": 1, "length": 1, "kept": 1, "pieces": 1}
    for step in sorted({int(each) for each in np.linspace(0, steps - 1, looked_at)}):
        units = plan_units(step)
        pieces: list[list[Unit]] = deal(units, 0, world_size, micro_batch=micro_batch)
        for piece in pieces:
            if piece:
                tensors = rows.batch(piece).tensors
                seen = {
                    "rows": len(piece),
                    "length": tensors["ids"].shape[1],
                    "kept": len(tensors["kept"]),
                    "pieces": len(pieces),
                }
                found = {name: max(found[name], seen[name]) for name in found}
    return found
