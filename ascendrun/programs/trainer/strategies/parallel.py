"""Wrap a model with the distributed strategy that was chosen."""

from __future__ import annotations

from typing import Any

from torch import nn

from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import STRATEGIES, Adam, Engine, Replicated


def wrap(
    module: nn.Module, here: Runtime, *, how: str = "ddp", adam: Adam, precision: Precision, **details: Any
) -> Engine:
    """`how`: ddp, fsdp2, zero3, or none; a single rank has nothing to share, so ddp means none there.

    `details`: fsdp2 takes offload; zero3 takes offload_optimizer and offload_weights.
    """
    assert how in STRATEGIES, how
    if how == "fsdp2":
        from ascendrun.programs.trainer.strategies.fsdp2 import FullySharded

        return FullySharded(module, here, adam=adam, precision=precision, **details)
    if how == "zero3":
        from ascendrun.programs.trainer.strategies.zero3 import ZeroEngine

        return ZeroEngine(module, here, adam=adam, precision=precision, **details)
    kind = Engine if how == "none" or here.control is None else Replicated
    return kind(module, here, adam=adam, precision=precision)
