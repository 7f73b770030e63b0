"""From files to training data: conversations, the tokenizer, the schedule, encoded samples by level."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.programs.qwen_lora import chat_template
from ascendrun.programs.qwen_lora.conversations import (
    Conversation,
    digest_of,
    make_conversations,
    read_conversations,
    rows_of_levels,
)
from ascendrun.programs.qwen_lora.curriculum import Course, Table, choose_table
from ascendrun.programs.qwen_lora.sft_task import Rows
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.text import Text

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Texts:
    """Conversations by split. Empty `val`: no validation."""

    train: list[Conversation]
    val: list[Conversation]
    digest: str


@dataclass(frozen=True)
class Lessons:
    """All training and validation data, as tokens. `cut`: number of samples without a label after truncation."""

    table: Table
    train: Rows
    val: Rows
    val_texts: list[Conversation]
    cut: int
    digest: str
    tokenizer: Any

    @property
    def numbers(self) -> list[list[int]]:
        """The samples of each level."""
        return [
            [number for number, sample in enumerate(self.train.samples) if sample.level == level]
            for level in range(len(self.table.levels))
        ]


def read_texts(options: Options) -> Texts:
    """Read the conversations. Raises InvalidDataError."""
    system = options["default_system"]
    if options["data_path"]:
        train = read_conversations(Path(options["data_path"]), system=system)
    else:
        train = make_conversations(options["synthetic_samples"], seed=options["seed"], system=system)
    val: list[Conversation] = []
    if options["val_data_path"]:
        val = read_conversations(Path(options["val_data_path"]), system=system)
    elif options["val_size"]:
        order = list(range(len(train)))
        random.Random(options["seed"]).shuffle(order)
        if len(train) < 2:
            raise InvalidDataError(
                "program.one-sample",
                "{path}: {count} sample for training and validation\nhint: add samples, or set --val_size=0",
                path=options["data_path"],
                count=len(train),
            )
        count = max(1, round(len(train) * options["val_size"]))
        val, train = [train[i] for i in sorted(order[:count])], [train[i] for i in sorted(order[count:])]
    return Texts(train, val, digest_of(train + val))


def make_lessons(texts: Texts, tokenizer: Any, options: Options) -> Lessons:
    """Encode the conversations. Raises InvalidDataError."""
    table = choose_table(
        rows_of_levels(texts.train),
        wanted=options["curriculum"],
        levels=options["difficulty_levels"],
        stages=options["curriculum_schedule"],
    )
    pad_id, multiple = chat_template.pad_id_of(tokenizer), options["pad_to_multiple_of"]
    train, cut = chat_template.encode_all(tokenizer, texts.train, table.levels, cutoff=options["cutoff_len"])
    # Without a curriculum the validation loss is still reported by difficulty, so that two runs can be compared.
    named = {str(each.level) for each in texts.val if each.level is not None}
    val_levels = tuple(level for level in options["difficulty_levels"] if level in named)
    if len(val_levels) < 2 or any(str(each.level) not in val_levels for each in texts.val):
        val_levels = ("all",)
    val = (
        chat_template.encode_all(tokenizer, texts.val, val_levels, cutoff=options["cutoff_len"])[0] if texts.val else []
    )
    return Lessons(
        table,
        Rows(train, table.levels, pad_id, multiple),
        Rows(val, val_levels, pad_id, multiple),
        texts.val,
        cut,
        texts.digest,
        tokenizer,
    )


def make_course(lessons: Lessons, options: Options, *, world_size: int) -> Course:
    samples = lessons.train.samples
    lengths = [len(sample.ids) for sample in samples]
    steps = options["max_steps"] or options["num_train_epochs"] * -(-len(samples) // options["global_batch_size"])
    return Course(
        lessons.table,
        lessons.numbers,
        lengths,
        steps=steps,
        batch_size=options["global_batch_size"],
        seed=options["seed"],
        row_tokens=options["cutoff_len"] if options["packing"] else 0,
        spread=world_size,
    )


def introduce(lessons: Lessons, course: Course, options: Options) -> list[Text]:
    """Describe the data and the schedule for the log."""
    samples = lessons.train.samples
    tokens, learned = sum(len(each.ids) for each in samples), sum(each.learned for each in samples)
    longest = max(len(each.ids) for each in samples)
    lines = [
        *lessons.table.notes,
        Text(
            "program.data",
            "{count} samples from {source}: {mean:.0f} tokens on average, {longest} at most, "
            "{learned:percent} of them trained on; {val} validation samples",
            count=len(samples),
            source=options["data_path"] or Text("program.synthetic-samples", "synthetic samples"),
            mean=tokens / len(samples),
            longest=longest,
            learned=learned / tokens,
            val=len(lessons.val.samples),
        ),
    ]
    if lessons.cut:
        lines.append(
            Text(
                "program.samples-dropped",
                "{count} samples dropped: --cutoff_len={cutoff} truncates the whole reply",
                count=lessons.cut,
                cutoff=options["cutoff_len"],
            )
        )
    at_cutoff = sum(len(each.ids) == options["cutoff_len"] for each in samples)
    if at_cutoff:
        lines.append(
            Text(
                "program.samples-truncated",
                "{count} samples ({fraction:.1%}) truncated at {cutoff} tokens",
                count=at_cutoff,
                fraction=at_cutoff / len(samples),
                cutoff=options["cutoff_len"],
            )
        )
    return lines + course.describe()


def texts_to_answer(lessons: Lessons, count: int) -> Sequence[tuple[int, Conversation]]:
    """Select conversations evenly over the validation samples."""
    step = max(1, len(lessons.val_texts) // max(1, count))
    return [(i, lessons.val_texts[i]) for i in range(0, len(lessons.val_texts), step)][:count]
