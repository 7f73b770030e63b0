"""Rules that several programs share: paths, base models and data as the nodes have them, batches, steps, devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ascendrun.facts.chips import chip_of
from ascendrun.facts.rows import ROLES
from ascendrun.options import GENERATED
from ascendrun.planner.cost import SHARDED
from ascendrun.planner.training import PlanProblem, Training
from ascendrun.text import Text, listed, suggestion


def data_file(training: Training) -> str:
    """Return the path of the data; empty: it is generated, or missing."""
    path = str(training.options["data_path"] or "")
    return "" if path == GENERATED else path


def data_problems(training: Training) -> Iterator[PlanProblem]:
    """Report that no data is named: a program does not train on generated data unless it is asked to."""
    if not training.options["data_path"]:
        yield PlanProblem.of("no-data-path", "data_path")


def input_problems(training: Training, option: str, path: str) -> Iterator[PlanProblem]:
    """Report an input path that a host does not have, cannot read, or that an earlier stage does not write."""
    if not path.startswith("/"):
        if not training.has_workdir and not training.is_from_stage(path):
            yield PlanProblem.of("not-written", option, path=path)
        return
    for host, raw in training.found(path).items():
        if raw.get("missing"):
            yield PlanProblem.of("not-found", option, (host,), path=path)
        elif "kind" not in raw:
            yield PlanProblem.of("unreadable", option, (host,), path=path, reason=str(raw.get("error")))


def same_data(training: Training, option: str, path: str) -> Iterator[PlanProblem]:
    """Report data that differs between the hosts: ranks would train on different samples."""
    marks = {
        host: [(file["name"], file["bytes"], file.get("mark")) for file in raw["files"]]
        for host, raw in training.found(path).items()
        if raw.get("kind") == "data"
    }
    first = next(iter(marks.values()), None)
    others = tuple(host for host, mark in marks.items() if mark != first)
    if others:
        yield PlanProblem.of("data-differs", option, others, path=path)


def row_problem(code: str, value: str = "", number: int = 0) -> Text:
    """Return what makes a row unusable, as a fault of facts.rows or facts.conversations has it."""
    if code == "key-missing":
        return listed("program.key-missing", key=value)
    if code == "unknown-role":
        return listed("program.unknown-role", number=number, role=value, known=list(ROLES))
    if code == "no-text":
        return listed("program.no-text", number=number)
    if code == "difficulty-type":
        return listed("program.difficulty-type", level=value)
    return ROW_FAULTS[code]


NOT_JSON = listed("program.line-not-json")
ROW_FAULTS: Mapping[str, Text] = {
    "too-deep": NOT_JSON,
    "not-json": NOT_JSON,
    "line-not-json": NOT_JSON,
    "not-a-list": listed("plan.row-not-a-list"),
    "unknown-format": listed("program.unknown-format"),
    "no-reply": listed("program.no-reply"),
    "text-form": listed("plan.row-text"),
}


def rows_problems(training: Training, option: str, path: str, form: str) -> Iterator[PlanProblem]:
    """Report JSON data that the program cannot read. `form`: chat or text."""
    for host, raw in training.found(path).items():
        if raw.get("kind") in ("folder", "model", "prepared"):
            yield PlanProblem.of("not-a-file", option, (host,), path=path)
        for file in raw.get("files", ()) if raw.get("kind") == "data" else ():
            if "error" in file:
                yield PlanProblem.of("unreadable", option, (host,), path=path, reason=file["error"])
            elif "not_utf8" in file:
                yield PlanProblem.of("not-utf8", option, (host,), path=path, at=file["not_utf8"])
            elif file.get("whole") and "columns" not in file and not file.get("rows") and not file.get("faults"):
                yield PlanProblem.of("no-rows", option, (host,), path=path)
            if file.get("faults"):
                place, *fault = file["faults"][0]
                bad = row_problem(*fault)
                yield PlanProblem.of("bad-row", option, (host,), path=path, row=place, fault=bad)
            elif "columns" in file or (file.get("forms") and set(file["forms"]) != {form}):
                yield PlanProblem.of("other-form", option, (host,), path=path)


def checkpoint_problems(training: Training) -> Iterator[PlanProblem]:
    """Report checkpoints of another training in the directory of this one. The ranks compare the rest: what is no
    option, and options that they choose themselves (None, or 0 of an integer)."""
    if not training.checkpoints or training.options.get("resume_from_checkpoint") == "never":
        return
    for host, raw in training.found(training.checkpoints).items():
        saved = raw.get("saved") or {"identity": {}, "name": ""}
        mine = {
            name: list(value) if isinstance(value, tuple) else value
            for name in saved["identity"]
            if (value := training.options.get(name)) is not None and not (type(value) is int and value == 0)
        }
        problem = other_training(f"{training.checkpoints}/{saved['name']}", saved["identity"], mine)
        if problem is not None:
            yield replace(problem, hosts=(host,))


def other_training(directory: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> PlanProblem | None:
    """Return the problem of a checkpoint with other values than `mine`; None: it has none."""

    def shown(value: Any) -> Any:
        return "(none)" if value in (None, "", []) else value

    differs = [
        listed("program.option-differs", name=name, old=shown(old), new=shown(value))
        for name, value in mine.items()
        if (old := theirs.get(name)) != value
    ]
    return PlanProblem.of("other-training", directory=directory, differs=differs) if differs else None


def compile_problems(training: Training) -> Iterator[PlanProblem]:
    """Report a compilation that cannot work."""
    way, family = str(training.options.get("compile", "none")), training.family
    if way == "none":
        return
    if (way == "torchair") != (family == "npu"):
        other = "torchair" if family == "npu" else "torch"
        yield PlanProblem.of("compile-device", "compile", way=way, family=family, other=other)
    if training.options.get("strategy") == "zero3":
        yield PlanProblem.of("compile-zero3", "compile", way=way)


def scales(training: Training) -> bool:
    """Return whether the training scales its loss: float16, by choice or as the chip has no bfloat16."""
    if training.scales is not None:
        return training.scales
    dtype = training.options.get("dtype", "auto")
    return dtype == "float16" or (dtype == "auto" and training.chip is not None and not training.chip.has_bf16)


def compute_bytes(training: Training) -> int:
    """Return the bytes of a number in the passes."""
    dtype = training.options.get("dtype", "auto")
    return 4 if dtype == "float32" or (dtype == "auto" and training.family == "cpu") else 2


def strategy_problems(training: Training, *, has_muon: bool = False) -> Iterator[PlanProblem]:
    """Report a strategy that these ranks, this precision or this optimizer exclude."""
    yield from engine_problems(training, has_muon=has_muon)
    options, ranks, strategy = training.options, training.ranks, str(training.options["strategy"])

    if strategy in SHARDED and ranks == 1:
        yield PlanProblem.of("one-rank", "strategy", is_fatal=False, strategy=strategy)
    if strategy == "none" and ranks > 1:
        yield PlanProblem.of("strategy-none", "strategy", ranks=ranks)
    if options.get("cpu_offload") and (strategy in ("none", "ddp") or ranks == 1):
        yield PlanProblem.of("offload", "cpu_offload")
    elif options.get("cpu_offload") and strategy == "auto" and scales(training) and not training.has_deepspeed:
        yield PlanProblem.of("offload-deepspeed", "cpu_offload")
    if strategy in SHARDED and options.get("auto_find_batch_size"):
        yield PlanProblem.of("find-batch-sharded", "auto_find_batch_size", strategy=strategy)


def engine_problems(training: Training, *, has_muon: bool = False) -> Iterator[PlanProblem]:
    """Report a strategy that cannot have a model of this precision or optimizer, whatever else the options are."""
    options, ranks, strategy = training.options, training.ranks, str(training.options["strategy"])
    if strategy in ("fsdp2", "hsdp") and scales(training):
        others = ["ddp"] if has_muon else ["ddp", "zero3"]
        yield PlanProblem.of("no-scaling", "strategy", strategy=strategy, others=others)
    if strategy == "zero3" and has_muon:
        yield muon_zero3()
    elif strategy == "zero3" and not training.has_deepspeed:
        yield PlanProblem.of("no-deepspeed", "strategy")
    size = int(options["shard_size"])
    if size and ranks > 1 and ranks % size and strategy in ("hsdp", "zero3", "auto"):
        near = [each for each in range(1, ranks + 1) if ranks % each == 0]
        yield PlanProblem.of("shard-size", "shard_size", ranks=ranks, size=size, near=near)


def muon_zero3() -> PlanProblem:
    return PlanProblem.of("muon-zero3", "strategy")


def device_problems(training: Training) -> Iterator[PlanProblem]:
    """Report what the device does not have."""
    yield from compile_problems(training)
    dtype = training.options.get("dtype")
    if dtype == "float16" and training.family == "cpu":
        yield PlanProblem.of("float16-cpu", "dtype")
    if dtype == "bfloat16" and training.chip is not None and not training.chip.has_bf16:
        yield PlanProblem.of("no-bfloat16", "dtype", chip=training.chip.name)


def batch_problems(training: Training) -> Iterator[PlanProblem]:
    """Warn of batches that do not divide among the ranks, with the nearest numbers that do."""
    if "global_batch_size" not in training.options:
        return
    options, ranks = training.options, training.ranks
    batch, micro = options["global_batch_size"], options["micro_batch_size"] or 1
    unit = ranks * micro
    if batch < ranks:
        yield PlanProblem.of(
            "idle-ranks", "global_batch_size", is_fatal=False, batch=batch, ranks=ranks, idle=ranks - batch, least=unit
        )
    elif batch % unit and not options.get("packing"):
        near = sorted({max(unit, batch // unit * unit), (batch // unit + 1) * unit})
        yield PlanProblem.of(
            "uneven-batch",
            "global_batch_size",
            is_fatal=False,
            batch=batch,
            unit=unit,
            ranks=ranks,
            micro=micro,
            near=near,
        )


def data_size_problems(training: Training, samples: int | None) -> Iterator[PlanProblem]:
    """Warn of a step that needs more samples than the data has. `samples` None: unknown."""
    batch = int(training.options["global_batch_size"])
    if samples is not None and samples < batch and data_file(training):
        yield PlanProblem.of("batch-over-data", "global_batch_size", is_fatal=False, batch=batch, rows=samples)


def steps_problems(training: Training, steps: int | None) -> Iterator[PlanProblem]:
    """Warn of a warm-up that is longer than the training."""
    warmup = training.options.get("warmup_steps")
    if steps is not None and warmup and warmup >= steps:
        shorter = max(1, steps // 20)
        yield PlanProblem.of(
            "warmup-too-long", "warmup_steps", is_fatal=False, warmup=warmup, steps=steps, least=shorter
        )


def chip_problems(training: Training) -> Iterator[PlanProblem]:
    name = training.options.get("chip")
    if name and chip_of(str(name)) is None:
        yield PlanProblem.of("unknown-chip", "chip", name=str(name))


def unknown_names(option: str, unknown: list[str], known: list[str]) -> PlanProblem:
    """Return the problem of names that a model, a file or a program does not have."""
    return PlanProblem.of("unknown-names", option, hint=suggestion(unknown[0], known), unknown=unknown, known=known)
