"""Base training: predict the next token of documents, from the shards of the tokens to a model in a directory.

The stages on conversations (sft.py) have other rows and rates, and run the same training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from ascendrun.programs import errors
from ascendrun.programs.devices import accelerator, attention
from ascendrun.programs.nanochat import texts as words
from ascendrun.programs.nanochat.conversations import Samples
from ascendrun.programs.nanochat.model import NanoChat, make_model, setup_optimizer
from ascendrun.programs.nanochat.rules import batch_refusals, work_of
from ascendrun.programs.nanochat.sizes import INHERITED, Horizon, Sizes, config_of, horizon_of, settled
from ascendrun.programs.nanochat.texts import Corpus, read_corpus
from ascendrun.programs.trainer import metrics, runtime, shards
from ascendrun.programs.trainer.checkpoint import replace_json, replace_weights
from ascendrun.programs.trainer.data import IGNORED, Batch, Unit
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.shards import Rows
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.parallel import raise_fatal, training_of, wrap_for
from ascendrun.programs.trainer.task import Settings, Task, identity_of
from ascendrun.text import Text, listed

Options = Mapping[str, Any]
SAMPLES = "samples"
FREE = "eval_steps", "gradient_checkpointing"
"""Options beside those of `identity_of` that may differ between a checkpoint and the run that resumes from it."""


class NextToken(Task):
    """Training task. `bytes_of`: bytes of each token, for bits per byte; 0: not counted. `samples`: written by rank 0
    every `sample_steps`, None: never."""

    def __init__(
        self,
        train: Rows,
        val: Rows,
        engine: Engine,
        bytes_of: Sequence[int],
        options: Options,
        samples: Samples | None = None,
    ) -> None:
        self.train, self.val, self.engine, self.options, self.samples = train, val, engine, options, samples
        self.evaluations = {"": options["eval_steps"], SAMPLES: options["sample_steps"] if samples else 0}
        self.bytes_of = torch.tensor(bytes_of, dtype=torch.float64, device="cpu")

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        return batch_of(self.train, units)

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(
            model(tensors["ids"]).flatten(0, 1), tensors["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        """Score the first `eval_tokens` validation tokens; the ranks share the sequences. Or print samples."""
        here, whole = self.engine.here, self.engine.whole()
        if name == SAMPLES and self.samples is not None:
            for prompt, reply in self.samples.write(whole) if here.is_first else ():
                here.log(listed("program.sample", step=step, prompt=prompt, reply=reply))
            return {}
        size = self.options["micro_batch_size"] or 16
        count = max(1, min(self.val.count, self.options["eval_tokens"] // self.val.seq_len))
        mine = range(here.rank, count, here.world_size)
        sums = torch.zeros(4, dtype=torch.float64)
        for start in range(0, len(mine), size):
            batch = batch_of(self.val, [(row,) for row in mine[start : start + size]])
            with whole.autocast():
                logits = whole.module(batch.tensors["ids"].to(here.device))
            targets = batch.tensors["targets"].flatten()
            losses = functional.cross_entropy(
                logits.flatten(0, 1).float(), targets.to(here.device), ignore_index=IGNORED, reduction="none"
            )
            losses, seen = losses.cpu().double(), targets != IGNORED
            sizes = torch.where(seen, self.bytes_of[targets.clamp_min(0)], 0.0)
            sums += torch.stack([losses.sum(), seen.sum(), losses[sizes > 0].sum(), sizes.sum()])
        loss, tokens, nats, size_bytes = here.sum(sums.tolist())
        return {"loss": loss / tokens, "bits_per_byte": nats / math.log(2) / max(1.0, size_bytes)}


def batch_of(rows: Rows, units: Sequence[Unit]) -> Batch:
    ids, labels = rows.read(units)
    targets = labels[:, 1:].contiguous()
    learned = int((targets != IGNORED).sum())
    return Batch({"ids": ids[:, :-1], "targets": targets}, float(learned), tokens=learned, samples=len(units))


def base_stage(options: Options, here: Runtime) -> None:
    """Train, save the model with its tokenizer, report. After a stop signal, save a checkpoint and return early."""
    options = settled(options)
    tokenizer = words.load(Path(options["tokenizer_dir"]))
    corpus = read_corpus(options)
    here.check_same(shards.key_of(corpus.digest, words.mark_of(tokenizer)))
    sizes = Sizes.of(options, tokenizer.get_vocab_size())
    horizon = horizon_of(sizes, options)
    refuse(options, horizon, here)
    train, val = make_rows(corpus, tokenizer, horizon, options, here)
    for line in introduce(sizes, horizon, train, val):
        here.log(line)
    model = make_model(sizes, seed=options["seed"], recomputes=options["gradient_checkpointing"])
    facts = {"documents": len(corpus.documents), "first_val": corpus.first_val, "digest": corpus.digest}
    objective = next_token(train, val, tokenizer, options, is_chat=False)
    train_model(Course(model, tokenizer, horizon, objective, facts, tokens_of(horizon)), options, here)


@dataclass(frozen=True)
class Course:
    """A training. `objective`: makes the loop's source of batches and its task. `data`: facts of its data, with its
    digest. `work`: facts of its steps. `inherited`: where the optimizer's state comes from, a directory of checkpoints,
    None: it is new. `marks`: more values that a resumed training must share."""

    model: NanoChat
    tokenizer: Tokenizer
    horizon: Horizon
    objective: Callable[[Engine], tuple[Any, Task]]
    data: Mapping[str, Any]
    work: Mapping[str, Any]
    inherited: Path | None = None
    marks: Mapping[str, Any] = field(default_factory=dict)


def next_token(
    train: Rows, val: Rows, tokenizer: Tokenizer, options: Options, *, is_chat: bool
) -> Callable[[Engine], tuple[Any, Task]]:
    sizes = words.token_bytes(tokenizer)

    def objective(engine: Engine) -> tuple[Any, Task]:
        samples = Samples(tokenizer, options["sample_prompts"], train.seq_len, is_chat)
        return train, NextToken(train, val, engine, sizes, options, samples)

    return objective


def tokens_of(horizon: Horizon) -> dict[str, int]:
    return {"tokens_seen": horizon.steps * horizon.batch_tokens}


def train_model(course: Course, options: Options, here: Runtime) -> None:
    """Train, save the model with its tokenizer, report. After a stop signal, save a checkpoint and return early."""
    model, tokenizer, horizon = course.model, course.tokenizer, course.horizon
    precision = accelerator.precision_of(options, here.accelerator)
    here.log(precision.reason)
    output = Path(options["output_dir"]).absolute()
    errors.check_writable(output)
    engine = wrap_for(
        options,
        model,
        here,
        work=work_of(options, model.sizes, horizon, ranks=here.world_size),
        make_optimizer=lambda placed: setup_optimizer(model, options, horizon, shard=options["shard_optimizer"]),
        precision=precision,
        has_muon=True,
    )
    here.log(listed("program.attention", kernel=attention.kernel_of(here.device.type).__name__))
    source, task = course.objective(engine)
    settings = Settings.of(options, steps=horizon.steps, flops_per_token=model.sizes.flops_per_token)
    folder = runtime.checkpoint_folder(options["output_dir"])
    marks = {"data": course.data["digest"][:16], "tokens": words.mark_of(tokenizer)[:16], **course.marks}
    identity = identity_of(options, FREE, **marks)
    loop = Loop(here, engine, source, task, settings, folder=folder, identity=identity)
    if not loop.resume(options["resume_from_checkpoint"]) and course.inherited is not None:
        inherit(loop, course.inherited, here)
    began_s, first = time.monotonic(), loop.progress.step
    if not loop.run().is_complete:
        return
    run = run_facts(course, settings, here, steps=loop.progress.step - first, seconds=time.monotonic() - began_s)
    scores = {name: value for name, value in (loop.progress.history or [{}])[-1].items() if name != "step"}
    whole: Any = engine.whole().module
    if here.local_rank == 0:
        kept = {name: options[name] for name in INHERITED} | {"total_batch_size": horizon.batch_tokens}
        save_model(whole, tokenizer, output, training={**kept, "checkpoints": str(loop.checkpoints.saver.parent)})
        write_report(output, course, loop.progress.history, run)
    here.log(listed("program.base", directory=output))
    here.record(done=True, **{f"final_{name}": value for name, value in scores.items()})


def inherit(loop: Loop, place: Path, here: Runtime) -> None:
    if loop.checkpoints.inherit(place):
        here.log(listed("program.moments-inherited", directory=place))
    else:
        here.log(listed("program.moments-new", directory=place))


def refuse(options: Options, horizon: Horizon, here: Runtime) -> None:
    """Raise InvalidDataError for a batch that the ranks cannot share in whole passes."""
    raise_fatal(training_of(options, here), lambda training: batch_refusals(options, horizon, training.ranks))


def make_rows(
    corpus: Corpus, tokenizer: Tokenizer, horizon: Horizon, options: Options, here: Runtime
) -> tuple[Rows, Rows]:
    """Open the encoded documents, or encode them, and cut them into sequences. Raises InvalidDataError."""
    cache = Path(options["data_cache_dir"] or shards.default_cache())
    key = shards.key_of("documents", corpus.digest, words.mark_of(tokenizer))

    def source() -> shards.Source:
        count = len(corpus.documents)
        return shards.Source(corpus.documents, [None] * count, words.TextEncoder(tokenizer), tokenizer.get_vocab_size())

    every = shards.open_or_build(cache / key, source, context=accelerator.worker_context(here.family), log=here.log)
    numbers = every.numbers
    length, batch = options["max_seq_len"], horizon.batch_tokens // options["max_seq_len"]
    train, val = every.select(numbers[: corpus.first_val]), every.select(numbers[corpus.first_val :])
    return (
        Rows(train, seq_len=length, batch_size=batch, seed=options["seed"]),
        Rows(val, seq_len=length, batch_size=1, seed=options["seed"]),
    )


def introduce(sizes: Sizes, horizon: Horizon, train: Rows, val: Rows) -> list[Text]:
    return [
        listed(
            "program.base-model",
            preset=sizes.preset,
            layers=sizes.layers,
            hidden=sizes.hidden,
            heads=sizes.heads,
            vocabulary=sizes.vocabulary,
            weights=sizes.weights,
        ),
        listed(
            "program.base-data",
            rows=train.count,
            length=train.seq_len,
            val=val.count,
            steps=horizon.steps,
            batch=horizon.batch_tokens,
            epochs=horizon.steps / train.steps_per_epoch,
        ),
    ]


# --- the result ---


def save_model(model: NanoChat, tokenizer: Tokenizer, folder: Path, *, training: Mapping[str, Any]) -> None:
    """Write weights, configuration and tokenizer; the configuration last. `training`: what a stage that starts from
    this model inherits."""
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    replace_weights(folder / "model.safetensors", weights)
    words.save_files(folder, tokenizer.to_str())
    config = {**config_with(model.sizes, tokenizer), "training": training}
    replace_json(folder / "config.json", config)


def config_with(sizes: Sizes, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json of a model and its tokenizer."""
    pad = tokenizer.token_to_id(words.PAD)
    return {
        **config_of(sizes),
        "architectures": ["NanoChatForCausalLM"] if sizes.is_classic else ["NanoChat"],
        "bos_token_id": tokenizer.token_to_id(words.BOS),
        "eos_token_id": pad,
        "pad_token_id": pad,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def run_facts(course: Course, settings: Settings, here: Runtime, *, steps: int, seconds: float) -> dict[str, Any]:
    """Return the speed of a run, which has all steps of the training or those since it was resumed. None: unknown."""
    horizon, peak = course.horizon, metrics.peak_flops(here.accelerator, settings.peak_tflops)
    speed = steps * horizon.batch_tokens / seconds if steps and "tokens_seen" in course.work else None
    return {
        "device": here.accelerator.name,
        "ranks": here.world_size,
        "steps": steps,
        "seconds": round(seconds, 3),
        "device_hours": here.world_size * seconds / 3600,
        "tokens_per_s": speed,
        "mfu": None if speed is None else metrics.mfu(speed, settings.flops_per_token, peak, here.world_size),
    }


def write_report(folder: Path, course: Course, history: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> None:
    sizes, horizon = course.model.sizes, course.horizon
    report = {
        "model": {**vars(sizes), "weights": sizes.weights, "flops_per_token": sizes.flops_per_token},
        "training": {**vars(horizon), **course.work},
        "run": dict(run),
        "data": dict(course.data),
        "evaluations": list(history),
    }
    replace_json(folder / "report.json", report)
