"""Dropout by sample: what is dropped follows from the seed, the step, the number of the sample and the place in it.

So a training continues on another number of ranks, in other rows, with the same numbers dropped. Torch's own dropout
draws them in the order of a rank's rows: so do compiled layers, the probabilities of an attention, and rollouts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ascendrun.programs.trainer.data import FACTOR, Batch, Keys, seed_of


class SampleDropout(nn.Dropout):
    """Torch's dropout where the pass has no keys for a tensor of this shape. `number`: of this module in its model."""

    number: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = None if PASS is None else PASS.keys_for(x)
        if not self.training or self.p == 0 or PASS is None or found is None:
            return super().forward(x)
        columns = PASS.columns(self.number, x.shape[-1], x.device)
        mixed = found[..., None] ^ columns
        for _ in range(2):
            mixed = (mixed ^ (mixed >> 16 & 0xFFFF)) * FACTOR
        is_kept = ((mixed ^ mixed >> 16) & 0x7FFFFFFF) >= int(self.p * 2**31)
        return torch.where(is_kept, x / (1 - self.p), torch.zeros((), dtype=x.dtype, device=x.device))


class Pass:
    """A forward and backward pass of a step. What it recomputes is dropped as before."""

    def __init__(self, keys: Keys, seed: int, step: int) -> None:
        self.keys, self.seed, self.step = keys, seed, step
        self.made: dict[tuple[int, int], torch.Tensor] = {}

    def keys_for(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the keys of all but the last dimension of a tensor; None: it has another shape."""
        keys = (self.keys.places, self.keys.samples)
        return next((each for each in keys if each.shape == x.shape[:-1]), None)

    def columns(self, number: int, width: int, device: torch.device) -> torch.Tensor:
        if (number, width) not in self.made:
            chance = torch.Generator().manual_seed(seed_of(self.seed, 5, self.step, number))
            made = torch.randint(-(2**31), 2**31, (width,), generator=chance, dtype=torch.int32)
            self.made[number, width] = made.to(device)
        return self.made[number, width]


PASS: Pass | None = None
"""The pass that runs: modules are called with a tensor only."""


def drop_by_sample(model: nn.Module) -> bool:
    """Make each dropout of a model one by sample, unless layers are compiled. Return whether any drops numbers."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        return False
    for number, module in enumerate(model.modules()):
        if type(module) is nn.Dropout:
            module.__class__ = SampleDropout
            module.number = number  # type: ignore[assignment]
    return any(isinstance(module, SampleDropout) and module.p > 0 for module in model.modules())


@contextlib.contextmanager
def pass_of(batch: Batch, device: torch.device, *, seed: int, step: int) -> Iterator[None]:
    global PASS
    PASS = None if batch.keys is None else Pass(batch.keys.to(device), seed, step)
    try:
        yield
    finally:
        PASS = None
