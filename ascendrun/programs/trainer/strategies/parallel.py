"""Selection of the engine for a distributed strategy."""

from __future__ import annotations

from torch import nn

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.distributed import ranks_of_host
from ascendrun.programs.trainer.optim import MakeOptimizer
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.compiled import compile_layers
from ascendrun.programs.trainer.strategies.engine import STRATEGIES, Engine, Replicated
from ascendrun.text import Text


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
    compile_layers(module, compile, family=here.family, strategy=strategy)
    if strategy in ("fsdp2", "hsdp"):
        from ascendrun.programs.trainer.strategies.fsdp2 import FullySharded

        size = None
        if strategy == "hsdp":
            size = check_shard_size(shard_size or ranks_of_host(here.world_size), here.world_size)
        return FullySharded(
            module, here, make_optimizer=make_optimizer, precision=precision, offload=offload, shard_size=size
        )
    if strategy == "zero3":
        from ascendrun.programs.trainer.strategies.zero3 import ZeroEngine

        if shard_size:
            check_shard_size(shard_size, here.world_size)
        return ZeroEngine(
            module, here, make_optimizer=make_optimizer, precision=precision, offload=offload, shard_size=shard_size
        )
    kind = Engine if strategy == "none" or here.control is None else Replicated
    return kind(module, here, make_optimizer=make_optimizer, precision=precision)


def check_shard_size(shard_size: int, world_size: int) -> int:
    problem = shard_size_problem(shard_size, world_size)
    if problem is not None:
        raise InvalidDataError.of([problem])
    return shard_size


def shard_size_problem(shard_size: int, world_size: int) -> Text | None:
    if world_size % shard_size == 0:
        return None
    return Text(
        "program.shard-size",
        "{ranks:plural rank ranks} cannot be divided into groups of {size}\n"
        "hint: set --shard_size to a divisor of {ranks}",
        ranks=world_size,
        size=shard_size,
    )
