"""Selection of the engine for a distributed strategy."""

from __future__ import annotations

from torch import nn

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.trainer.distributed import ranks_of_host
from ascendrun.programs.trainer.optim import MakeOptimizer
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.choice import check
from ascendrun.programs.trainer.strategies.compiled import compile_layers
from ascendrun.programs.trainer.strategies.engine import STRATEGIES, Engine, Replicated


def wrap(
    module: nn.Module,
    here: Runtime,
    *,
    strategy: str = "ddp",
    make_optimizer: MakeOptimizer,
    precision: Precision,
    offload: bool = False,
    shard_size: int = 0,
    compile: str = "none",
) -> Engine:
    """Wrap a model for a strategy, one of STRATEGIES; on a single rank ddp has no effect. `make_optimizer` is called
    with the model once it is cast, moved and sharded.

    `offload`, for the sharded ones: weights and optimizer to host memory. `shard_size`, of hsdp and zero3: ranks that
    hold a whole model together; 0: those of a host for hsdp, all for zero3. `compile`: see `compiled`.
    Raises InvalidDataError.
    """
    assert strategy in STRATEGIES, strategy
    if strategy == "hsdp":
        shard_size = shard_size or ranks_of_host(here.world_size)
    check(here, precision, strategy=strategy, shard_size=shard_size, compile=compile)
    compile_layers(module, compile, family=here.family)
    if strategy in ("fsdp2", "hsdp"):
        from ascendrun.programs.trainer.strategies.fsdp2 import FullySharded

        size = shard_size if strategy == "hsdp" else None
        return FullySharded(
            module, here, make_optimizer=make_optimizer, precision=precision, offload=offload, shard_size=size
        )
    if strategy == "zero3":
        from ascendrun.programs.trainer.strategies.zero3 import ZeroEngine

        return ZeroEngine(
            module, here, make_optimizer=make_optimizer, precision=precision, offload=offload, shard_size=shard_size
        )
    kind = Engine if strategy == "none" or here.control is None else Replicated
    return kind(module, here, make_optimizer=make_optimizer, precision=precision)
