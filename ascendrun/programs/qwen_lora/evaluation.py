"""Quality of the model: loss by level, multiple choice, generated replies. All ranks evaluate together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascendrun.facts.rows import Conversation
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.cache import of_transformers
from ascendrun.programs.generation.engine import Completion, Generator, generate
from ascendrun.programs.qwen_lora.chat_template import encode, ends_of, prompt_of
from ascendrun.programs.qwen_lora.sft_task import Rows, forward
from ascendrun.programs.trainer import shards
from ascendrun.programs.trainer.packing import IGNORED
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.shards import Encoded
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.text import Text

ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class Question:
    """A multiple-choice question. `answer`: index of the correct choice."""

    text: str
    choices: tuple[str, ...]
    answer: int


def losses_of(engine: Engine, rows: Rows, here: Runtime) -> list[tuple[float, int]]:
    """Return (summed loss, trained tokens) of every sample, in order, on every rank.

    Every rank runs the same number of passes: sharded models gather their weights in each.
    """
    order = np.argsort(shards.lengths_of(rows.samples), kind="stable").tolist()
    chunks = [order[i : i + ROWS_AT_ONCE] for i in range(0, len(order), ROWS_AT_ONCE)]
    rounds = -(-len(chunks) // here.world_size)
    mine: dict[int, tuple[float, int]] = {}
    was_training = engine.module.training
    engine.module.eval()
    with torch.no_grad():
        for each in range(rounds):
            place = each * here.world_size + here.rank
            chunk = chunks[place] if place < len(chunks) else chunks[0][:1]
            tensors = {
                name: tensor.to(here.device)
                for name, tensor in rows.batch([(number,) for number in chunk]).tensors.items()
            }
            with engine.autocast():
                losses = forward(engine.model, tensors)
            counts = (tensors["targets"] != IGNORED).sum(1).tolist()
            if place < len(chunks):
                mine.update(
                    {number: (loss, count) for number, loss, count in zip(chunk, losses.sum(1).tolist(), counts)}
                )
    engine.module.train(was_training)
    every = {number: pair for part in here.gather(mine) for number, pair in part.items()}
    return [every[number] for number in range(len(rows.samples))]


def loss_by_level(engine: Engine, rows: Rows, here: Runtime) -> dict[str, float]:
    """Return {loss, loss_LEVEL …}: means over trained tokens."""
    each = losses_of(engine, rows, here)
    scores = {"loss": mean_of(each)}
    for i, level in enumerate(rows.levels if len(rows.levels) > 1 else ()):
        part = [pair for pair, place in zip(each, shards.levels_of(rows.samples)) if place == i]
        if part:
            scores[f"loss_{level}"] = mean_of(part)
    return scores


def mean_of(pairs: Sequence[tuple[float, int]]) -> float:
    return sum(loss for loss, _ in pairs) / max(1, sum(count for _, count in pairs))


def read_questions(path: Path, limit: int) -> list[Question]:
    """Read questions; `answer` is a letter or an index from 0. Raises InvalidDataError."""
    if not path.is_file():
        raise InvalidDataError("program.file-not-found-here", "{path}: file not found", path=path)
    found: list[Question] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip() or len(found) == limit:
            continue
        try:
            row = json.loads(line)
            choices, answer = tuple(map(str, row["choices"])), row["answer"]
            place = "ABCDEFGH".index(answer) if isinstance(answer, str) else int(answer)
            if not 0 <= place < len(choices):
                raise ValueError(
                    Text(
                        "program.answer-range",
                        "answer {answer:quote} of {choices} choices",
                        answer=answer,
                        choices=len(choices),
                    )
                )
            found.append(Question(str(row["question"]), choices, place))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidDataError(
                "program.question-line",
                "{path}:{number}: expected question, choices and the letter of the answer ({error})",
                path=path,
                number=number,
                error=error,
            ) from None
    if not found:
        raise InvalidDataError(
            "program.no-question",
            "{path}: no question; expected JSON lines of {{question, choices, answer}}",
            path=path,
        )
    return found


def accuracy(
    engine: Engine,
    tokenizer: Any,
    questions: Sequence[Question],
    here: Runtime,
    options: Mapping[str, Any],
    *,
    pad_id: int,
) -> dict[str, float]:
    """Select the choice with the lowest loss per token. Return {mc_accuracy, mc_chance}."""
    system, cutoff = options["default_system"], options["cutoff_len"]
    samples = [
        sample for question in questions for sample in as_samples(tokenizer, question, system=system, cutoff=cutoff)
    ]
    each = losses_of(engine, Rows(samples, ("all",), pad_id, options["pad_to_multiple_of"]), here)
    right, at = 0, 0
    for question in questions:
        mine = each[at : at + len(question.choices)]
        at += len(question.choices)
        means = [loss / max(1, count) for loss, count in mine]
        right += means.index(min(means)) == question.answer
    chance = sum(1 / len(question.choices) for question in questions) / len(questions)
    return {"mc_accuracy": right / len(questions), "mc_chance": chance}


def as_samples(tokenizer: Any, question: Question, *, system: str, cutoff: int) -> list[Encoded]:
    shown = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", question.choices))
    before = (("system", system),) if system else ()
    return [
        encode(
            tokenizer,
            Conversation((*before, ("user", f"{question.text}\n{shown}"), ("assistant", choice))),
            cutoff=cutoff,
        )
        for choice in question.choices
    ]


def answers(
    engine: Engine, tokenizer: Any, conversations: Sequence[Conversation], here: Runtime, *, most: int
) -> list[str]:
    """Generate the model's first reply to each conversation, with the most likely token at each position. The ranks
    divide them, and call it together: a sharded model requires them all."""
    stop = ends_of(tokenizer)
    prompts = []
    for conversation in conversations[here.rank :: here.world_size]:
        first = next(i for i, (role, _) in enumerate(conversation.turns) if role == "assistant")
        prompts.append(
            prompt_of(tokenizer, [{"role": role, "content": text} for role, text in conversation.turns[:first]])
        )
    context = max(map(len, prompts), default=1) + most
    generator = Generator.of(engine, of_transformers(engine.model), context=context)
    was_training = engine.module.training
    engine.module.eval()
    mine = generate(generator, [Completion(prompt, most, stop=stop) for prompt in prompts])
    engine.module.train(was_training)
    each = here.gather([str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in mine])
    return [each[number % here.world_size][number // here.world_size] for number in range(len(conversations))]
