"""The stages on conversations: mid and sft, on what the assistant writes in them, and rl, on the model's own replies.

Rows of mid and sft have whole conversations, the largest that fits next, and padding; a conversation longer than a row
is not used. A step of rl asks some questions and draws several replies to each. A reply's advantage is its reward minus
the mean of its question. The loss is -log-probability x advantage of every token that the model chose, divided by the
number of these tokens: tokens of the calculator's results carry none, the token that ends a reply does.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from ascendrun.programs.devices import accelerator
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.cache import MULTIPLE, rounded
from ascendrun.programs.generation.engine import Completion
from ascendrun.programs.nanochat import inference
from ascendrun.programs.nanochat import texts as words
from ascendrun.programs.nanochat.base import Course, Options, next_token, refuse, tokens_of, train_model
from ascendrun.programs.nanochat.conversations import ConversationEncoder, decoded
from ascendrun.programs.nanochat.evaluation import Pupil, completions, passes, refuse_tasks, replies
from ascendrun.programs.nanochat.model import NanoChat
from ascendrun.programs.nanochat.rules import too_long
from ascendrun.programs.nanochat.sizes import chat_horizon, settled
from ascendrun.programs.nanochat.tasks import Example, Joined, read_task
from ascendrun.programs.nanochat.texts import first_val_of, mark_of_file
from ascendrun.programs.trainer import shards
from ascendrun.programs.trainer.checkpoint import fingerprint
from ascendrun.programs.trainer.data import IGNORED, Batch, Rollouts
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.shards import Rows
from ascendrun.programs.trainer.strategies.engine import Engine, cast
from ascendrun.programs.trainer.task import Task
from ascendrun.text import Text, listed


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
        weights = here.share(fingerprint(file)["sha256"] if here.is_first else "")
        known = {**self.training, "checkpoints": ""}  # each node may have them elsewhere
        tokens = words.mark_of(self.tokenizer)
        here.check_same(shards.key_of(mixture.digest, tokens, vars(self.model.sizes), known))
        parts = [[given["kind"], given.get("rows") or 0, given.get("epochs") or 1] for given in self.options["mixture"]]
        return {"model": weights[:16], "mixture": parts}


def open_start(options: Options) -> Start:
    """Open the model and the tokenizer of `model_dir`. Raises InvalidDataError."""
    config, model = inference.read_model(options["model_dir"], recomputes=options["gradient_checkpointing"])
    options, tokenizer = settled(options, config), inference.read_tokenizer(options["model_dir"], model)
    length, context = options["max_seq_len"], model.sizes.context
    if length > context:
        raise InvalidDataError(too_long("max_seq_len", length, context, most=context).text)
    return Start(options, model, tokenizer, config.get("training") or {})


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
            raise InvalidDataError(listed("program.few-examples", name=given.get("file") or given["kind"]))
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
    return listed(
        "program.chat-data",
        conversations=facts["conversations"],
        rows=train.count,
        length=train.seq_len,
        val=val.count,
        long=facts["too_long"],
        steps=steps,
        epochs=steps / train.steps_per_epoch,
    )


EVALUATED_SAMPLES = 8
"""Replies to each question of an evaluation, at most."""


def rl_stage(options: Options, here: Runtime) -> None:
    """Train the model of `model_dir` on its own replies to the questions of `mixture`."""
    start = open_start(options)
    options, model = start.options, start.model
    refuse_tasks(options["mixture"])
    mixture = read_mixture(options)
    marks = {**start.agree(mixture, here), "examples": options["target_examples_per_step"]}
    questions = Questions(mixture, options["target_examples_per_step"], options["seed"])
    updates = options["rollout_updates"]
    horizon = chat_horizon(model.sizes, options, options["max_steps"] or questions.steps_per_epoch * updates)
    here.log(
        listed(
            "program.rl-data",
            questions=len(questions.numbers),
            val=len(questions.val),
            steps=horizon.steps,
            samples=options["num_samples"],
            asked=questions.each_step,
        )
    )
    reference = copy.deepcopy(model).requires_grad_(False) if options["kl"] else None

    def objective(engine: Engine) -> tuple[Any, Task]:
        pupil = Pupil(engine, start.tokenizer, options["max_seq_len"], here)
        task = Practice(pupil, questions, options, None if reference is None else place(reference, engine))
        return Rollouts(task.make, here, updates=updates, steps_per_epoch=questions.steps_per_epoch * updates), task

    facts = {"questions": len(questions.numbers), "val": len(questions.val), "digest": mixture.digest}
    work = {"questions_per_step": questions.each_step, "num_samples": options["num_samples"]}
    train_model(Course(model, start.tokenizer, horizon, objective, facts, work, None, marks), options, here)


def place(model: nn.Module, engine: Engine) -> nn.Module:
    return cast(model, engine.precision).to(device=engine.here.device).eval()


class Questions:
    """The questions of each step, in a new order every epoch, and those of the validation."""

    def __init__(self, mixture: Mixture, each_step: int, seed: int) -> None:
        self.mixture, self.each_step, self.seed = mixture, each_step, seed
        self.numbers, self.val = mixture.train_numbers, mixture.val_numbers
        self.steps_per_epoch = max(1, len(self.numbers) // each_step)

    def of_step(self, rollout: int) -> list[tuple[int, Example]]:
        """Return (place in the training, question); the place is the seed of its replies."""
        found = []
        for place_ in range(rollout * self.each_step, (rollout + 1) * self.each_step):
            epoch, at = divmod(place_, len(self.numbers))
            found.append((place_, self.mixture.examples[int(self.order(epoch)[at])]))
        return found

    def order(self, epoch: int) -> Any:
        return np.random.default_rng([self.seed, 6, epoch]).permutation(self.numbers)


@dataclass(frozen=True)
class Reply:
    """`ids`: of the question and of the reply with its end. `targets`: of each but the last of these, the next one
    where the model chose it."""

    ids: Sequence[int]
    targets: Sequence[int]
    reward: float
    advantage: float

    @cached_property
    def learned(self) -> int:
        return sum(target != IGNORED for target in self.targets)


def made_of(texts: Sequence[Completion], rewards: Sequence[float]) -> list[Reply]:
    """Return the replies to one question, each with its advantage over their mean."""
    mean = sum(rewards) / max(1, len(rewards))
    return [
        Reply([*text.prompt, *chosen], [*[IGNORED] * (len(text.prompt) - 1), *targets], reward, reward - mean)
        for text, reward in zip(texts, rewards)
        for chosen, targets in [written(text)]
    ]


def written(text: Completion) -> tuple[list[int], list[int]]:
    """Return the tokens of a reply with its end, and those among them that the model chose."""
    tokens = [*text.tokens, *([] if text.final is None else [text.final])]
    return tokens, [IGNORED if at in text.given else token for at, token in enumerate(tokens)]


class Practice(Task):
    """`reference`: the model before the training, None without `kl`."""

    def __init__(self, pupil: Pupil, questions: Questions, options: Options, reference: nn.Module | None) -> None:
        self.pupil, self.questions, self.options, self.reference = pupil, questions, options, reference
        self.here, self.engine = pupil.here, pupil.engine
        self.author = pupil
        """The pupil as it wrote the present replies."""

    # --- replies ---

    def make(self, step: int) -> list[list[Batch]]:
        """Draw this rank's replies from the present weights; return the batches of each update from them."""
        here, updates = self.here, self.options["rollout_updates"]
        asked = self.questions.of_step(step // updates)[here.rank :: here.world_size]
        with here.phase("rollouts"):
            self.engine.module.eval()
            self.author = replace(self.pupil, engine=self.engine.whole())
            made = self.draw(asked)
            self.engine.module.train()
            self.report(step, made)
            batches = self.batches(made)
            self.author = self.pupil
        return [batches] * updates

    def draw(self, asked: Sequence[tuple[int, Example]]) -> list[Reply]:
        samples = self.options["num_samples"]
        texts = completions(self.author, asked, self.options, samples=samples)
        made: list[Reply] = []
        for number, example in asked:
            mine = [texts[number, sample] for sample in range(samples) if (number, sample) in texts]
            mine = [text for text in mine if text.ended != "error"]
            made += made_of(mine, [example.reward(decoded(self.pupil.tokenizer, text.tokens)) for text in mine])
        return made

    def report(self, step: int, made: Sequence[Reply]) -> None:
        rewards, tokens, count = self.here.sum(
            [sum(each.reward for each in made), float(sum(each.learned for each in made)), float(len(made))]
        )
        if not self.here.is_first or not count:
            return
        self.here.record(step=step, reward=rewards / count, reply_tokens=tokens / count)
        if step % self.options["logging_steps"] == 0:
            self.here.log(
                listed("program.rewards", step=step, reward=rewards / count, count=int(count), tokens=tokens / count)
            )

    # --- learning ---

    def batches(self, made: Sequence[Reply]) -> list[Batch]:
        """Return the replies in batches of similar length. Those that change nothing are only counted: their question
        has equal rewards, and there is no reference."""
        used = [each for each in made if each.learned and (each.advantage or self.reference is not None)]
        used.sort(key=lambda each: len(each.ids))
        size = self.options["micro_batch_size"] or max(1, len(used))
        found = [self.batch_of(used[start : start + size]) for start in range(0, len(used), size)]
        found = found or [Batch({**empty(), **self.compared(empty())}, 0.0, 0, 0)]
        found[0].weight += sum(each.learned for each in made) - sum(batch.weight for batch in found)
        return found

    def batch_of(self, used: Sequence[Reply]) -> Batch:
        width = rounded(len(used[-1].targets), 1 if self.here.family == "cpu" else MULTIPLE)
        ids = torch.zeros(len(used), width, dtype=torch.int64)
        targets = torch.full((len(used), width), IGNORED)
        for row, each in enumerate(used):
            ids[row, : len(each.targets)] = torch.tensor(each.ids[:-1])
            targets[row, : len(each.targets)] = torch.tensor(each.targets)
        advantages = torch.tensor([each.advantage for each in used])
        tensors = {"ids": ids, "targets": targets, "advantages": advantages}
        tokens, learned = sum(len(each.targets) for each in used), sum(each.learned for each in used)
        return Batch({**tensors, **self.compared(tensors)}, float(learned), tokens=tokens, samples=len(used))

    @torch.no_grad()
    def compared(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the log-probabilities of the tokens by the model that wrote them, and by the reference."""
        models = {"old": self.author.engine.module if self.options["clip"] else None, "reference": self.reference}
        ids, targets = (tensors[name].to(self.here.device) for name in ("ids", "targets"))
        with self.author.engine.autocast():
            return {name: chosen(model(ids), targets).cpu() for name, model in models.items() if model is not None}

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        clip, kl = self.options["clip"], self.options["kl"]
        targets, advantages = tensors["targets"], tensors["advantages"][:, None]
        likely = chosen(model(tensors["ids"]), targets)
        gain = likely * advantages
        if clip:
            ratio = (likely - tensors["old"]).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        if kl:
            away = tensors["reference"] - likely
            gain = gain - kl * (away.exp() - away - 1)
        return -torch.where(targets != IGNORED, gain, 0.0).sum()

    # --- evaluation ---

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        """Ask the validation questions; the ranks share them. `reward`: chance that a reply is right."""
        here, samples = self.here, min(EVALUATED_SAMPLES, self.options["num_samples"])
        numbers = self.questions.val[: self.options["eval_questions"]]
        mine = [(int(number), self.questions.mixture.examples[int(number)]) for number in numbers]
        pupil = replace(self.pupil, engine=self.engine.whole())
        rewards, _ = replies(pupil, mine[here.rank :: here.world_size], self.options, samples=samples)
        sums = passes(rewards, samples)
        right, any_right = here.sum([sums["pass@1"], sums[f"pass@{samples}"]])
        return {"reward": right / len(numbers), f"pass@{samples}": any_right / len(numbers)}


def chosen(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each target, in float32; 0 where there is none."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -losses.view_as(targets)


def empty() -> dict[str, torch.Tensor]:
    """Return a row without a target: a rank without replies takes part in the step with it."""
    return {
        "ids": torch.zeros(1, 1, dtype=torch.int64),
        "targets": torch.full((1, 1), IGNORED),
        "advantages": torch.zeros(1),
    }
