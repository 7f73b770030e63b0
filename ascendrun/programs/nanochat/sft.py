"""The stages mid and sft: a trained model learns what the assistant writes in conversations of several tasks.

Rows have whole conversations, the largest that fits next, and padding; a conversation longer than a row is not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ascendrun.programs.devices import accelerator
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat import texts as words
from ascendrun.programs.nanochat.base import Course, Options, next_token, refuse, tokens_of, train_model
from ascendrun.programs.nanochat.conversations import ConversationEncoder
from ascendrun.programs.nanochat.model import NanoChat, empty_model
from ascendrun.programs.nanochat.sizes import Sizes, chat_horizon, settled
from ascendrun.programs.nanochat.tasks import Example, Joined, read_task
from ascendrun.programs.nanochat.texts import first_val_of, mark_of_file
from ascendrun.programs.trainer import shards
from ascendrun.programs.trainer.rows import Rows
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text


def sft_stage(options: Options, here: Runtime) -> None:
    """Train a model on conversations, from that of `model_dir`."""
    start = open_start(options)
    options, model, tokenizer = start.options, start.model, start.tokenizer
    refuse(options, chat_horizon(model.sizes, options, 1), here)
    mixture = read_mixture(options)
    marks = start.agree(mixture, here)
    train, val, facts = make_rows(mixture, words.mark_of(tokenizer), tokenizer, options, here)
    horizon = chat_horizon(model.sizes, options, options["max_steps"] or train.steps_per_epoch)
    here.log(introduce(facts, train, val, horizon.steps))
    objective, inherited = next_token(train, val, tokenizer, options, is_chat=True), None
    if options["load_optimizer"] and start.training.get("checkpoints"):
        inherited = Path(start.training["checkpoints"])
    train_model(
        Course(model, tokenizer, horizon, objective, facts, tokens_of(horizon), inherited, marks), options, here
    )


@dataclass(frozen=True)
class Start:
    """The model that a stage starts from. `options`: settled by its own training, of which `training` has facts."""

    options: Mapping[str, Any]
    model: NanoChat
    tokenizer: Tokenizer
    training: Mapping[str, Any]

    def agree(self, mixture: Mixture, here: Runtime) -> dict[str, Any]:
        """Check that all ranks have the same model and tasks; return the marks of both."""
        file = Path(self.options["model_dir"], "model.safetensors")
        weights = here.share(shards.hash_of_file(file) if here.is_first else "")
        known = {**self.training, "checkpoints": ""}  # each node may have them elsewhere
        tokens = words.mark_of(self.tokenizer)
        here.check_same(shards.key_of(mixture.digest, tokens, vars(self.model.sizes), known))
        parts = [[given["kind"], given.get("rows") or 0, given.get("epochs") or 1] for given in self.options["mixture"]]
        return {"model": weights[:16], "mixture": parts}


def open_start(options: Options) -> Start:
    """Open the model and the tokenizer of `model_dir`. Raises InvalidDataError."""
    config, model = open_model(options["model_dir"], recomputes=options["gradient_checkpointing"])
    options, tokenizer = settled(options, config), open_tokenizer(options["model_dir"], model)
    if options["max_seq_len"] > model.sizes.context:
        raise InvalidDataError(
            "program.long-context",
            "--max_seq_len={length}: the model was trained with sequences of {context} tokens\n"
            "hint: set --max_seq_len to {context} or less",
            length=options["max_seq_len"],
            context=model.sizes.context,
        )
    return Start(options, model, tokenizer, config.get("training") or {})


def open_model(path: str, *, recomputes: bool) -> tuple[dict[str, Any], NanoChat]:
    """Return the configuration and the model of a directory. Raises InvalidDataError."""
    try:
        config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
        model = empty_model(Sizes.of_config(config), recomputes=recomputes)
        weights = load_file(str(Path(path, "model.safetensors")))
        model.load_state_dict({name.removeprefix("model."): each for name, each in weights.items()}, assign=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InvalidDataError(
            "program.no-model",
            "{path}: no model of nanochat: {reason}\nhint: run the stage with --mode=base first",
            path=path,
            reason=repr(error),
        ) from error
    return config, model.requires_grad_()


def open_tokenizer(path: str, model: NanoChat) -> Tokenizer:
    """Return the tokenizer of a model's directory. Raises InvalidDataError."""
    tokenizer = words.load(Path(path))
    if tokenizer.get_vocab_size() != model.sizes.vocabulary:
        raise InvalidDataError(
            "program.foreign-tokenizer",
            "{directory}: the tokenizer has {tokens} tokens, the model {vocabulary}; it belongs to another model",
            directory=path,
            tokens=tokenizer.get_vocab_size(),
            vocabulary=model.sizes.vocabulary,
        )
    return tokenizer


# --- data ---


@dataclass(frozen=True)
class Mixture:
    """Examples of all tasks. `train`: of each task the numbers of its training examples, and its epochs."""

    examples: Sequence[Example]
    train: Sequence[tuple[range, int]]
    val: Sequence[range]
    digest: str

    @property
    def train_numbers(self) -> Any:
        """The numbers of the training examples, each as often as its task has epochs."""
        return np.concatenate([np.tile(np.array(numbers), epochs) for numbers, epochs in self.train])

    @property
    def val_numbers(self) -> Any:
        return np.concatenate([np.array(numbers) for numbers in self.val])


def read_mixture(options: Options) -> Mixture:
    """Open the tasks; of each the last part is for validation. Raises InvalidDataError."""
    tasks, train, val, marks, start = [], [], [], [], 0
    for given in options["mixture"]:
        task = read_task({**given, "epochs": 1}, options["seed"])
        first_val = first_val_of(len(task), options)
        if first_val < 1:
            raise InvalidDataError(
                "program.few-examples",
                "task {name}: expected at least two examples, some to train on and some to validate with",
                name=given.get("file") or given["kind"],
            )
        tasks.append(task)
        train.append((range(start, start + first_val), int(given.get("epochs") or 1)))
        val.append(range(start + first_val, start + len(task)))
        start += len(task)
        content = (
            mark_of_file(Path(given["file"])) if given.get("file") else json.dumps([each.messages for each in task])
        )
        marks.append(f"{given['kind']} {len(task)} {content}")
    return Mixture(Joined(tasks), train, val, hashlib.sha256("\0".join(marks).encode()).hexdigest())


def make_rows(
    mixture: Mixture, words_mark: str, tokenizer: Any, options: Options, here: Runtime
) -> tuple[Rows, Rows, dict[str, Any]]:
    """Encode the conversations, and pack them. Return (training, validation, facts). Raises InvalidDataError."""
    cache = Path(options["data_cache_dir"] or shards.default_cache())
    key = shards.key_of("conversations", mixture.digest, words_mark)

    def source() -> shards.Source:
        count, encoder = len(mixture.examples), ConversationEncoder(tokenizer)
        return shards.Source(mixture.examples, [None] * count, encoder, tokenizer.get_vocab_size())

    every = shards.open_or_build(cache / key, source, context=accelerator.worker_context(here.family), log=here.log)
    length = options["max_seq_len"]
    fits = every.lengths <= length + 1
    # In another order than the tasks have, so that a row has conversations of several.
    train = np.random.default_rng([options["seed"], 4]).permutation(mixture.train_numbers)
    val = mixture.val_numbers
    facts = {
        "conversations": int(fits[train].sum()),
        "val": int(fits[val].sum()),
        "too_long": int((~fits).sum()),
        "digest": mixture.digest,
    }
    batch = options["total_batch_size"] // length

    def rows(numbers: Any, size: int) -> Rows:
        kept = every.select(numbers[fits[numbers]])
        return Rows(kept, seq_len=length, batch_size=size, seed=options["seed"], crop=False)

    return rows(train, batch), rows(val, 1), facts


def introduce(facts: Mapping[str, Any], train: Rows, val: Rows, steps: int) -> Text:
    return Text(
        "program.chat-data",
        "{conversations:,} conversations in {rows:,} sequences of {length} tokens, {val:,} for validation; {long:,} "
        "longer ones are not used; {steps:,} steps are {epochs:.2f} epochs",
        conversations=facts["conversations"],
        rows=train.count,
        length=train.seq_len,
        val=val.count,
        long=facts["too_long"],
        steps=steps,
        epochs=steps / train.steps_per_epoch,
    )
