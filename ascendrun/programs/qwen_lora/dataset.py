"""From files to training data: conversations, the tokenizer, the schedule, encoded samples by level."""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np

from ascendrun.facts import rows as json_rows
from ascendrun.facts.rows import Conversation, UnusableRowError, read_conversation
from ascendrun.options import GENERATED
from ascendrun.planner.rules import row_problem
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora import chat_template
from ascendrun.programs.qwen_lora.curriculum import Course, Table, choose_table
from ascendrun.programs.qwen_lora.sft_task import Rows
from ascendrun.programs.trainer import shards
from ascendrun.programs.trainer.checkpoint import fingerprint
from ascendrun.programs.trainer.shards import Array, Source, Tokens
from ascendrun.text import Text, listed

SYNTHETIC_LEVELS = ("explain", "reasoning", "topology")
NAMES = ("node", "switch", "router", "host", "rack", "port")


def read_conversations(path: Path, *, system: str) -> list[Conversation]:
    """Read conversations. `system`: system message of samples that lack it, "" for none. Raises InvalidDataError with
    the first problems."""
    check_file(path)
    found: list[Conversation] = []
    rows = read_rows(path)
    problems = {fault.place: row_problem(fault.code) for fault in rows.faults}
    for number, row in rows.rows:
        try:
            found.append(read_conversation(row, system=system))
        except UnusableRowError as error:
            problems[number] = row_problem(error.code, error.value, error.number)
    if problems:
        raise InvalidDataError.of(
            [
                listed(
                    "program.at",
                    path=path,
                    place=listed("program.line", number=number)
                    if rows.are_lines
                    else listed("program.row", number=number),
                    error=problems[number],
                )
                for number in sorted(problems)
            ]
        )
    if not found:
        raise InvalidDataError(listed("program.no-samples", path=path))
    return found


def check_file(path: Path) -> None:
    if not path.is_file():
        raise InvalidDataError(listed("program.file-not-found", path=path))


def read_rows(path: Path) -> json_rows.Rows:
    """Return the rows of a file and the faults of its lines. Raises InvalidDataError if it has no rows at all."""
    try:
        rows = json_rows.parse_rows(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidDataError(listed("program.not-utf8", path=path, position=error.start)) from error
    for fault in rows.faults:
        if fault.code == "too-deep":
            raise InvalidDataError(listed("program.too-deep", path=path))
        if fault.code == "not-json":
            raise InvalidDataError(listed("program.not-json", path=path, error=fault.value))
        if fault.code == "not-a-list":
            raise InvalidDataError(listed("program.not-a-list", path=path, found=fault.value))
    return rows


# --- synthetic data ---


def make_conversations(count: int, *, seed: int, system: str) -> list[Conversation]:
    """Make synthetic conversations with verifiable answers: two fifths for each of the easier levels, one fifth for
    the hardest."""
    chance = random.Random(seed)
    makers = {"explain": make_fact, "reasoning": make_sum, "topology": make_path}
    found = []
    for i in range(count):
        level = SYNTHETIC_LEVELS[(0, 1, 0, 1, 2)[i % 5]]
        question, answer = makers[level](chance)
        turns = (("user", question), ("assistant", answer))
        found.append(Conversation((("system", system), *turns) if system else turns, level))
    return found


def make_fact(chance: random.Random) -> tuple[str, str]:
    at = chance.randrange(25)
    return f"Which letter comes after {chr(65 + at)}?", chr(66 + at)


def make_sum(chance: random.Random) -> tuple[str, str]:
    first, second, third = (chance.randrange(1, 10) for _ in range(3))
    half = first + second
    return (
        f"A {chance.choice(NAMES)} has {first} cables, gets {second} and then {third} more. How many are there?",
        f"{first} + {second} = {half}\n{half} + {third} = {half + third}\nThe answer is {half + third}.",
    )


def make_path(chance: random.Random) -> tuple[str, str]:
    """Make a path along a chain of links, which are given in any order."""
    nodes = chance.sample("ABCDEFGH", chance.randrange(4, 7))
    links = [f"{one}-{other}" for one, other in zip(nodes, nodes[1:])]
    shown = chance.sample(links, len(links))
    return (
        f"Links: {', '.join(shown)}. Give the path from {nodes[0]} to {nodes[-1]}.",
        f"{' > '.join(nodes)}\nThat is {len(links)} links.",
    )


Options = Mapping[str, Any]


class Texts:
    """Conversations of a file, or generated ones. Read when first needed: encoded data needs the digest only."""

    def __init__(self, path: str, options: Options) -> None:
        self.path, self.options = None if path == GENERATED else Path(path), options

    @cached_property
    def conversations(self) -> list[Conversation]:
        """Raises InvalidDataError."""
        system = self.options["default_system"]
        if self.path is not None:
            return read_conversations(self.path, system=system)
        return make_conversations(self.options["synthetic_samples"], seed=self.options["seed"], system=system)

    @cached_property
    def digest(self) -> str:
        """Of the content. Raises InvalidDataError."""
        if self.path is None:
            content = [json.dumps([each.turns, each.level], ensure_ascii=False) for each in self.conversations]
            return hashlib.sha256("".join(content).encode()).hexdigest()
        check_file(self.path)
        return str(fingerprint(self.path)["sha256"])

    def encoded(self, tokenizer: Any, *, context: BaseContext | None) -> Tokens:
        """Return all samples in their order; one without a label after truncation has no tokens."""
        system, cutoff = self.options["default_system"], self.options["cutoff_len"]
        key = shards.key_of("chat", self.digest, system, cutoff, chat_template.mark_of(tokenizer))
        cache = Path(self.options["data_cache_dir"] or shards.default_cache())

        def source() -> Source:
            rows = self.conversations
            encoder = chat_template.ChatEncoder(tokenizer, cutoff)
            return Source(rows, [each.level for each in rows], encoder, len(tokenizer))

        return shards.open_or_build(cache / key, source, context=context)


@dataclass(frozen=True)
class Data:
    """`val`: a file of its own, or None: a fraction of `train`, which may be 0."""

    train: Texts
    val: Texts | None

    @property
    def digest(self) -> str:
        return shards.key_of(self.train.digest, self.val.digest if self.val else "")


@dataclass(frozen=True)
class Lessons:
    """All training and validation data, as tokens. `cut`: number of samples without a label after truncation.
    `val_texts`: the texts of the validation samples, with those that were cut, as numbers of a file."""

    table: Table
    train: Rows
    val: Rows
    val_texts: tuple[Texts, Sequence[int]]
    cut: int
    digest: str
    tokenizer: Any

    @property
    def numbers(self) -> list[Any]:
        """The samples of each level."""
        levels = shards.levels_of(self.train.samples)
        return [np.flatnonzero(levels == level).astype(np.int32) for level in range(len(self.table.levels))]


def read_texts(options: Options) -> Data:
    val = Texts(options["val_data_path"], options) if options["val_data_path"] else None
    return Data(Texts(options["data_path"], options), val)


def make_lessons(texts: Data, tokenizer: Any, options: Options, *, context: BaseContext | None = None) -> Lessons:
    """Open the encoded conversations, or encode them. `context`: of worker processes. Raises InvalidDataError."""
    every = texts.train.encoded(tokenizer, context=context)
    other = texts.val.encoded(tokenizer, context=context) if texts.val else None
    train_numbers, val_numbers = split(len(every), options) if other is None else (range(len(every)), range(len(other)))
    val_source = every if other is None else other
    table = choose_table(
        rows_of_levels(every, train_numbers),
        wanted=options["curriculum"],
        levels=options["difficulty_levels"],
        stages=options["curriculum_schedule"],
    )
    train = learned(every, train_numbers, table.levels)
    if not len(train):
        raise InvalidDataError(listed("program.all-cut", cutoff=options["cutoff_len"]))
    # Without a curriculum the validation loss is still reported by difficulty, so that two runs can be compared.
    named = rows_of_levels(val_source, val_numbers)
    val_levels = tuple(level for level in options["difficulty_levels"] if level in named)
    if len(val_levels) < 2 or any(level not in val_levels for level in named):
        val_levels = ("all",)
    pad_id, multiple = chat_template.pad_id_of(tokenizer), options["pad_to_multiple_of"]
    return Lessons(
        table,
        Rows(train, table.levels, pad_id, multiple),
        Rows(learned(val_source, val_numbers, val_levels), val_levels, pad_id, multiple),
        (texts.val or texts.train, val_numbers),
        len(train_numbers) - len(train),
        texts.digest,
        tokenizer,
    )


def split(count: int, options: Options) -> tuple[Array, Array]:
    """Return the numbers of the samples to train on and to validate on, by the seed."""
    if not options["val_size"]:
        return range(count), ()
    if count < 2:
        raise InvalidDataError(listed("program.one-sample", path=options["data_path"], count=count))
    shuffled = array("i", range(count))  # a list takes ten times the memory, on every rank
    random.Random(options["seed"]).shuffle(shuffled)
    taken, order = max(1, round(count * options["val_size"])), np.frombuffer(shuffled, dtype=np.int32)
    return np.sort(order[taken:]), np.sort(order[:taken])


def rows_of_levels(every: Tokens, numbers: Sequence[int]) -> dict[str | None, int]:
    """Return how many of these samples each difficulty has."""
    counts = np.bincount(every.levels[np.asarray(numbers, dtype=np.int32)], minlength=len(every.names) + 1).tolist()
    return {name: count for name, count in zip([None, *every.names], counts) if count}


def learned(every: Tokens, numbers: Sequence[int], levels: Sequence[str]) -> Tokens:
    """Return those of the samples that have something to train on, with indices of `levels`; one level has all."""
    kept = np.asarray(numbers, dtype=np.int32)
    kept = kept[every.lengths[kept] > 0]
    of_name = {name: number for number, name in enumerate(levels)} if len(levels) > 1 else {}
    of_group = np.array([0, *(of_name.get(name, 0) for name in every.names)], dtype=np.uint8)
    return every.select(kept, of_group[every.levels[kept]])


def make_course(lessons: Lessons, options: Options, *, world_size: int) -> Course:
    samples = lessons.train.samples
    lengths = shards.lengths_of(samples)
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
    samples: Any = lessons.train.samples
    lengths, whole = samples.lengths, samples.manifest
    lines = [
        *lessons.table.notes,
        listed(
            "program.data",
            count=len(samples),
            source=listed("program.synthetic-samples") if options["data_path"] == GENERATED else options["data_path"],
            mean=lengths.mean(),
            longest=int(lengths.max()),
            learned=whole["learned"] / whole["tokens"],
            val=len(lessons.val.samples),
        ),
    ]
    if lessons.cut:
        lines.append(listed("program.samples-dropped", count=lessons.cut, cutoff=options["cutoff_len"]))
    at_cutoff = int((lengths == options["cutoff_len"]).sum())
    if at_cutoff:
        lines.append(
            listed(
                "program.samples-truncated",
                count=at_cutoff,
                fraction=at_cutoff / len(samples),
                cutoff=options["cutoff_len"],
            )
        )
    return lines + course.describe()


def texts_to_answer(lessons: Lessons, count: int) -> Sequence[tuple[int, Conversation]]:
    """Select conversations evenly over the validation samples."""
    texts, numbers = lessons.val_texts
    if not count or not len(numbers):
        return []
    chosen = range(0, len(numbers), max(1, len(numbers) // count))
    return [(i, texts.conversations[numbers[i]]) for i in chosen][:count]
