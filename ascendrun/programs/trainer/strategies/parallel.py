"""The layout of a training, as the planner chooses it: for ranks that start, and for the plan of a program; the engine
for it, and compilation of a model's repeated layers: by torch's inductor on CUDA and CPUs, by torchair on NPUs.

All layers have one code, so that it is compiled once; shapes may differ between steps. Attention has kernels of its
own and stays as it is. Evaluation and generation run uncompiled: they have other shapes.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ascendrun.facts.chips import chip_of
from ascendrun.planner import fitting, plan, rules
from ascendrun.planner.cost import Layout
from ascendrun.planner.models import Workload
from ascendrun.planner.training import PlanProblem, Rule, Training, judge
from ascendrun.programs.devices import attention
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError, ModelTooLargeError
from ascendrun.programs.trainer.distributed import ranks_of_host
from ascendrun.programs.trainer.optim import MakeOptimizer, OptimizerPlan
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import STRATEGIES, Engine, Replicated, repeated_layers
from ascendrun.text import listed

HERE = "localhost"


def training_of(options: Mapping[str, Any], here: Runtime, *, program: str = "") -> Training:
    """Return a training on these ranks and devices as the planner has it. `program`: that is planned: its options name
    ranks and a chip, which need not be here."""
    ranks = (program and options["world_size"]) or here.world_size
    named = options["chip"] if program else ""
    chip = chip_of(named) if named else here.accelerator.chip
    family = (chip.device_type if chip else "npu") if named else here.family
    memory_bytes = (chip.memory_bytes if chip else None) if named else here.accelerator.memory_total_bytes()
    return Training(
        program,
        options,
        frozenset(options),
        ranks,
        min(ranks, ranks_of_host(ranks)),
        (HERE,),
        family,
        chip,
        memory_bytes,
        has_workdir=True,
        has_deepspeed=bool(program) or find_spec("deepspeed") is not None,
    )


def log_plan(training: Training, work: Workload | None, here: Runtime) -> None:
    """Log the plan of a training with this work. Raises InvalidDataError for options that cannot be used,
    ModelTooLargeError if nothing fits."""
    found = plan.make_plan(training, fitting.devices_of(training), work=work)
    for line in plan.render(replace(found, problems=tuple(each for each in found.problems if not each.is_fatal))):
        here.log(line)
    if found.fatal:
        kind = ModelTooLargeError if found.fatal[0].code == "does-not-fit" else InvalidDataError
        raise kind.of([problem.text for problem in found.fatal])


def refuse(
    options: Mapping[str, Any], here: Runtime, precision: Precision, *found: Rule, has_muon: bool = False
) -> Training:
    """Return the training, and log what its rules warn of; without `found`, those of strategy, compilation and batch.
    Raises InvalidDataError with all options that cannot be used."""
    training = training_at(options, here, precision)
    usual = (partial(rules.strategy_problems, has_muon=has_muon), rules.compile_problems, rules.batch_problems)
    for problem in raise_fatal(training, *(found or usual)):
        here.log(listed("program.note", text=problem.message))
    return training


def refuse_options(program: str, options: Mapping[str, Any], here: Runtime) -> None:
    """Raise InvalidDataError with all problems of options that the plan refuses too: by the rules ON_RANKS of the
    program, which need no files of the nodes."""
    if find_spec(f"ascendrun.programs.{program}.rules") is not None:
        rules_of = import_module(f"ascendrun.programs.{program}.rules")
        raise_fatal(training_of(options, here), *getattr(rules_of, "ON_RANKS", ()))


def check(here: Runtime, precision: Precision, **options: Any) -> None:
    """Raise InvalidDataError with what no model can be wrapped with: strategy, shard_size and compile."""
    raise_fatal(training_at(options, here, precision), rules.engine_problems, rules.compile_problems)


def training_at(options: Mapping[str, Any], here: Runtime, precision: Precision) -> Training:
    dtype = str(precision.compute).removeprefix("torch.")
    return replace(training_of({**options, "dtype": dtype}, here), scales=precision.scales)


def raise_fatal(training: Training, *found: Rule) -> list[PlanProblem]:
    """Return the warnings of these rules. Raises InvalidDataError if there are other problems."""
    problems = judge(training, found)
    if any(problem.is_fatal for problem in problems):
        raise InvalidDataError.of([problem.text for problem in problems if problem.is_fatal])
    return list(problems)


def choose(
    options: Mapping[str, Any], here: Runtime, precision: Precision, work: Workload | None, *, has_muon: bool = False
) -> Layout:
    """Refuse what cannot be used, then `pick`. Raises InvalidDataError."""
    return pick(refuse(options, here, precision, has_muon=has_muon), work, here)


def pick(training: Training, work: Workload | None, here: Runtime) -> Layout:
    """Return the layout of a training with this work, as rank 0 chooses it: of those that the options allow the
    fastest that fits. If none is estimated to fit, that of the least memory, as an estimate may be wrong."""
    return here.share(cheapest(training, work, here) if here.is_first else None)  # type: ignore[return-value]


def cheapest(training: Training, work: Workload | None, here: Runtime) -> Layout:
    options, devices = training.options, fitting.devices_of(training)
    if work is None:
        strategy = "ddp" if fitting.has_choice(training) else options["strategy"]
        return Layout(strategy, bool(options["gradient_checkpointing"]), bool(options.get("cpu_offload")))
    choice = fitting.make_choice(training, work, devices)
    problems = list(fitting.memory_problems(training, work, choice, devices))
    if problems or len(choice.options) > 1:
        for line in plan.render_choice(choice, devices.memory_bytes):
            here.log(line)
    for problem in problems:
        here.log(listed("program.note", text=problem.message))
    return (choice.chosen or min(choice.options, key=lambda option: option.memory.total)).layout


def wrap_for(
    options: Mapping[str, Any],
    module: nn.Module,
    here: Runtime,
    *,
    work: Workload | None,
    make_optimizer: MakeOptimizer,
    precision: Precision,
    has_muon: bool = False,
) -> Engine:
    """Wrap a model for a training with these options, in the layout that `choose` finds. Raises InvalidDataError."""
    return wrap(
        module,
        here,
        strategy=choose(options, here, precision, work, has_muon=has_muon).strategy,
        shard_size=options["shard_size"],
        make_optimizer=make_optimizer,
        precision=precision,
        compile=options["compile"],
    )


def wrap(
    module: nn.Module,
    here: Runtime,
    *,
    strategy: str = "ddp",
    make_optimizer: MakeOptimizer = lambda module: OptimizerPlan(()),
    precision: Precision,
    offload: bool = False,
    shard_size: int = 0,
    compile: str = "none",
) -> Engine:
    """Wrap a model for a strategy, one of STRATEGIES; on a single rank ddp has no effect. `make_optimizer` is called
    with the model once it is cast, moved and sharded; by default nothing is trained.

    `offload`, for the sharded ones: weights and optimizer to host memory. `shard_size`, of hsdp and zero3: ranks that
    hold a whole model together; 0: those of a host for hsdp, all for zero3. `compile`: one of WAYS.
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


WAYS = ("none", "torch", "torchair")


def compile_layers(module: nn.Module, way: str, *, family: str) -> None:
    """Have each repeated layer compiled when it first runs. Raises InvalidDataError where that cannot work."""
    if way == "none":
        return
    if family == "cpu" and not has_compiler():
        raise InvalidDataError(listed("program.compile-no-compiler", way=way))
    backend = {"backend": torchair_backend()} if way == "torchair" else {}
    layers = repeated_layers(module)
    if not layers:
        raise InvalidDataError(listed("program.compile-no-layers", way=way))
    attention.OPAQUE[:] = [torch.compiler.disable(attention.attention)]  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=True, **backend)


def has_compiler() -> bool:
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


def torchair_backend() -> Any:
    """Return the backend that compiles for NPUs; torch_npu offers its torchair by this name. Not run on a real NPU."""
    try:
        torchair = importlib.import_module("torchair")
    except ImportError:
        raise InvalidDataError(listed("program.compile-no-torchair")) from None
    return torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())


def eager() -> AbstractContextManager[Any]:
    """Run what is compiled as it is written, where torch has a switch for it (2.6)."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None else stance("force_eager")
