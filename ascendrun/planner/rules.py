"""Rules that several programs share: paths, base models and data as the nodes have them, batches, steps, devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascendrun.facts.chips import chip_of
from ascendrun.facts.rows import ROLES
from ascendrun.options import GENERATED
from ascendrun.planner.cost import SHARDED
from ascendrun.planner.training import PlanProblem, Training
from ascendrun.text import Text, suggestion


def data_file(training: Training) -> str:
    """Return the path of the data; empty: it is generated, or missing."""
    path = str(training.options["data_path"] or "")
    return "" if path == GENERATED else path


def data_problems(training: Training) -> Iterator[PlanProblem]:
    """Report that no data is named: a program does not train on generated data unless it is asked to."""
    if not training.options["data_path"]:
        message = Text("plan.no-data-path", "args.data_path is required")
        hint = Text("plan.generated", "set it to your data, or to generated to try the program")
        yield PlanProblem("no-data-path", message, hint, "data_path")


def input_problems(training: Training, option: str, path: str) -> Iterator[PlanProblem]:
    """Report an input path that a host does not have, cannot read, or that an earlier stage does not write."""
    at = {"option": option, "path": path}
    if not path.startswith("/"):
        if not training.has_workdir and not training.is_from_stage(path):
            message = Text(
                "plan.not-written",
                "args.{option}: no earlier stage writes {path}, which is relative to the job's directory",
                **at,
            )
            hint = Text("plan.absolute", "write an absolute path, or the output_dir of an earlier stage")
            yield PlanProblem("not-written", message, hint, option)
        return
    for host, raw in training.found(path).items():
        if raw.get("missing"):
            message = Text("plan.not-found", "args.{option}: {path} not found", **at)
            hint = Text("plan.same-path", "copy it to the same path on every node")
            yield PlanProblem("not-found", message, hint, option, (host,))
        elif "kind" not in raw:
            yield unreadable(host, str(raw.get("error")), at)


def unreadable(host: str, reason: str, at: Mapping[str, str]) -> PlanProblem:
    message = Text("plan.unreadable", "args.{option}: cannot read {path}: {reason}", reason=reason, **at)
    return PlanProblem("unreadable", message, None, at["option"], (host,))


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
        message = Text(
            "plan.data-differs", "args.{option}: {path} differs from that of the first host", option=option, path=path
        )
        hint = Text("plan.copy-data", "copy the data of one host to all others")
        yield PlanProblem("data-differs", message, hint, option, others)


def row_problem(code: str, value: str = "", number: int = 0) -> Text:
    """Return what makes a row unusable, as a fault of facts.rows or facts.conversations has it."""
    if code == "key-missing":
        return Text("program.key-missing", "{key} is missing or not a string", key=value)
    if code == "unknown-role":
        return Text(
            "program.unknown-role",
            "message {number}: unknown role {role:quote}; expected one of {known}",
            number=number,
            role=value,
            known=list(ROLES),
        )
    if code == "no-text":
        return Text("program.no-text", "message {number} has no text", number=number)
    if code == "difficulty-type":
        return Text("program.difficulty-type", "difficulty: expected a string, got {level:quote}", level=value)
    return ROW_FAULTS[code]


NOT_JSON = Text("program.line-not-json", "not valid JSON")
ROW_FAULTS: Mapping[str, Text] = {
    "too-deep": NOT_JSON,
    "not-json": NOT_JSON,
    "line-not-json": NOT_JSON,
    "not-a-list": Text("plan.row-not-a-list", "expected a list of samples"),
    "unknown-format": Text("program.unknown-format", "expected instruction and output, messages, or conversations"),
    "no-reply": Text("program.no-reply", "no reply of the assistant, so there is nothing to train on"),
    "text-form": Text("plan.row-text", "text: expected a string"),
}


def rows_problems(training: Training, option: str, path: str, form: str) -> Iterator[PlanProblem]:
    """Report JSON data that the program cannot read. `form`: chat or text."""
    for host, raw in training.found(path).items():
        if raw.get("kind") in ("folder", "model", "prepared"):
            message = Text("plan.not-a-file", "args.{option}: {path}: expected a file", option=option, path=path)
            yield PlanProblem("not-a-file", message, None, option, (host,))
        for file in raw.get("files", ()) if raw.get("kind") == "data" else ():
            at = {"option": option, "path": path}
            if "error" in file:
                yield unreadable(host, file["error"], at)
            elif "not_utf8" in file:
                message = Text(
                    "plan.not-utf8", "args.{option}: {path}: not valid UTF-8 at byte {at:,}", at=file["not_utf8"], **at
                )
                hint = Text("plan.iconv", "convert the file: iconv -f ENCODING -t UTF-8")
                yield PlanProblem("not-utf8", message, hint, option, (host,))
            elif file.get("whole") and "columns" not in file and not file.get("rows") and not file.get("faults"):
                message = Text("plan.no-rows", "args.{option}: {path} has no samples", **at)
                yield PlanProblem("no-rows", message, None, option, (host,))
            if file.get("faults"):
                place, *fault = file["faults"][0]
                bad = row_problem(*fault)
                message = Text("plan.bad-row", "args.{option}: {path}: row {row}: {fault}", row=place, fault=bad, **at)
                hint = Text("plan.fix-rows", "fix or remove the sample")
                yield PlanProblem("bad-row", message, hint, option, (host,))
            elif "columns" in file or (file.get("forms") and set(file["forms"]) != {form}):
                message = Text("plan.other-form", "args.{option}: {path} has samples of another program", **at)
                yield PlanProblem("other-form", message, None, option, (host,))


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


def other_training(
    directory: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], more: Sequence[Text] = ()
) -> PlanProblem | None:
    """Return the problem of a checkpoint with other values than `mine`, or where `more` differs; None: it has none."""

    def shown(value: Any) -> Any:
        return "(none)" if value in (None, "", []) else value

    differs = [
        Text("program.option-differs", "{name} was {old}, is {new}", name=name, old=shown(old), new=shown(value))
        for name, value in mine.items()
        if (old := theirs.get(name)) != value
    ]
    if not differs and not more:
        return None
    message = Text(
        "program.other-training",
        "{directory} belongs to another training: {differs}",
        directory=directory,
        differs=[*differs, *more],
    )
    hint = Text(
        "plan.other-checkpoints", "use another checkpoint directory, the old options, or resume_from_checkpoint: never"
    )
    return PlanProblem("other-training", message, hint)


def compile_problems(training: Training) -> Iterator[PlanProblem]:
    """Report a compilation that cannot work."""
    way, family = str(training.options.get("compile", "none")), training.family
    if way == "none":
        return
    if (way == "torchair") != (family == "npu"):
        message = Text(
            "plan.compile-device", "args.compile: {way} does not compile for {family}", way=way, family=family
        )
        other = "torchair" if family == "npu" else "torch"
        hint = Text("plan.compile-other", "set compile: {other} or compile: none", other=other)
        yield PlanProblem("compile-device", message, hint, "compile")
    if training.options.get("strategy") == "zero3":
        message = Text(
            "plan.compile-zero3",
            "args.compile: {way} cannot be combined with strategy: zero3, which replaces weights during a pass",
            way=way,
        )
        hint = Text("plan.compile-none", "set compile: none, or another strategy")
        yield PlanProblem("compile-zero3", message, hint, "compile")


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
        message = Text("plan.one-rank", "args.strategy: {strategy} requires at least 2 ranks, got 1", strategy=strategy)
        hint = Text("plan.set-ddp", "set strategy: ddp, or use more devices")
        yield PlanProblem("one-rank", message, hint, "strategy")
    if strategy == "none" and ranks > 1:
        message = Text("plan.strategy-none", "args.strategy: none is for 1 rank, got {ranks}", ranks=ranks)
        hint = Text("plan.set-auto", "set strategy: ddp or strategy: auto")
        yield PlanProblem("strategy-none", message, hint, "strategy")
    if options.get("cpu_offload") and (strategy in ("none", "ddp") or ranks == 1):
        message = Text("plan.offload", "args.cpu_offload requires a base that is sharded over at least 2 ranks")
        hint = Text("plan.offload-hint", "set strategy: fsdp2 or zero3 on two or more devices, or cpu_offload: false")
        yield PlanProblem("offload", message, hint, "cpu_offload")
    elif options.get("cpu_offload") and strategy == "auto" and scales(training) and not training.has_deepspeed:
        message = Text("plan.offload-deepspeed", "args.cpu_offload with float16 requires deepspeed")
        hint = Text("plan.pip", "install it: pip install deepspeed")
        yield PlanProblem("offload-deepspeed", message, hint, "cpu_offload")
    if strategy in SHARDED and options.get("auto_find_batch_size"):
        message = Text(
            "plan.find-batch-sharded",
            "args.auto_find_batch_size cannot be combined with strategy: {strategy}: a rank out of memory would leave "
            "the others waiting",
            strategy=strategy,
        )
        hint = Text("plan.set-micro-batch", "set micro_batch_size, or strategy: ddp")
        yield PlanProblem("find-batch-sharded", message, hint, "auto_find_batch_size")


def engine_problems(training: Training, *, has_muon: bool = False) -> Iterator[PlanProblem]:
    """Report a strategy that cannot have a model of this precision or optimizer, whatever else the options are."""
    options, ranks, strategy = training.options, training.ranks, str(training.options["strategy"])
    if strategy in ("fsdp2", "hsdp") and scales(training):
        message = Text(
            "plan.no-scaling",
            "args.strategy: {strategy} does not support the loss scaling of float16",
            strategy=strategy,
        )
        others = ["ddp"] if has_muon else ["ddp", "zero3"]
        hint = Text("plan.set-others", "set strategy to one of {others}", others=others)
        yield PlanProblem("no-scaling", message, hint, "strategy")
    if strategy == "zero3" and has_muon:
        yield muon_zero3()
    elif strategy == "zero3" and not training.has_deepspeed:
        message = Text("plan.no-deepspeed", "args.strategy: zero3 requires deepspeed, which is not installed")
        hint = Text("plan.install-deepspeed", "pip install deepspeed, or set strategy: fsdp2")
        yield PlanProblem("no-deepspeed", message, hint, "strategy")
    size = int(options["shard_size"])
    if size and ranks % size and (strategy in ("hsdp", "zero3") or (strategy == "auto" and ranks > 1)):
        message = Text(
            "plan.shard-size",
            "args.shard_size: {ranks:plural rank ranks} cannot be divided into groups of {size}",
            ranks=ranks,
            size=size,
        )
        near = [each for each in range(1, ranks + 1) if ranks % each == 0]
        hint = Text("plan.shard-sizes", "set shard_size to one of {near}", near=near)
        yield PlanProblem("shard-size", message, hint, "shard_size")


def muon_zero3() -> PlanProblem:
    message = Text(
        "plan.muon-zero3", "args.strategy: zero3 does not support Muon: DeepSpeed updates flat parts of the weights"
    )
    return PlanProblem("muon-zero3", message, Text("plan.set-fsdp2", "set strategy: fsdp2"), "strategy")


def device_problems(training: Training) -> Iterator[PlanProblem]:
    """Report what the device does not have."""
    yield from compile_problems(training)
    dtype = training.options.get("dtype")
    if dtype == "float16" and training.family == "cpu":
        message = Text("plan.float16-cpu", "args.dtype: float16 is not supported on a CPU")
        hint = Text("plan.float16-cpu-hint", "set dtype: float32 or dtype: bfloat16")
        yield PlanProblem("float16-cpu", message, hint, "dtype")
    if dtype == "bfloat16" and training.chip is not None and not training.chip.has_bf16:
        message = Text("plan.no-bfloat16", "args.dtype: {chip} does not support bfloat16", chip=training.chip.name)
        hint = Text("plan.use-float16", "set dtype: float16 or dtype: auto")
        yield PlanProblem("no-bfloat16", message, hint, "dtype")


def batch_problems(training: Training) -> Iterator[PlanProblem]:
    """Warn of batches that do not divide among the ranks, with the nearest numbers that do."""
    if "global_batch_size" not in training.options:
        return
    options, ranks = training.options, training.ranks
    batch, micro = options["global_batch_size"], options["micro_batch_size"] or 1
    unit = ranks * micro
    if batch < ranks:
        message = Text(
            "plan.idle-ranks",
            "args.global_batch_size: {batch} samples for {ranks} ranks: {idle} ranks have none",
            batch=batch,
            ranks=ranks,
            idle=ranks - batch,
        )
        hint = Text("plan.batch-least", "set global_batch_size: {least} or more, or use fewer devices", least=unit)
        yield PlanProblem("idle-ranks", message, hint, "global_batch_size", is_fatal=False)
    elif batch % unit and not options.get("packing"):
        message = Text(
            "plan.uneven-batch",
            "args.global_batch_size: {batch} is not a multiple of {unit} ({ranks:plural rank ranks} x {micro}): some "
            "ranks wait",
            batch=batch,
            unit=unit,
            ranks=ranks,
            micro=micro,
        )
        near = sorted({max(unit, batch // unit * unit), (batch // unit + 1) * unit})
        hint = Text("plan.batch-near", "set global_batch_size to one of {near}", near=near)
        yield PlanProblem("uneven-batch", message, hint, "global_batch_size", is_fatal=False)


def data_size_problems(training: Training, samples: int | None) -> Iterator[PlanProblem]:
    """Warn of a step that needs more samples than the data has. `samples` None: unknown."""
    batch = int(training.options["global_batch_size"])
    if samples is not None and samples < batch and data_file(training):
        message = Text(
            "plan.batch-over-data",
            "args.global_batch_size: {batch} exceeds the {rows} samples of the data",
            batch=batch,
            rows=samples,
        )
        yield PlanProblem("batch-over-data", message, None, "global_batch_size", is_fatal=False)


def steps_problems(training: Training, steps: int | None) -> Iterator[PlanProblem]:
    """Warn of a warm-up that is longer than the training."""
    warmup = training.options.get("warmup_steps")
    if steps is not None and warmup and warmup >= steps:
        message = Text(
            "plan.warmup-too-long",
            "args.warmup_steps: {warmup} steps of warm-up, but the training has {steps}: the peak learning rate is not "
            "reached",
            warmup=warmup,
            steps=steps,
        )
        shorter = max(1, steps // 20)
        hint = Text("plan.shorter-warmup", "set warmup_steps: {steps} or less, or warmup_ratio: 0.05", steps=shorter)
        yield PlanProblem("warmup-too-long", message, hint, "warmup_steps", is_fatal=False)


def chip_problems(training: Training) -> Iterator[PlanProblem]:
    name = training.options.get("chip")
    if name and chip_of(str(name)) is None:
        message = Text("plan.unknown-chip", "args.chip: unknown chip {name:quote}", name=str(name))
        yield PlanProblem("unknown-chip", message, Text("plan.chip-examples", "examples: 910B3, 910A, H100"), "chip")


def known_names(option: str, unknown: list[str], known: list[str]) -> tuple[Text, Text | None]:
    """Return the message and hint for names that a model or file does not have."""
    message = Text(
        "plan.unknown-names",
        "args.{option}: {unknown} not found; there are {known}",
        option=option,
        unknown=unknown,
        known=known,
    )
    return message, suggestion(unknown[0], known)
