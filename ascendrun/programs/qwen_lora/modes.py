"""The modes train, prepare and plan from start to end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendrun.facts.rows import Conversation
from ascendrun.planner.cost import Layout
from ascendrun.planner.models import flops_per_token, shape_of
from ascendrun.planner.workload import Workload
from ascendrun.programs import errors
from ascendrun.programs.devices import accelerator, attention, fused_ops, kernels
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import ProgramError
from ascendrun.programs.qwen_lora import base, chat_template, evaluation, lora
from ascendrun.programs.qwen_lora.curriculum import Course
from ascendrun.programs.qwen_lora.dataset import (
    Lessons,
    Texts,
    introduce,
    make_course,
    make_lessons,
    read_texts,
    texts_to_answer,
)
from ascendrun.programs.qwen_lora.evaluation import Question
from ascendrun.programs.qwen_lora.merge import merge
from ascendrun.programs.qwen_lora.rules import work_of
from ascendrun.programs.qwen_lora.sft_task import Instructions, largest_micro_batch
from ascendrun.programs.trainer import optim, runtime, schedule, shards
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.optim import MakeOptimizer
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import zero3
from ascendrun.programs.trainer.strategies.choice import choose, log_plan, refuse, training_of
from ascendrun.programs.trainer.strategies.engine import Engine, size_of
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings
from ascendrun.text import Text

Options = Mapping[str, Any]
FREE_TO_CHANGE = (
    "mode", "data_path", "val_data_path", "base_model", "output_dir", "device", "resume_from_checkpoint",
    "logging_steps", "save_steps", "strategy", "shard_size", "cpu_offload", "save_total_limit", "dist_timeout_s",
    "micro_batch_size", "dataloader_num_workers", "num_sample_prompts", "max_new_tokens", "mc_eval_path",
    "mc_max_samples", "save_merged_model", "max_time_s", "peak_tflops", "profile_dir", "chip", "world_size",
    "compare_dirs", "data_cache_dir", "on_save_failure", "gradient_checkpointing", "quantization_bit", "compile",
    "adapter_path", "loss_scale", "host", "port", "max_num_seqs", "max_model_len", "temperature", "top_p", "top_k",
)  # fmt: skip
"""Options that may differ between a checkpoint and the run that resumes from it; data is compared by content."""


def train(options: Options, here: Runtime) -> None:
    """Train, save the adapter, report. After a stop signal, save a checkpoint and return early."""
    started_s = time.monotonic()
    lora.refuse_qlora(options["quantization_bit"], here.family)
    questions = (
        evaluation.read_questions(Path(options["mc_eval_path"]), options["mc_max_samples"])
        if options["mc_eval_path"]
        else []
    )
    precision = accelerator.precision_of(options, here.accelerator)
    refuse(options, here, precision)
    folder, output = runtime.checkpoint_folder(options["output_dir"]), Path(options["output_dir"]).absolute()
    errors.check_writable(output)
    home = Path(options["base_model"]) if options["base_model"] else output / "base"
    with here.phase("data"):
        texts = read_texts(options)
        here.check_same(texts.digest)
        config, tokenizer = open_base(options, home, texts.train, here)
        lessons = make_lessons(texts, tokenizer, options, context=accelerator.worker_context(here.family))
        course = make_course(lessons, options, world_size=here.world_size)
    for line in [*introduce(lessons, course, options), precision.reason]:
        here.log(line)
    for problem in batch_problems(course, options, here.world_size):
        here.log("program.note", "note: {text}", text=problem)
    piece = largest_micro_batch(
        lessons.train,
        course.units,
        steps=course.steps,
        world_size=here.world_size,
        micro_batch=options["micro_batch_size"],
    )
    layout = choose(options, here, precision, work_on(course, options, config, piece, ranks=here.world_size))
    make_optimizer = optimizer_of(options, course.steps)
    model, engine, expected = make_engine(config, options, home, here, precision, layout, make_optimizer)
    loop = make_loop(options, lessons, course, engine, here, precision, folder, mean_length=mean_length(course))
    loop.resume(options["resume_from_checkpoint"])
    if not loop.run().is_complete:
        return
    if options["load_best_model_at_end"]:
        loop.load_best()
    save(engine, model, expected, options, home, output, lessons, here)
    scores = final_scores(engine, lessons, questions, options, here, output)
    if here.is_first:
        write_report(output, options, lessons, course, loop, layout, piece, scores, time.monotonic() - started_s)
    here.log("program.results", "adapter, report and samples: {output}", output=output)
    here.record(done=True, **{f"final_{name}": value for name, value in scores.items()})


def open_base(options: Options, home: Path, texts: Texts, here: Runtime) -> tuple[Any, Any]:
    """Return the base's configuration and tokenizer. A synthetic base is created here; rank 0 trains its tokenizer on
    the data."""
    if options["base_model"]:
        config = base.folder_config(home)
        return config, chat_template.load_tokenizer(home, template=options["template"])
    text = here.share(make_text(home, texts) if here.is_first else "")
    tokenizer = chat_template.wrap_tokenizer(text)
    words = max(base.shape_config(options["model_preset"]).vocab_size, len(tokenizer))
    base.make_base(
        home, base.shape_config(options["model_preset"], vocab_size=words), tokenizer, seed=options["seed"], here=here
    )
    return base.folder_config(home), tokenizer


def make_text(home: Path, texts: Texts) -> str:
    """Return the tokenizer of an existing base, which belongs to the run that is resumed, or train a new tokenizer."""
    made = home / "tokenizer.json"
    return made.read_text(encoding="utf-8") if made.is_file() else chat_template.make_tokenizer(texts.conversations)


def batch_problems(course: Course, options: Options, world_size: int) -> list[Text]:
    """Report ranks without rows, and passes that are not full. Rows are already even over the ranks."""
    rows = len(course.units(0))
    if rows < world_size:
        return [
            Text(
                "program.idle-ranks",
                "--global_batch_size={batch} makes {rows} sequences per step for {ranks} ranks; {idle} ranks "
                "have none\n"
                "hint: set at least {least}",
                batch=options["global_batch_size"],
                rows=rows,
                ranks=world_size,
                idle=world_size - rows,
                least=world_size,
            )
        ]
    micro = options["micro_batch_size"]
    if micro and rows % (world_size * micro):
        return [
            Text(
                "program.uneven-passes",
                "{rows} sequences per step are not divisible by {ranks} ranks x --micro_batch_size={micro}: "
                "some passes are not full",
                rows=rows,
                ranks=world_size,
                micro=micro,
            )
        ]
    return []


def work_on(course: Course, options: Options, config: Any, piece: Mapping[str, int], *, ranks: int) -> Workload | None:
    """Return the work of a training on these samples, for the planner; None: the model has an unknown form."""
    mean = mean_length(course)
    tokens = mean * options["global_batch_size"]
    return work_of(options, shape_of(config.to_dict()), piece, steps=course.steps, tokens=tokens, mean=mean)


def mean_length(course: Course) -> float:
    """Return the mean number of tokens that attend to each other: those of a sample, packed or not."""
    return float(course.lengths.mean())


def make_engine(
    config: Any,
    options: Options,
    home: Path,
    here: Runtime,
    precision: Precision,
    layout: Layout,
    make_optimizer: MakeOptimizer,
) -> tuple[Any, Engine, dict[str, Any]]:
    """Return (peft's model, the engine, adapter names and shapes). The base's weights go to their final device."""
    sound, reasons = kernels.sound_kernels(here.accelerator, precision.compute)
    for reason in reasons:
        here.log("program.not-fused", "not fused: {reason}", reason=reason)
    here.log("program.attention", "attention: {kernel}", kernel=attention.kernel_of(here.device.type).__name__)
    model, strategy = base.empty_model(config), layout.strategy
    if layout.recomputes:
        base.checkpoint_activations(model, strategy=strategy)
    model = lora.add_lora(model, options)
    replaced = fused_ops.fuse(model, kernels.operators_of(sound), device=here.accelerator.device.type)
    if replaced:
        here.log("program.fused", "fused operators: {names}", names=list(replaced))
    model.config.pad_token_id = getattr(config, "pad_token_id", None)
    with base.weights_of(home) as read:
        values = lora.first_values(model, seed=options["seed"], read=read, here=here)
    lora.put_values(model, values)
    expected = lora.trained_shapes(model)
    if strategy in ("none", "ddp"):
        base.load_whole(model, home, here, precision)
    elif strategy == "zero3":
        zero3.prepare(here)
        trained = sum(value.numel() for value in values.values())
        ds_config = zero3.configuration(
            precision, trained=trained, offload=layout.offloads, shard_size=options["shard_size"]
        )
        base.load_for_zero3(model, home, here, precision, ds_config)
    engine = wrap(
        model,
        here,
        strategy=strategy,
        make_optimizer=make_optimizer,
        precision=precision,
        offload=layout.offloads,
        shard_size=options["shard_size"],
        compile=options["compile"],
    )
    if strategy in ("fsdp2", "hsdp"):
        base.load_parts(engine.module, home)
    return model, engine, expected


def optimizer_of(options: Options, steps: int) -> MakeOptimizer:
    rate = schedule.of_options(options, steps, warmup=schedule.warmup_of(options, steps))
    return lambda model: optim.adamw(model, rate, weight_decay=options["weight_decay"], betas=(0.9, 0.999))


def make_loop(
    options: Options,
    lessons: Lessons,
    course: Course,
    engine: Engine,
    here: Runtime,
    precision: Precision,
    folder: Path,
    *,
    mean_length: float,
) -> Loop:
    def evaluate(name: str, step: int) -> dict[str, float]:
        return evaluation.loss_by_level(engine, lessons.val, here) if lessons.val.samples else {}

    instructions = Instructions(lessons.train, evaluate=evaluate)
    keeps_best = options["load_best_model_at_end"] and bool(lessons.val.samples)
    settings = Settings.of(
        options,
        steps=course.steps,
        eval_steps=(options["eval_steps"] or course.steps_per_epoch) if lessons.val.samples else 0,
        best="loss" if keeps_best else "",
        best_is_low=True,
        flops_per_token=flops_of(engine, mean_length),
    )
    return Loop(here, engine, course, instructions, settings, folder=folder, identity=identity_of(options, lessons))


def flops_of(engine: Engine, mean_length: float) -> float:
    config: Any = engine.module.config
    sizes = [(name, size_of(weight), weight.requires_grad) for name, weight in engine.module.named_parameters()]
    words = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return flops_per_token(
        parameters=sum(size for _, size, _ in sizes),
        trainable=sum(size for _, size, trained in sizes if trained),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mean_length=mean_length,
        embedding=words,
    )


def identity_of(options: Options, lessons: Lessons) -> dict[str, Any]:
    """Return the values that must be equal in a checkpoint and in the run that resumes from it."""
    kept = {name: value for name, value in options.items() if name not in FREE_TO_CHANGE}
    return {**kept, "data": lessons.digest[:16]}


def save(
    engine: Engine,
    model: Any,
    expected: Mapping[str, Any],
    options: Options,
    home: Path,
    output: Path,
    lessons: Lessons,
    here: Runtime,
) -> None:
    """Gather on all ranks; check and write on rank 0. Raises IncompleteAdapterError on every rank."""
    from safetensors import SafetensorError  # a full disk, in its message

    weights = lora.gathered(engine)
    problem: str | None = None
    if here.is_first:
        model.peft_config[lora.NAME].base_model_name_or_path = str(home.absolute())
        try:
            lora.save_adapter(weights, expected, model, output / "adapter", lessons.tokenizer)
            here.log(
                "program.adapter-saved",
                "adapter: {count} matrices, {numbers:,} values, complete: {path}",
                count=len(weights),
                numbers=sum(each.numel() for each in weights.values()),
                path=output / "adapter",
            )
            if options["save_merged_model"]:
                changed = merge(home, output / "adapter", output / "merged")
                here.log(
                    "program.merged",
                    "merged model, {count} weights changed: {path}",
                    count=changed,
                    path=output / "merged",
                )
        except (ProgramError, SafetensorError, OSError) as error:
            problem = str(error)
    problem = here.share(problem)
    if problem is not None:
        raise lora.IncompleteAdapterError(problem)


def final_scores(
    engine: Engine, lessons: Lessons, questions: Sequence[Question], options: Options, here: Runtime, output: Path
) -> dict[str, float]:
    """Evaluate the saved model. Write samples.jsonl on rank 0's node."""
    scores: dict[str, float] = {}
    if lessons.val.samples:
        scores = evaluation.loss_by_level(engine, lessons.val, here)
    if questions:
        pad_id = lessons.train.pad_id
        scores.update(evaluation.accuracy(engine, lessons.tokenizer, questions, here, options, pad_id=pad_id))
    asked = texts_to_answer(lessons, options["num_sample_prompts"])
    conversations = [conversation for _, conversation in asked]
    replies = evaluation.answers(engine, lessons.tokenizer, conversations, here, most=options["max_new_tokens"])
    answers = []
    for (number, conversation), reply in zip(asked, replies):
        question, expected = first_exchange(conversation)
        texts = {"question": question, "reply": reply, "expected": expected}
        answers.append({"sample": number, "level": conversation.level, **texts})
    if here.is_first and answers:
        replace_text(output / "samples.jsonl", "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in answers))
    here.log(
        "program.final", "final: {scores}", scores=" ".join(f"{name} {value:.4f}" for name, value in scores.items())
    )
    return scores


def first_exchange(conversation: Conversation) -> tuple[str, str]:
    """Return the first reply of the assistant, and the text before it; "": the reply starts the conversation."""
    at = next(i for i, (role, _) in enumerate(conversation.turns) if role == "assistant")
    return conversation.turns[at - 1][1] if at else "", conversation.turns[at][1]


def write_report(
    output: Path,
    options: Options,
    lessons: Lessons,
    course: Course,
    loop: Loop,
    layout: Layout,
    piece: Mapping[str, int],
    scores: Mapping[str, float],
    seconds: float,
) -> None:
    given = course.given_of(loop.progress.step)
    report = {
        "final": dict(scores),
        "validation": loop.progress.history,
        "options": dict(options),
        "curriculum": {
            "levels": list(lessons.table.levels),
            "notes": [str(note) for note in lessons.table.notes],
            "samples": given,
            "steps_by_stage": steps_by_stage(course),
        },
        "training": {
            "steps": loop.progress.step,
            "samples": sum(given.values()),
            "strategy": layout.strategy,
            "cpu_offload": layout.offloads,
            "gradient_checkpointing": layout.recomputes,
            "world_size": loop.here.world_size,
            "device": loop.here.accelerator.name,
            "seconds": round(seconds, 1),
            "memory_bytes": loop.here.accelerator.memory_bytes(),
            "largest_micro_batch": dict(piece),
        },
        "data": {"rows": len(lessons.train.samples), "cut": lessons.cut, "digest": lessons.digest},
    }
    replace_json(output / "report.json", report)


def steps_by_stage(course: Course) -> list[int]:
    counts = [0] * len(course.table.stages)
    for step in range(course.steps):
        counts[course.stage(step)] += 1
    return counts


def plan(options: Options, here: Runtime) -> None:
    """Estimate only, without a model or device. Raises ModelTooLargeError when the training cannot run."""
    training = training_of({**options, "mode": "train"}, here, program="qwen_lora")
    config = (
        base.folder_config(Path(options["base_model"]))
        if options["base_model"]
        else base.shape_config(options["model_preset"])
    )
    texts = read_texts(options)
    tokenizer = (
        chat_template.load_tokenizer(Path(options["base_model"]), template=options["template"])
        if options["base_model"]
        else chat_template.wrap_tokenizer(chat_template.make_tokenizer(texts.train.conversations))
    )
    lessons = make_lessons(texts, tokenizer, options)
    course = make_course(lessons, options, world_size=training.ranks)
    piece = largest_micro_batch(
        lessons.train,
        course.units,
        steps=course.steps,
        world_size=training.ranks,
        micro_batch=options["micro_batch_size"],
    )
    notes = [
        Text("program.note", "note: {text}", text=problem)
        for problem in batch_problems(course, options, training.ranks)
    ]
    for line in (*introduce(lessons, course, options), *notes):
        here.log(line)
    log_plan(training, work_on(course, options, config, piece, ranks=training.ranks), here)


def prepare(options: Options, here: Runtime) -> None:
    """Encode the data, which needs no device, and list the cache."""
    texts = read_texts(options)
    here.check_same(texts.digest)
    home = Path(options["base_model"]) if options["base_model"] else Path(options["output_dir"]).absolute() / "base"
    tokenizer = (
        chat_template.load_tokenizer(home, template=options["template"])
        if options["base_model"]
        else chat_template.wrap_tokenizer(here.share(make_text(home, texts.train) if here.is_first else ""))
    )
    make_lessons(texts, tokenizer, options)
    cache = Path(options["data_cache_dir"] or shards.default_cache())
    here.log("program.data-cache", "encoded data in {directory}:", directory=cache)
    for held in shards.listed(cache, now_s=time.time()):
        here.log(
            "program.data-held",
            "{key}  {rows:,} samples  {size:bytes}  last used {age:duration} ago",
            key=held.key,
            rows=held.rows,
            size=held.bytes,
            age=held.age_s,
        )
    here.record(done=True)
