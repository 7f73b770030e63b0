"""The layout of a training, as the planner chooses it: for ranks that start, and for the plan of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ascendrun.facts.chips import chip_of
from ascendrun.planner import plan, rules
from ascendrun.planner.cost import Layout
from ascendrun.planner.training import PlanProblem, Rule, Training, judge
from ascendrun.planner.workload import Workload
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError, ModelTooLargeError
from ascendrun.programs.trainer.distributed import ranks_of_host
from ascendrun.programs.trainer.runtime import Runtime

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
    found = plan.make_plan(training, plan.devices_of(training), work=work)
    for line in plan.render(replace(found, problems=tuple(each for each in found.problems if not each.is_fatal))):
        here.log(line)
    if found.fatal:
        kind = ModelTooLargeError if found.fatal[0].code == "does-not-fit" else InvalidDataError
        raise kind.of([problem.text for problem in found.fatal])


def refuse(options: Mapping[str, Any], here: Runtime, precision: Precision, *, has_muon: bool = False) -> Training:
    """Return the training. Raises InvalidDataError with all options that exclude each other."""

    def strategy_problems(found: Training) -> Iterator[PlanProblem]:
        yield from rules.strategy_problems(found, has_muon=has_muon)

    training = training_at(options, here, precision)
    problems = raise_fatal(training, strategy_problems, rules.compile_problems, rules.batch_problems)
    for problem in problems:
        here.log("program.note", "note: {text}", text=problem.message)
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
    """Return the layout of a training with this work, as rank 0 chooses it: of those that the options allow the
    fastest that fits. If none is estimated to fit, that of the least memory, as an estimate may be wrong.

    Raises InvalidDataError.
    """
    training = refuse(options, here, precision, has_muon=has_muon)
    chosen: Any = None
    if here.is_first:
        chosen = cheapest(training, work, here)
    layout: Layout = here.share(chosen)
    return layout


def cheapest(training: Training, work: Workload | None, here: Runtime) -> Layout:
    options, devices = training.options, plan.devices_of(training)
    if work is None:
        strategy = "ddp" if options["strategy"] == "auto" else options["strategy"]
        return Layout(strategy, bool(options["gradient_checkpointing"]), bool(options.get("cpu_offload")))
    choice = plan.make_choice(training, work, devices)
    problems = list(plan.memory_problems(training, choice, devices))
    if problems or len(choice.options) > 1:
        for line in plan.render_choice(choice, devices.memory_bytes):
            here.log(line)
    for problem in problems:
        here.log("program.note", "note: {text}", text=problem.message)
    return (choice.chosen or min(choice.options, key=lambda option: option.memory.total)).layout
