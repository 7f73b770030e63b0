"""The strategy of a training: what excludes one, and the fastest that fits by the cost model of `ascendrun plan`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Callable

from ascendrun.planner import cost
from ascendrun.planner.workload import Workload
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.distributed import ranks_of_host
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.memory import Target
from ascendrun.programs.trainer.strategies.parallel import shard_size_problem
from ascendrun.text import Text


def has_deepspeed() -> bool:
    return find_spec("deepspeed") is not None


def devices_of(target: Target) -> cost.Devices:
    """Return the devices as the cost model has them. Processes on a CPU share its memory without a limit."""
    return cost.Devices(
        target.family,
        target.world_size,
        ranks_of_host(target.world_size),
        target.peak_flops,
        None if target.family == "cpu" else target.memory_bytes,
        compute_bytes=memory.width(target.precision.compute),
    )


def usable(options: Mapping[str, Any], target: Target, *, has_zero3: bool) -> tuple[str, ...]:
    """Return the strategies that `strategy: auto` may choose from. `has_zero3`: DeepSpeed is here, and has the rules of
    the optimizer."""
    if options.get("auto_find_batch_size"):
        return ("ddp",)
    has_zero3 = has_zero3 and options.get("compile", "none") == "none"
    return cost.strategies_for(devices_of(target), scales=target.precision.scales, has_deepspeed=has_zero3)


def refuse(
    options: Mapping[str, Any], *, world_size: int, precision: Precision, has_zero3: bool = True, has_muon: bool = False
) -> None:
    """Raise InvalidDataError with all unusable options, before anything is read or written. `has_zero3`: DeepSpeed is
    installed."""
    strategy, is_offloaded = options["strategy"], options.get("cpu_offload", False)
    is_sharded, problems = strategy in ("fsdp2", "hsdp", "zero3"), []
    if strategy in ("fsdp2", "hsdp") and precision.scales:
        problems.append(
            Text(
                "program.fsdp2-no-scaling",
                "strategy={strategy} has no loss scaling, and {reason}\nhint: set --strategy to one of {others}",
                strategy=strategy,
                reason=precision.reason,
                others=["ddp"] if has_muon else ["ddp", "zero3"],
            )
        )
    if is_sharded and world_size == 1:
        problems.append(
            Text(
                "program.one-rank",
                "strategy={strategy} requires at least 2 ranks, got 1\nhint: set --strategy=ddp, or use more devices",
                strategy=strategy,
            )
        )
    if strategy == "none" and world_size > 1:
        problems.append(
            Text(
                "program.strategy-none",
                "strategy=none is for 1 rank, got {ranks}\nhint: set --strategy=ddp or --strategy=auto",
                ranks=world_size,
            )
        )
    if strategy == "zero3" and has_muon:
        problems.append(
            Text(
                "program.muon-zero3",
                "strategy=zero3 does not support Muon: DeepSpeed updates flat parts of the weights\n"
                "hint: set --strategy=fsdp2",
            )
        )
    elif strategy == "zero3" and not has_zero3:
        problems.append(
            Text(
                "program.no-deepspeed",
                "strategy=zero3 requires deepspeed, which is not installed\n"
                "hint: pip install deepspeed, or set --strategy=fsdp2",
            )
        )
    if is_sharded and options.get("auto_find_batch_size"):
        problems.append(
            Text(
                "program.find-batch-sharded",
                "auto_find_batch_size cannot be combined with strategy={strategy}: a rank out of memory would leave "
                "the others waiting\nhint: set --micro_batch_size, or --strategy=ddp",
                strategy=strategy,
            )
        )
    if is_offloaded and (strategy in ("none", "ddp") or world_size == 1):
        problems.append(
            Text(
                "program.offload-needs-sharding",
                "cpu_offload requires a base that is sharded over at least 2 ranks\n"
                "hint: set --strategy=fsdp2 or --strategy=zero3 on two or more devices, or "
                "--cpu_offload=false",
            )
        )
    elif is_offloaded and precision.scales and not has_zero3:
        problems.append(
            Text(
                "program.offload-deepspeed",
                "cpu_offload with float16 requires deepspeed, which is not installed\nhint: pip install deepspeed",
            )
        )
    size = options["shard_size"]
    is_used = strategy in ("hsdp", "zero3") or (strategy == "auto" and world_size > 1)
    problem = shard_size_problem(size, world_size) if size and is_used else None
    problems += [] if problem is None else [problem]
    if problems:
        raise InvalidDataError.of(problems)


def choose(
    options: Mapping[str, Any],
    here: Runtime,
    precision: Precision,
    work: Callable[[], Workload | None],
    *,
    has_muon: bool = False,
) -> str:
    """Return the strategy of a training that `work` describes, as rank 0 chooses it. Raises InvalidDataError."""
    refuse(options, world_size=here.world_size, precision=precision, has_zero3=has_deepspeed(), has_muon=has_muon)
    if options["strategy"] != "auto" or here.world_size == 1:
        return "ddp" if options["strategy"] == "auto" else str(options["strategy"])
    target = memory.target_of(here.accelerator, options["dtype"], here.world_size)
    found: Any = None
    if here.is_first:
        found = cheapest(options, target, work(), has_zero3=has_deepspeed() and not has_muon)
    chosen, reason = here.share(found)
    here.log("program.chosen", "chosen: {layout}; {why}", layout=chosen, why=reason)
    return str(chosen)


def cheapest(
    options: Mapping[str, Any], target: Target, work: Workload | None, *, has_zero3: bool
) -> tuple[str, list[Text]]:
    """Return the fastest strategy that fits, and why; if none fits, that of the least memory. `work` None: unknown."""
    strategies = usable(options, target, has_zero3=has_zero3)
    if work is None or len(strategies) == 1:
        return strategies[0], [Text("program.only-strategy", "the only strategy available here")]
    layouts = [cost.Layout(each, options["gradient_checkpointing"]) for each in strategies]
    choice = cost.compare(work, devices_of(target), layouts, shard_size=options["shard_size"])
    if choice.chosen is not None:
        return choice.chosen.layout.strategy, [Text("program.fastest", "the fastest strategy that fits")]
    least = min(choice.options, key=lambda option: option.memory.total)
    return least.layout.strategy, [
        Text("program.none-fits", "the one with the least memory, as none is estimated to fit")
    ]
