"""The modes train, prepare, plan and compare from start to end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendrun.facts.rows import Conversation
from ascendrun.planner.cost import Layout
from ascendrun.planner.models import shape_of
from ascendrun.programs import errors
from ascendrun.programs.devices import accelerator, attention, kernels
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError, ProgramError
from ascendrun.programs.qwen_lora import base, chat_template, dataset, lora, sft_task
from ascendrun.programs.qwen_lora.rules import RULES, check_curriculum, check_inputs, work_of
from ascendrun.programs.qwen_lora.sft_task import Instructions, Question, largest_micro_batch
from ascendrun.programs.trainer import optim, runtime, schedule, shards
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.optim import MakeOptimizer
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import zero3
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.parallel import log_plan, pick, raise_fatal, refuse, training_of, wrap
from ascendrun.programs.trainer.task import Settings, identity_of
from ascendrun.text import listed
from ascendrun.text.format import pad_left

Options = Mapping[str, Any]
FREE = "base_model", "gradient_checkpointing", "host", "max_new_tokens", "mode", "port", "temperature", "top_k", "top_p"
"""Options beside those of `identity_of` that may differ between a checkpoint and the run that resumes from it."""


class Study:
    """The samples of a training and their schedule, for `ranks` ranks. `piece`: see largest_micro_batch. `work`: for
    the planner, None: the model has an unknown form."""

    def __init__(self, lessons: dataset.Lessons, config: Any, options: Options, *, ranks: int) -> None:
        self.lessons, self.options, self.ranks = lessons, options, ranks
        self.course = course = dataset.make_course(lessons, options, world_size=ranks)
        micro_batch = options["micro_batch_size"]
        self.piece = largest_micro_batch(
            lessons.train, course.units, steps=course.steps, world_size=ranks, micro_batch=micro_batch
        )
        mean = float(course.lengths.mean())  # tokens that attend to each other: those of a sample, packed or not
        tokens = mean * options["global_batch_size"]
        shape = shape_of(config.to_dict())
        self.work = work_of(options, shape, self.piece, steps=course.steps, tokens=tokens, mean=mean)

    def introduce(self, here: Runtime) -> None:
        """Log the data, the schedule and, of packed rows, which only the data knows, passes that are not full."""
        for line in dataset.introduce(self.lessons, self.course, self.options):
            here.log(line)
        rows, micro = len(self.course.units(0)), self.options["micro_batch_size"]
        if self.options["packing"] and micro and rows >= self.ranks and rows % (self.ranks * micro):
            uneven = listed("program.uneven-passes", rows=rows, ranks=self.ranks, micro=micro)
            here.log(listed("program.note", text=uneven))


def train(options: Options, here: Runtime) -> None:
    """Train, save the adapter, report. After a stop signal, save a checkpoint and return early."""
    started_s, eval_path = time.monotonic(), options["mc_eval_path"]
    questions = sft_task.read_questions(Path(eval_path), options["mc_max_samples"]) if eval_path else []
    precision = accelerator.precision_of(options, here.accelerator)
    training = refuse(options, here, precision, *RULES)
    errors.check_writable(output_of(options))
    with here.phase("data"):
        texts = dataset.read_texts(options)
        here.check_same(texts.digest)
        config, tokenizer = open_base(options, texts.train, here)
        lessons = dataset.make_lessons(texts, tokenizer, options, context=accelerator.worker_context(here.family))
        study = Study(lessons, config, options, ranks=here.world_size)
    study.introduce(here)
    here.log(precision.reason)
    layout = pick(training, study.work, here)
    make_optimizer = optimizer_of(options, study.course.steps)
    home = home_of(options)
    model, engine, expected = make_engine(config, options, home, here, precision, layout, make_optimizer)
    loop = make_loop(options, study, engine)
    loop.resume(options["resume_from_checkpoint"])
    if not loop.run().is_complete:
        return
    if options["load_best_model_at_end"]:
        loop.load_best()
    save(engine, model, expected, options, tokenizer)
    scores = final_scores(engine, lessons, questions, options)
    if here.is_first:
        write_report(options, study, loop, layout, scores, time.monotonic() - started_s)
    here.log(listed("program.results", output=output_of(options)))
    here.record(done=True, **{f"final_{name}": value for name, value in scores.items()})


def output_of(options: Options) -> Path:
    return Path(options["output_dir"]).absolute()


def home_of(options: Options) -> Path:
    """Return the directory of the base; of a synthetic one it is in the output."""
    return Path(options["base_model"]) if options["base_model"] else output_of(options) / "base"


def open_base(options: Options, texts: dataset.Texts, here: Runtime) -> tuple[Any, Any]:
    """Return the base's configuration and tokenizer. A synthetic base is created here."""
    home = home_of(options)
    if options["base_model"]:
        config, tokenizer = base.folder_config(home), open_tokenizer(options, texts, here)
        base.check_tokenizer(home, config, tokenizer)
        return config, tokenizer
    tokenizer = open_tokenizer(options, texts, here)
    words = max(base.shape_config(options["model_preset"]).vocab_size, len(tokenizer))
    config = base.shape_config(options["model_preset"], vocab_size=words)
    base.make_base(home, config, tokenizer, seed=options["seed"], here=here)
    return base.folder_config(home), tokenizer


def open_tokenizer(options: Options, texts: dataset.Texts, here: Runtime) -> Any:
    """Return the base's tokenizer: that of its directory, which belongs to the run that is resumed, else of a synthetic
    base a new one that rank 0 trains on the data."""
    home = home_of(options)
    if options["base_model"]:
        return chat_template.load_tokenizer(home, template=options["template"])
    text, made = "", home / "tokenizer.json"
    if here.is_first:
        is_made = made.is_file()
        text = made.read_text(encoding="utf-8") if is_made else chat_template.make_tokenizer(texts.conversations)
    return chat_template.wrap_tokenizer(here.share(text))


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
        here.log(listed("program.not-fused", reason=reason))
    here.log(listed("program.attention", kernel=attention.kernel_of(here.device.type).__name__))
    model, strategy = base.empty_model(config), layout.strategy
    if layout.recomputes:
        base.checkpoint_activations(model, strategy=strategy)
    model = lora.add_lora(model, options)
    replaced = kernels.fuse(model, kernels.operators_of(sound), device=here.accelerator.device.type)
    if replaced:
        here.log(listed("program.fused", names=list(replaced)))
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


def make_loop(options: Options, study: Study, engine: Engine) -> Loop:
    here, lessons, course = engine.here, study.lessons, study.course

    def evaluate(name: str, step: int) -> dict[str, float]:
        return sft_task.loss_by_level(engine, lessons.val, here) if lessons.val.samples else {}

    keeps_best = options["load_best_model_at_end"] and bool(lessons.val.samples)
    settings = Settings.of(
        options,
        steps=course.steps,
        eval_steps=(options["eval_steps"] or course.steps_per_epoch) if lessons.val.samples else 0,
        best="loss" if keeps_best else "",
        best_is_low=True,
        flops_per_token=study.work.flops_per_token if study.work is not None else 0.0,
    )
    identity = identity_of(options, FREE, data=lessons.digest[:16])
    folder = runtime.checkpoint_folder(options["output_dir"])
    task = Instructions(lessons.train, evaluate=evaluate)
    return Loop(here, engine, course, task, settings, folder=folder, identity=identity)


def save(engine: Engine, model: Any, expected: Mapping[str, Any], options: Options, tokenizer: Any) -> None:
    """Gather on all ranks; check and write on rank 0. Raises IncompleteAdapterError on every rank."""
    from safetensors import SafetensorError  # a full disk, in its message

    here, home, output = engine.here, home_of(options), output_of(options)
    weights = lora.gathered(engine)
    problem: str | None = None
    if here.is_first:
        model.peft_config[lora.NAME].base_model_name_or_path = str(home.absolute())
        try:
            lora.save_adapter(weights, expected, model, output / "adapter", tokenizer)
            here.log(
                listed(
                    "program.adapter-saved",
                    count=len(weights),
                    numbers=sum(each.numel() for each in weights.values()),
                    path=output / "adapter",
                )
            )
            if options["save_merged_model"]:
                changed = lora.merge(home, output / "adapter", output / "merged")
                here.log(listed("program.merged", count=changed, path=output / "merged"))
        except (ProgramError, SafetensorError, OSError) as error:
            problem = str(error)
    problem = here.share(problem)
    if problem is not None:
        raise lora.IncompleteAdapterError(problem)


def final_scores(
    engine: Engine, lessons: dataset.Lessons, questions: Sequence[Question], options: Options
) -> dict[str, float]:
    """Evaluate the saved model. Write samples.jsonl on rank 0's node."""
    here, tokenizer = engine.here, lessons.tokenizer
    scores: dict[str, float] = {}
    if lessons.val.samples:
        scores = sft_task.loss_by_level(engine, lessons.val, here)
    if questions:
        pad_id = lessons.train.pad_id
        scores.update(sft_task.accuracy(engine, tokenizer, questions, here, options, pad_id=pad_id))
    asked = dataset.texts_to_answer(lessons, options["num_sample_prompts"])
    conversations = [conversation for _, conversation in asked]
    replies = sft_task.answers(engine, tokenizer, conversations, here, most=options["max_new_tokens"])
    answers = []
    for (number, conversation), reply in zip(asked, replies):
        question, expected = first_exchange(conversation)
        texts = {"question": question, "reply": reply, "expected": expected}
        answers.append(json.dumps({"sample": number, "level": conversation.level, **texts}, ensure_ascii=False) + "\n")
    if here.is_first and answers:
        replace_text(output_of(options) / "samples.jsonl", "".join(answers))
    shown = " ".join(f"{name} {value:.4f}" for name, value in scores.items())
    here.log(listed("program.final", scores=shown))
    return scores


def first_exchange(conversation: Conversation) -> tuple[str, str]:
    """Return the first reply of the assistant, and the text before it; "": the reply starts the conversation."""
    at = next(i for i, (role, _) in enumerate(conversation.turns) if role == "assistant")
    return conversation.turns[at - 1][1] if at else "", conversation.turns[at][1]


def write_report(
    options: Options, study: Study, loop: Loop, layout: Layout, scores: Mapping[str, float], seconds: float
) -> None:
    lessons, course, here = study.lessons, study.course, loop.here
    given = course.given_of(loop.progress.step)
    stages = [course.stage(step) for step in range(course.steps)]
    report = {
        "final": dict(scores),
        "validation": loop.progress.history,
        "options": dict(options),
        "curriculum": {
            "levels": list(lessons.table.levels),
            "notes": [str(note) for note in lessons.table.notes],
            "samples": given,
            "steps_by_stage": [stages.count(number) for number in range(len(course.table.stages))],
        },
        "training": {
            "steps": loop.progress.step,
            "samples": sum(given.values()),
            "strategy": layout.strategy,
            "cpu_offload": layout.offloads,
            "gradient_checkpointing": layout.recomputes,
            "world_size": here.world_size,
            "device": here.accelerator.name,
            "seconds": round(seconds, 1),
            "memory_bytes": here.accelerator.memory_bytes(),
            "largest_micro_batch": dict(study.piece),
        },
        "data": {"rows": len(lessons.train.samples), "cut": lessons.cut, "digest": lessons.digest},
    }
    replace_json(output_of(options) / "report.json", report)


def plan(options: Options, here: Runtime) -> None:
    """Estimate only, without a model or device. Raises ModelTooLargeError when the training cannot run."""
    training = training_of({**options, "mode": "train"}, here, program="qwen_lora")
    raise_fatal(training, *RULES)
    home = home_of(options)
    config = base.folder_config(home) if options["base_model"] else base.shape_config(options["model_preset"])
    texts = dataset.read_texts(options)
    lessons = dataset.make_lessons(texts, open_tokenizer(options, texts.train, here), options)
    study = Study(lessons, config, options, ranks=training.ranks)
    study.introduce(here)
    log_plan(training, study.work, here)


def prepare(options: Options, here: Runtime) -> None:
    """Encode the data, which needs no device, and list the cache."""
    raise_fatal(training_of(options, here), check_inputs, check_curriculum)
    texts = dataset.read_texts(options)
    here.check_same(texts.digest)
    dataset.make_lessons(texts, open_tokenizer(options, texts.train, here), options)
    cache = Path(options["data_cache_dir"] or shards.default_cache())
    here.log(listed("program.data-cache", directory=cache))
    for held in shards.directories(cache, now_s=time.time()):
        here.log(listed("program.data-held", key=held.key, rows=held.rows, size=held.bytes, age=held.age_s))
    here.record(done=True)


def compare(options: Mapping[str, Any], here: Runtime) -> None:
    """Compare two runs on the same budget: write comparison.json and a table. Raises InvalidDataError."""
    if len(options["compare_dirs"]) != 2:
        raise InvalidDataError(listed("program.compare-two"))
    reports = []
    for name in options["compare_dirs"]:
        path = Path(name) / "report.json"
        if not path.is_file():
            raise InvalidDataError(listed("program.no-report", path=path))
        reports.append(json.loads(path.read_text(encoding="utf-8")))
    first, second = reports
    budget = [(each["training"]["steps"], each["training"]["samples"]) for each in reports]
    if budget[0] != budget[1]:
        raise InvalidDataError(listed("program.other-budgets", first=budget[0], second=budget[1]))
    rows = [(name, first["final"][name], second["final"][name]) for name in first["final"] if name in second["final"]]
    here.log(listed("program.compare", steps=budget[0][0], samples=budget[0][1]))
    difference = pad_left(listed("program.difference"), 12)
    here.log(f"{'':<18}{options['compare_dirs'][0]:>14}{options['compare_dirs'][1]:>14}{difference}")
    for name, one, other in rows:
        here.log(f"{name.replace('_', ' '):<18}{one:>14.4f}{other:>14.4f}{other - one:>+12.4f}")
    output = Path(options["output_dir"]).absolute()
    final = {name: [one, other] for name, one, other in rows}
    replace_json(output / "comparison.json", {"runs": list(options["compare_dirs"]), "final": final})
    here.record(done=True)
