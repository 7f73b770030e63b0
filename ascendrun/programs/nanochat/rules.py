"""Rules of the program nanochat, and the size of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ascendrun.options import GENERATED
from ascendrun.planner import rules
from ascendrun.planner.models import Workload, passes_of
from ascendrun.planner.training import PlanProblem, Rule, Training
from ascendrun.programs.nanochat import data_rules
from ascendrun.programs.nanochat import sizes as dials
from ascendrun.text import listed

TRAINS = ("base", *dials.ON_CHATS)
WITH_MODEL = (*dials.ON_CHATS, "evaluate", "export", "infer_bench", "chat", "serve")
"""Modes that read a model of an earlier stage, and no documents but for evaluate, which may."""
CHARACTERS = 1024
"""Assumed size of a vocabulary of characters that is not learned yet."""


def inputs(training: Training) -> dict[str, str]:
    """Return the paths that the stage reads, by option."""
    options = training.options
    if training.mode in WITH_MODEL:
        files = {f"mixture[{at}].file": task.get("file") for at, task in enumerate(options["mixture"])}
        found = {"model_dir": options["model_dir"], **files}
        if training.mode == "evaluate":
            found["data_path"] = options["data_path"]
        found["tokenizer_dir"] = options["tokenizer_dir"]
    elif training.mode == "report":
        found = {f"report_dirs[{at}]": path for at, path in enumerate(options["report_dirs"])}
    else:
        names = ("data_path", "tokenizer_dir") if training.mode == "base" else ("data_path",)
        found = {name: options[name] for name in names}
    return {name: str(path) for name, path in found.items() if path and path != GENERATED}


def check_inputs(training: Training) -> Iterator[PlanProblem]:
    for option, path in inputs(training).items():
        yield from rules.input_problems(training, option, path)
    if training.mode == "report" and not training.options["report_dirs"]:
        yield PlanProblem.of("no-report-dirs", "report_dirs")
    if training.mode in (*WITH_MODEL, "report"):
        return
    yield from rules.data_problems(training)
    if training.mode == "base" and not training.options["tokenizer_dir"]:
        yield PlanProblem.of("no-tokenizer-dir", "tokenizer_dir")


def check_model(training: Training) -> Iterator[PlanProblem]:
    """Refuse a stage without the model of an earlier one, and sequences longer than those it was trained with."""
    if training.mode not in WITH_MODEL:
        return
    path = str(training.options["model_dir"] or "")
    hint = listed("plan.base-first")
    if not path:
        yield PlanProblem.of("no-model-dir", "model_dir", hint=hint, mode=training.mode)
        return
    stage, raw = training.stage_at(path), training.first(path)
    model = model_at(training, path)
    if training.mode == "export" and is_checkpoint(raw):
        if not training.options["tokenizer_dir"]:
            yield PlanProblem.of("no-tokenizer-of-checkpoint", "tokenizer_dir", path=path)
        return
    if model is None and (stage is not None or raw is not None):
        yield PlanProblem.of("no-chat-model", "model_dir", hint=hint, path=path)
    if model is None:
        return
    options, context = dials.settled(training.options, model), dials.Sizes.of_config(model).context
    length = int(options["max_seq_len"]) if training.mode in dials.ON_CHATS else 0
    if training.mode == "infer_bench" and int(options["prompt_tokens"]) > context - 2:
        yield too_long("prompt_tokens", int(options["prompt_tokens"]), context, most=context - 2)
    if length > context:
        yield too_long("max_seq_len", length, context, most=context)


def too_long(option: str, length: int, context: int, *, most: int) -> PlanProblem:
    """Return the problem of sequences that are longer than those that a model was trained with."""
    return PlanProblem.of("long-context", option, length=length, context=context, most=most)


def is_checkpoint(raw: Mapping[str, Any] | None) -> bool:
    """Return whether a directory has checkpoints of nanochat itself."""
    return any(str(name).startswith("model_") and str(name).endswith(".pt") for name in (raw or {}).get("names", ()))


# --- sizes ---


def vocabulary_of(training: Training, options: dict[str, Any]) -> int:
    """Return the tokens of a base model's tokenizer; before it is learned those that it is asked for."""
    path = str(options["tokenizer_dir"] or "")
    stage, raw = training.stage_at(path), training.first(path)
    tokens = ((raw or {}).get("tokenizer") or {}).get("tokens")
    if tokens:
        return int(tokens)
    if stage is not None and stage["tokenizer"] == "chars":
        return CHARACTERS
    return int((options if stage is None else stage)["vocab_size"])


def model_at(training: Training, path: str) -> dict[str, Any] | None:
    """Return the configuration of the model in a directory, or that an earlier stage will write there; None: unknown,
    or it is of another program."""
    stage, raw = training.stage_at(path), training.first(path)
    if stage is None:
        config = (raw or {}).get("config")
        try:
            dials.Sizes.of_config(config or {})
        except (KeyError, TypeError, ValueError):
            return None
        return dict(config or {})
    before = model_at(training, str(stage["model_dir"])) if stage["mode"] in dials.ON_CHATS else None
    if stage["mode"] not in TRAINS or stage["mode"] in dials.ON_CHATS and before is None:
        return None
    options = dials.settled(stage, before)
    if before is None:
        sizes = dials.Sizes.of(options, vocabulary_of(training, options))
        options["total_batch_size"] = dials.horizon_of(sizes, options).batch_tokens
        before = dials.config_of(sizes)
    return {**before, "training": {name: options[name] for name in dials.INHERITED}}


def planned(training: Training) -> tuple[dict[str, Any], dials.Sizes | None]:
    """Return the options with their defaults, and the sizes of the model; None: they are not known yet."""
    if training.mode not in dials.ON_CHATS:
        options = dials.settled(training.options)
        return options, dials.Sizes.of(options, vocabulary_of(training, options))
    model = model_at(training, str(training.options["model_dir"] or ""))
    return dials.settled(training.options, model), None if model is None else dials.Sizes.of_config(model)


def length_of(training: Training, options: dict[str, Any], sizes: dials.Sizes) -> dials.Horizon:
    if training.mode in dials.ON_CHATS:
        return dials.chat_horizon(sizes, options, int(options["max_steps"]))
    return dials.horizon_of(sizes, options)


def check_sizes(training: Training) -> Iterator[PlanProblem]:
    if training.mode != "base":
        return
    options, sizes = planned(training)
    assert sizes is not None
    if sizes.head % 2:
        yield PlanProblem.of("head-dim", "head_dim", head=sizes.head)
    if sizes.heads % sizes.kv_heads:
        near = [each for each in range(1, sizes.heads + 1) if sizes.heads % each == 0]
        yield PlanProblem.of("kv-heads", "kv_heads", kv_heads=sizes.kv_heads, heads=sizes.heads, near=near)
    if not sizes.window_pattern or set(sizes.window_pattern) - set("SL"):
        yield PlanProblem.of("window-pattern", "window_pattern", pattern=str(options["window_pattern"]))
    if not sizes.is_classic and sizes.hidden < dials.SMEAR_CHANNELS:
        yield PlanProblem.of("narrow-model", "aspect_ratio", hidden=sizes.hidden, least=dials.SMEAR_CHANNELS)


def check_batch(training: Training) -> Iterator[PlanProblem]:
    """Refuse a batch that the ranks cannot share in whole passes, with the nearest that they can."""
    if training.mode in TRAINS:
        yield from rules.strategy_problems(training, has_muon=True)
    if training.mode not in TRAINS or training.mode == "rl":
        return
    options, sizes = planned(training)
    if sizes is not None:
        yield from batch_refusals(options, length_of(training, options, sizes), training.ranks)


def batch_refusals(options: Mapping[str, Any], horizon: dials.Horizon, ranks: int) -> Iterator[PlanProblem]:
    """Refuse a batch that is not a multiple of what the ranks compute in one pass."""
    length, rows = int(options["max_seq_len"]), int(options["micro_batch_size"]) or 1
    batch, unit = horizon.batch_tokens, length * rows * ranks
    near = [each for each in (batch // unit * unit, (batch // unit + 1) * unit) if each]
    asked = int(options.get("target_examples_per_step") or 0) if options["mode"] in dials.ON_CHATS else 0
    if batch % unit == 0:
        return
    if not asked:
        yield PlanProblem.of(
            "batch-tokens", "total_batch_size", batch=batch, unit=unit, ranks=ranks, rows=rows, length=length, near=near
        )
        return
    near = [each // length for each in near]
    hint = listed("plan.batch-examples-near", near=near)
    if asked % ranks == 0:
        fewer = max(each for each in range(1, rows + 1) if asked // ranks % each == 0)
        hint = listed("plan.batch-examples-or", near=near, fewer=fewer)
    yield PlanProblem.of(
        "batch-examples", "target_examples_per_step", hint=hint, asked=asked, unit=ranks * rows, ranks=ranks, rows=rows
    )


def check_replies(training: Training) -> Iterator[PlanProblem]:
    """Refuse questions that the ranks cannot share equally, and settings of rl that train nothing."""
    if training.mode != "rl":
        return
    options = dials.settled(training.options)
    asked, ranks = int(options["target_examples_per_step"]), training.ranks
    if asked % ranks:
        near = [each for each in (asked // ranks * ranks, (asked // ranks + 1) * ranks) if each]
        yield PlanProblem.of("rl-questions", "target_examples_per_step", asked=asked, ranks=ranks, near=near)
    if int(options["num_samples"]) < 2:
        yield PlanProblem.of("rl-samples", "num_samples", samples=options["num_samples"])
    if int(options["rollout_updates"]) > 1 and not options["clip"]:
        yield PlanProblem.of("rl-updates", "rollout_updates")


def check_steps(training: Training) -> Iterator[PlanProblem]:
    if training.mode in TRAINS:
        options, sizes = planned(training)
        steps = None if sizes is None else length_of(training, options, sizes).steps or None
        yield from rules.steps_problems(replace(training, options=options), steps)


def workload(training: Training) -> Workload | None:
    if training.mode not in TRAINS:
        return None
    options, sizes = planned(training)
    if sizes is None:
        return None
    return work_of(options, sizes, length_of(training, options, sizes), ranks=training.ranks)


def work_of(options: Mapping[str, Any], sizes: dials.Sizes, horizon: dials.Horizon, *, ranks: int) -> Workload:
    """Return the work of a training with these options, all of them set."""
    length, is_rl = int(options["max_seq_len"]), options["mode"] == "rl"
    rows = max(1, horizon.batch_tokens // length)
    if is_rl:  # every reply as long as it may be
        rows = int(options["target_examples_per_step"]) * int(options["num_samples"])
    micro, passes = passes_of(options, rows, ranks)
    given: dict[str, Any] = {"mean_length": float(length), "micro_length": length, "micro_learned": micro * length}
    return dials.ChatWorkload(
        model=dials.shape_of(sizes),
        trained=sizes.weights,
        is_frozen=False,
        steps=None if is_rl else horizon.steps or None,  # replies take longer than the steps that the plan knows
        samples_per_step=rows,
        tokens_per_step=float(rows * length if is_rl else horizon.batch_tokens),
        micro_rows=micro,
        micro_batches=passes,
        is_exact=True,
        shares_state=bool(options["shard_optimizer"]),
        weight_bytes_saved=4 * sizes.weights,
        **given,
    )


RULES: tuple[Rule, ...] = (
    check_inputs,
    data_rules.check_texts,
    data_rules.check_tokenizer,
    check_model,
    data_rules.check_tasks,
    check_sizes,
    check_batch,
    check_replies,
    check_steps,
    rules.device_problems,
    rules.chip_problems,
)
ON_RANKS: tuple[Rule, ...] = (check_inputs, check_model, data_rules.check_tasks, check_sizes, check_replies)
"""Those that need no files of the nodes: the ranks check them too."""
