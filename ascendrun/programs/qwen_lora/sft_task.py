"""The SFT task: batches of packed conversations, the loss on the assistant's replies, and its part per level; quality
of the model: loss by level, multiple choice, generated replies. All ranks evaluate together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ascendrun.facts.rows import Conversation
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.cache import of_transformers
from ascendrun.programs.generation.engine import Completion, Generator, generate
from ascendrun.programs.qwen_lora.chat_template import encode, ends_of, prompt_of
from ascendrun.programs.trainer import shards
from ascendrun.programs.trainer.data import IGNORED, Batch, Unit, pack_rows
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.shards import Encoded
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.task import Loss, Part, Task
from ascendrun.text import listed

NO_LEVEL = -1


@dataclass(frozen=True)
class Rows:
    """Factory of batches; holds only data that can be sent to a worker process."""

    samples: Sequence[Encoded]
    levels: Sequence[str]
    pad_id: int
    multiple: int

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        return self.batch(units)

    def batch(self, units: Sequence[Unit]) -> Batch:
        numbers = [number for unit in units for number in unit]
        samples = {number: self.samples[number] for number in numbers}
        ids = {number: sample.ids for number, sample in samples.items()}
        labels = {number: sample.labels for number, sample in samples.items()}
        packed = pack_rows(units, ids, labels, pad_id=self.pad_id, multiple=self.multiple)
        kept, targets = learned_places(packed["labels"], self.multiple)
        groups = {
            level: float(sum(samples[number].level == i for number in numbers)) for i, level in enumerate(self.levels)
        }
        tensors = {"ids": packed["ids"], "kept": kept, "targets": targets}
        if any(len(unit) > 1 for unit in units):
            tensors.update(positions=packed["positions"], segments=packed["segments"])
        if len(self.levels) > 1:
            levels = [[samples[number].level for number in unit] for unit in units]
            tensors["target_levels"] = levels_of(levels, packed["numbers"], kept, targets)
        return Batch(
            tensors,
            weight=float((targets != IGNORED).sum()),
            samples=len(numbers),
            groups=groups,
            tokens=sum(len(ids[number]) for number in numbers),
        )


def levels_of(
    levels: Sequence[Sequence[int]], numbers: torch.Tensor, kept: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the level of each target. `levels`: of the samples of each row; `numbers`: of the sample of each token."""
    found = torch.full_like(targets, NO_LEVEL)
    for row, of_row in enumerate(levels):
        found[row] = torch.tensor([NO_LEVEL, *of_row])[numbers[row, kept]]
    return torch.where(targets == IGNORED, torch.full_like(found, NO_LEVEL), found)


def learned_places(labels: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (positions whose next token is trained on in some row, that token in each row or IGNORED).

    The model predicts only there, which shrinks its largest tensor, positions x vocabulary. The number of positions is
    rounded up with positions that have no target.
    """
    following = torch.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    places = (following != IGNORED).any(0).nonzero().flatten()
    size = -(-max(1, len(places)) // multiple) * multiple
    kept = torch.zeros(size, dtype=torch.int64)
    kept[: len(places)] = places
    targets = torch.full((labels.shape[0], size), IGNORED, dtype=torch.int64)
    targets[:, : len(places)] = following[:, places]
    return kept, targets


def forward(model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
    """Return the losses of all targets, rows x kept positions, in float32."""
    given: dict[str, Any] = {"input_ids": tensors["ids"], "logits_to_keep": tensors["kept"], "use_cache": False}
    if "positions" in tensors:
        given.update(position_ids=tensors["positions"], segments=tensors.get("segments"))
    logits = model(**given).logits.float()
    losses = functional.cross_entropy(
        logits.flatten(0, 1), tensors["targets"].flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view(tensors["targets"].shape)


class Instructions(Task):
    """Training task: predict the assistant's replies."""

    def __init__(self, rows: Rows, *, evaluate: Callable[[str, int], dict[str, float]]) -> None:
        self.rows, self.evaluate = rows, evaluate  # type: ignore[assignment,method-assign]
        self.collate = rows.collate  # type: ignore[method-assign]  # of Rows, because a worker process gets a copy of it
        self.parts = tuple(rows.levels) if len(rows.levels) > 1 else ()

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> Loss:
        losses = forward(model, tensors)
        if not self.parts:
            return losses.sum()
        parts: dict[str, Part] = {}
        for i, level in enumerate(self.parts):
            mine = tensors["target_levels"] == i
            parts[level] = ((losses.detach() * mine).sum(), mine.sum())
        return losses.sum(), parts


def largest_micro_batch(
    rows: Rows, plan_units: Callable[[int], Sequence[Unit]], *, steps: int, world_size: int, micro_batch: int
) -> dict[str, int]:
    """Return {rows, length, kept, pieces}: the maxima over the pieces of eight steps, for the memory estimate."""
    from ascendrun.programs.trainer.data import deal

    found = {"rows": 1, "length": 1, "kept": 1, "pieces": 1}
    for step in sorted({int(each) for each in np.linspace(0, steps - 1, 8)}):
        units = plan_units(step)
        pieces: list[list[Unit]] = deal(units, 0, world_size, micro_batch=micro_batch)
        for piece in pieces:
            if piece:
                tensors = rows.batch(piece).tensors
                seen = {
                    "rows": len(piece),
                    "length": tensors["ids"].shape[1],
                    "kept": len(tensors["kept"]),
                    "pieces": len(pieces),
                }
                found = {name: max(found[name], seen[name]) for name in found}
    return found


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
        raise InvalidDataError(listed("program.file-not-found-here", path=path))
    found: list[Question] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip() or len(found) == limit:
            continue
        try:
            row = json.loads(line)
            choices, answer = tuple(map(str, row["choices"])), row["answer"]
            place = "ABCDEFGH".index(answer) if isinstance(answer, str) else int(answer)
            if not 0 <= place < len(choices):
                raise ValueError(listed("program.answer-range", answer=answer, choices=len(choices)))
            found.append(Question(str(row["question"]), choices, place))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidDataError(listed("program.question-line", path=path, number=number, error=error)) from None
    if not found:
        raise InvalidDataError(listed("program.no-question", path=path))
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
