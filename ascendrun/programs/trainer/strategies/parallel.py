"""Selection of the engine for a distributed strategy."""

from __future__ import annotations

from torch import nn

from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import STRATEGIES, Adam, Engine, Replicated


def wrap(
    module: nn.Module, here: Runtime, *, strategy: str = "ddp", adam: Adam, precision: Precision, offload: bool = False
) -> Engine:
    """Wrap a model for a strategy, one of STRATEGIES; on a single rank ddp has no effect. `offload`, for fsdp2 and
    zero3: weights and optimizer to host memory."""
    assert strategy in STRATEGIES, strategy
    if strategy == "fsdp2":
        from ascendrun.programs.trainer.strategies.fsdp2 import FullySharded

        return FullySharded(module, here, adam=adam, precision=precision, offload=offload)
    if strategy == "zero3":
        from ascendrun.programs.trainer.strategies.zero3 import ZeroEngine

        return ZeroEngine(module, here, adam=adam, precision=precision, offload=offload)
    kind = Engine if strategy == "none" or here.control is None else Replicated
    return kind(module, here, adam=adam, precision=precision)
