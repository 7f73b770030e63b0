"""Rules of the program qwen_lora, the size of its steps, and the stages of its curriculum. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ascendrun.options import GENERATED
from ascendrun.planner import model_rules, rules
from ascendrun.planner.models import LINEAR, Shape, Workload, passes_of, rounded_up, shape_of
from ascendrun.planner.training import PlanProblem, Rule, Training
from ascendrun.text import Text, listed

Stage = tuple[Fraction, tuple[Fraction, ...]]
"""(end, as a fraction of all steps; fractions of the levels, with sum 1)."""


class InvalidStagesError(ValueError):
    """The text of a schedule is invalid; `problem` has the reason."""

    def __init__(self, problem: PlanProblem) -> None:
        super().__init__(problem.code)
        self.problem = problem


def read_stages(texts: Sequence[Any], levels: int) -> list[Stage]:
    """Parse `0.3=80/20/0` for each stage: its end as a fraction of the steps, and the relative weights of the levels.
    Raises InvalidStagesError."""
    option = "curriculum_schedule"
    stages: list[Stage] = []
    for text in map(str, texts):
        end_text, _, parts_text = text.partition("=")
        try:
            end, parts = Fraction(end_text.strip()), [Fraction(part.strip()) for part in parts_text.split("/")]
        except (ValueError, ZeroDivisionError):
            raise InvalidStagesError(PlanProblem.of("stage-form", option, text=text)) from None
        if len(parts) != levels or min(parts) < 0 or not sum(parts):
            problem = PlanProblem.of("stage-parts", option, end=float(end), parts=len(parts), levels=levels)
            raise InvalidStagesError(problem)
        stages.append((end, tuple(part / sum(parts) for part in parts)))
    ends = [end for end, _ in stages]
    if ends != sorted(set(ends)) or not ends or ends[-1] != 1 or ends[0] <= 0:
        raise InvalidStagesError(PlanProblem.of("stage-order", option))
    return stages


def difficulty_problems(counts: Mapping[str, int], levels: Sequence[str], wanted: str) -> Iterator[PlanProblem]:
    """Report difficulties that the schedule cannot place. `counts`: samples by difficulty, "": without one. `wanted`:
    auto or on."""
    named = sorted(level for level in counts if level)
    if not named and wanted == "on":
        yield PlanProblem.of("no-difficulty", "curriculum")
    if named and counts.get(""):
        yield PlanProblem.of("some-difficulty", "data_path", missing=counts[""], all=sum(counts.values()))
    strange = [level for level in named if level not in levels]
    if strange:
        yield PlanProblem.of("unknown-level", "difficulty_levels", strange=strange, levels=list(levels))


def empty_stages(stages: Sequence[Stage], steps: int) -> Iterator[PlanProblem]:
    """Warn of stages between two steps."""
    start = Fraction(0)
    for number, (end, _) in enumerate(stages, start=1):
        near = range(max(0, int(start * steps) - 1), min(steps, int(end * steps) + 2))
        if not any(start <= Fraction(step, steps) < end for step in near):
            yield PlanProblem.of("stage-empty", "curriculum_schedule", is_fatal=False, stage=number, steps=steps)
        start = end


def stage_of(step: int, steps: int, stages: Sequence[Stage]) -> int:
    """Return the stage by steps done, not epochs: three epochs would never reach a stage that starts at 70 %."""
    return next(i for i, (end, _) in enumerate(stages) if Fraction(step, steps) < end)


TRAINS = ("train",)
PATHS = ("data_path", "val_data_path", "base_model", "mc_eval_path", "resume_from_checkpoint")
CHARS_PER_TOKEN = 3.0
"""Of English and code 3.5 to 4.5, of Chinese 1.5 to 2: used where no tokenizer ran, with a range of both sides."""
SYNTHETIC_TOKENS = 60
QLORA: Mapping[str, Text] = {
    "npu": listed("program.qlora-npu"),
    "cpu": listed("program.qlora-cpu"),
    "cuda": listed("program.qlora-cuda"),
}
"""Why no quantised base is supported."""


def inputs(training: Training) -> dict[str, str]:
    """Return the paths that the training reads, by option."""
    return {
        name: str(value)
        for name in PATHS
        if (value := training.options.get(name))
        and value != GENERATED
        and (name != "resume_from_checkpoint" or value not in ("auto", "never"))
    }


def presets() -> dict[str, dict[str, Any]]:
    """Return the configuration of each model_preset."""
    shapes = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return {name: {"model_type": "qwen2", "max_position_embeddings": 32768, **shape} for name, shape in shapes.items()}


def config_of(training: Training) -> Mapping[str, Any] | None:
    """Return the configuration of the base model; None: unknown."""
    if not training.options["base_model"]:
        return presets().get(str(training.options["model_preset"]))
    raw = training.first(str(training.options["base_model"]))
    config = raw.get("config") if raw is not None else None
    return config if isinstance(config, Mapping) else None


def shape(training: Training) -> Shape | None:
    config = config_of(training)
    return None if config is None else shape_of(config)


def linear_names(training: Training) -> list[str]:
    """Return the linear layers that may have an adapter: by the weights where they are known."""
    raw = training.first(str(training.options["base_model"])) if training.options["base_model"] else None
    found = {
        name.split(".")[-2]
        for name, (_, sizes, _) in ((raw or {}).get("tensors") or {}).items()
        if name.endswith(".weight") and len(sizes) == 2 and "embed" not in name and ".*." in name
    }
    return sorted(found | {"lm_head"}) if found else sorted((*LINEAR, "lm_head"))


def data_facts(training: Training) -> Mapping[str, Any] | None:
    path = rules.data_file(training)
    raw = training.first(path) if path else None
    files = (raw or {}).get("files") or ()
    return files[0] if files and files[0].get("rows") and "chars" in files[0] else None


def is_generated(training: Training) -> bool:
    return bool(training.options["data_path"] == GENERATED)


def train_rows(training: Training) -> int | None:
    options = training.options
    facts = data_facts(training)
    count = (
        int(facts["rows_estimate"]) if facts else int(options["synthetic_samples"]) if is_generated(training) else None
    )
    if count is None or options["val_data_path"] or not options["val_size"]:
        return count
    return count - int(max(1, round(count * options["val_size"])))


def steps(training: Training) -> int | None:
    """Return the number of steps; None: the data is unknown."""
    return steps_of(training.options, train_rows(training))


def steps_of(options: Mapping[str, Any], rows: int | None) -> int | None:
    if options["max_steps"]:
        return int(options["max_steps"])
    epoch = None if rows is None else -(-max(1, rows) // int(options["global_batch_size"]))
    return None if epoch is None else int(options["num_train_epochs"]) * epoch


def workload(training: Training) -> Workload | None:
    """Return the size of the steps; None: the model is unknown."""
    model = shape(training)
    if model is None:
        return None
    options, facts = training.options, data_facts(training)
    cutoff, batch, ranks = int(options["cutoff_len"]), int(options["global_batch_size"]), training.ranks
    mean, learned = float(SYNTHETIC_TOKENS), 0.3
    if facts and facts["chars"]:
        mean = min(float(cutoff), facts["chars"] / facts["rows"] / CHARS_PER_TOKEN + 12)
        learned = facts["learned_chars"] / facts["chars"]
    multiple = int(options["pad_to_multiple_of"])
    tokens = batch * mean
    if options["packing"]:
        rows = max(1, -(-int(tokens) // cutoff))
        rows = min(batch, -(-rows // ranks) * ranks)
        length = min(cutoff, int(1.1 * tokens / rows) + 1)
    else:
        rows, length = batch, int(min(cutoff, 2 * mean))
    length = rounded_up(length, multiple)
    micro, passes = passes_of(options, rows, ranks)
    kept = max(multiple, rounded_up(int(length * min(1.0, learned * 1.2)), multiple))
    piece = {"rows": micro, "length": length, "kept": kept, "pieces": passes}
    is_exact = bool(facts) or is_generated(training)
    return work_of(options, model, piece, steps=steps(training), tokens=tokens, mean=mean, is_exact=is_exact)


def work_of(
    options: Mapping[str, Any],
    model: Shape | None,
    piece: Mapping[str, int],
    *,
    steps: int | None,
    tokens: float,
    mean: float,
    is_exact: bool = True,
) -> Workload | None:
    """Return the work of a training with these options. `piece`: rows, length and kept positions of the largest pass,
    pieces of a step. `tokens`: of a step of all ranks; `mean`: of a sample."""
    if model is None:
        return None
    trained = sum(
        int(options["lora_r"]) * sum(model.linear[name]) * model.layers
        for name in options["target_modules"]
        if name in model.linear
    )
    return Workload(
        model=model,
        trained=trained,
        is_frozen=True,
        steps=steps,
        samples_per_step=int(options["global_batch_size"]),
        tokens_per_step=tokens,
        mean_length=mean,
        micro_rows=piece["rows"],
        micro_length=piece["length"],
        micro_learned=piece["kept"],
        micro_batches=piece["pieces"],
        is_exact=is_exact,
        weight_bytes_saved=trained * 4,
        has_dropout=bool(options["lora_dropout"]),
    )


def check_inputs(training: Training) -> Iterator[PlanProblem]:
    for option, path in inputs(training).items():
        yield from rules.input_problems(training, option, path)
    if training.mode not in ("serve", "chat", "compare"):
        yield from rules.data_problems(training)
    for option in ("data_path", "val_data_path"):
        if path := {"data_path": rules.data_file(training)}.get(option, str(training.options[option])):
            yield from rules.rows_problems(training, option, path, "chat")
            yield from rules.same_data(training, option, path)
    if path := str(training.options["base_model"]):
        yield from model_rules.model_problems(training, path, needs_tokenizer=True)


def check_model(training: Training) -> Iterator[PlanProblem]:
    options = training.options
    if not options["base_model"] and str(options["model_preset"]) not in presets():
        yield PlanProblem.of("unknown-preset", "model_preset", name=str(options["model_preset"]))
    known = linear_names(training)
    unknown = [str(name) for name in options["target_modules"] if name not in known]
    if unknown and (config_of(training) is not None):
        yield replace(rules.unknown_names("target_modules", unknown, known), code="unknown-target")
    config = config_of(training)
    if config is None:
        return
    model = shape_of(config)
    if model is None:
        yield PlanProblem.of("no-sizes", "base_model")
    elif model.hidden % model.heads and not config.get("head_dim"):
        yield PlanProblem.of("heads-divide", "base_model", hidden=model.hidden, heads=model.heads)
    elif model.positions is not None and options["cutoff_len"] > model.positions:
        values = {"cutoff": options["cutoff_len"], "positions": model.positions}
        yield PlanProblem.of("over-positions", "cutoff_len", is_fatal=not scales_rotary(config), **values)


def scales_rotary(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration of a model asks for rotary embeddings beyond its positions."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return str(scaling.get("rope_type", scaling.get("type", "default"))) != "default"


def check_strategy(training: Training) -> Iterator[PlanProblem]:
    yield from rules.strategy_problems(training)
    if training.options["quantization_bit"] != "none":
        yield PlanProblem.of("no-qlora", "quantization_bit", family=training.family, why=QLORA[training.family])


def check_curriculum(training: Training) -> Iterator[PlanProblem]:
    options, facts, count = training.options, data_facts(training), steps(training)
    levels = [str(level) for level in options["difficulty_levels"]]
    if options["curriculum"] == "off":
        return
    try:
        found = read_stages(options["curriculum_schedule"], len(levels))
    except InvalidStagesError as error:
        yield error.problem
        return
    if not is_generated(training) and facts is None:
        return
    counts = facts["levels"] if facts else dict.fromkeys(levels, 1)
    yield from difficulty_problems(counts, levels, options["curriculum"])
    if count is not None and any(counts):
        yield from empty_stages(found, count)


def check_steps(training: Training) -> Iterator[PlanProblem]:
    yield from rules.steps_problems(training, steps(training))
    rows = train_rows(training)
    if rows == 0:
        yield PlanProblem.of("one-sample", "data_path")
    else:
        yield from rules.data_size_problems(training, rows)


RULES: tuple[Rule, ...] = (
    check_inputs,
    check_model,
    check_strategy,
    check_curriculum,
    check_steps,
    rules.batch_problems,
    rules.device_problems,
    rules.chip_problems,
)
