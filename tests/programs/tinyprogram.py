"""A program that trains a small network on made-up rows, with every switch that the trainer's tests turn."""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.nn import functional

from ascendrun.programs.devices import accelerator
from ascendrun.programs.trainer import data, runtime, schedule
from ascendrun.programs.trainer import optimizer as optimizers
from ascendrun.programs.trainer.data import Batch, Rollouts, Unit
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.optim import Group, OptimizerPlan, adamw
from ascendrun.programs.trainer.strategies import fsdp2, zero3
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings, Task

WORDS, WIDTH = 31, 16
FULL_BYTES = 20_000
DEFAULTS: dict[str, Any] = {
    "strategy": "ddp",
    "dtype": "float32",
    "samples": 60,
    "batch_size": 6,
    "epochs": 3,
    "max_steps": 0,
    "learning_rate": 0.01,
    "seed": 3,
    "dropout": 0.1,
    "resume_from_checkpoint": "auto",
    "logging_steps": 1,
    "frozen": False,
    "poison": None,
    "kill": None,
    "superseded_at": None,
    "eval_steps": 0,
    "best": "",
    "identity": 0,
    "full_disk": None,
    "save_in_background": True,
    "on_save_failure": "continue",
    "stop_at": None,
    "save_total_limit": 2,
    "room": None,
    "load": None,
    "silent": [0, 0],
    "muon": False,
    "shard": False,
    "shard_size": 0,
    "cut_elements": optimizers.CUT_ELEMENTS,
    "persisted_elements": zero3.PERSISTED_ELEMENTS,
    "rollouts": 0,
    "compile": "none",
}
"""[step, rank], counted from 0: `poison` makes the loss nan, `kill` ends the rank with SIGKILL, `stop_at` with SIGTERM;
`superseded_at`: before it a later attempt claims the checkpoint folder. `full_disk`: [from step, to step], in which no
file can grow; `silent`: the same, in which no word is asked for; `room`: rows that fit, by rank. `rollouts`: rows that
the model makes, for that many steps at once; 0: planned ones."""


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.back(functional.gelu(self.wide(self.norm(x)))))


class Network(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1, device=ids.device)[None, :, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Counting(Task):
    """Each row counts upwards from somewhere; the next word is to be said."""

    parts = ("even", "odd")

    def __init__(self, options: dict[str, Any], here: runtime.Runtime) -> None:
        self.options, self.here = options, here
        lengths = [4 + 7 * i % 9 for i in range(options["samples"])]
        self.rows = [[(i + j) % WORDS for j in range(length)] for i, length in enumerate(lengths)]
        self.engine: Any = None
        self.step = 0

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        numbers = [number for unit in units for number in unit]
        rows = [self.rows[number] for number in numbers]
        labels = data.pad(rows, value=-100)[:, 1:]
        if self.options["silent"][0] <= step < self.options["silent"][1]:
            labels = torch.full_like(labels, -100)
        groups = {"even": float(sum(n % 2 == 0 for n in numbers)), "odd": float(sum(n % 2 for n in numbers))}
        tensors = {
            "ids": data.pad(rows, value=0)[:, :-1],
            "labels": labels,
            "odd": torch.tensor(numbers) % 2,
            "step": torch.tensor(step),
        }
        return Batch(
            tensors, weight=float((labels >= 0).sum()), tokens=sum(map(len, rows)), samples=len(rows), groups=groups
        )

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> Any:
        step, me = int(tensors["step"]), self.here.rank
        for option, number in (("kill", signal.SIGKILL), ("stop_at", signal.SIGTERM)):
            if self.options[option] == [step, me]:
                os.kill(os.getpid(), number)
        if self.options["superseded_at"] == [step, me]:
            (runtime.checkpoint_folder("out") / ".epochs" / "000099.json").write_text('{"tag": "other.1"}')
        if self.options["full_disk"]:
            first, last = self.options["full_disk"]
            limit = FULL_BYTES if first <= step < last else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        if self.options["room"] and len(tensors["ids"]) > self.options["room"][me]:
            raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 20.00 MiB")
        logits = model(tensors["ids"]).float()
        each = functional.cross_entropy(logits.flatten(0, 1), tensors["labels"].flatten(), reduction="none")
        by_row = each.view_as(tensors["labels"]).sum(1)
        counts = (tensors["labels"] >= 0).sum(1)
        parts = {
            name: (by_row[tensors["odd"] == odd].sum(), float(counts[tensors["odd"] == odd].sum()))
            for odd, name in enumerate(self.parts)
        }
        bad = self.options["poison"] == [step, me]
        return by_row.sum() * (float("nan") if bad else 1.0), parts

    def rollouts(self, step: int) -> list[list[Batch]]:
        """Rows that the model continues by chance. Every rank makes all of them, and takes its own."""
        updates, size, seed = self.options["rollouts"], self.options["batch_size"], self.options["seed"]
        made: list[list[Batch]] = []
        self.engine.module.eval()
        for update in range(updates):
            rows = []
            for i in range(size):
                chance = torch.Generator().manual_seed(data.seed_of(seed, 9, step + update, i))
                row = [(step + i) % WORDS]
                while len(row) < 4 + i % 3:
                    with torch.no_grad():
                        chances = self.engine.model(torch.tensor([row]))[0, -1].float().softmax(0)
                    row.append(int(torch.multinomial(chances, 1, generator=chance)))
                rows.append(row)
            self.rows = rows
            mine = [(i,) for i in range(self.here.rank, size, self.here.world_size)]
            made.append([self.collate(mine[:2], step + update), self.collate(mine[2:] or mine[:1], step + update)])
        self.engine.module.train()
        return made

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        """Worse than ever after step 6, so that the best is not the last."""
        return {"score": float(step if step <= 6 else -step)}


def optimizer(model: nn.Module, options: dict[str, Any], steps: int) -> OptimizerPlan:
    rate = schedule.of_options(options, steps, warmup=3)
    if not options["muon"]:
        return adamw(model, rate)
    matrices = [weight for weight in model.layers.parameters() if weight.ndim == 2]  # type: ignore[union-attr]
    rest = [weight for weight in model.parameters() if not any(weight is each for each in matrices)]
    ours = Group(matrices, "muon", rate, momentum=schedule.ramp(0.8, 0.95, 10), weight_decay=0.1)
    return OptimizerPlan([ours, Group(rest, "adamw", rate)], shard=options["shard"])


def main(argv: list[str]) -> None:
    options = {**DEFAULTS, **json.loads(argv[0])}
    runtime.run(lambda here: train(options, here), timeout_s=60)


def train(options: dict[str, Any], here: runtime.Runtime) -> None:
    torch.manual_seed(options["seed"])
    is_sharded = options["strategy"] in ("fsdp2", "hsdp")
    with init_empty_weights() if options["load"] and is_sharded else contextlib.nullcontext():
        network = Network(options["dropout"])
    if options["load"] and not is_sharded:
        fsdp2.read_into(network, Path(options["load"]))
    if options["frozen"]:
        network.words.requires_grad_(False)
    work = Counting(options, here)
    lengths = [len(row) for row in work.rows]
    plan: Any = data.Buckets(lengths, batch_size=options["batch_size"], seed=options["seed"], window=2)
    precision = accelerator.choose_precision(options["dtype"], here.accelerator)
    steps = options["max_steps"] or options["epochs"] * plan.steps_per_epoch
    optimizers.CUT_ELEMENTS = options["cut_elements"]
    zero3.PERSISTED_ELEMENTS = options["persisted_elements"]
    engine = wrap(
        network,
        here,
        strategy=options["strategy"],
        make_optimizer=lambda model: optimizer(model, options, steps),
        precision=precision,
        shard_size=options["shard_size"],
        compile=options["compile"],
    )
    if options["load"] and is_sharded:
        fsdp2.read_into(network, Path(options["load"]))
    settings = Settings.of(options, steps=steps)
    work.engine = engine
    source: Any = plan
    if options["rollouts"]:
        source = Rollouts(work.rollouts, here, updates=options["rollouts"], steps_per_epoch=plan.steps_per_epoch)
    loop = Loop(
        here,
        engine,
        source,
        work,
        settings,
        folder=runtime.checkpoint_folder("out"),
        identity={"task": options["identity"]},
    )
    if options["room"]:
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        here.log(f"micro-batch found: {loop.find_micro_batch([(longest,)], largest=8)}")
    loop.resume(options["resume_from_checkpoint"])
    ending = loop.run()
    here.log(f"ending: {ending.value}")
    stats = sys.modules.get("torch._dynamo.utils")
    here.log(f"graphs: {stats.counters['stats']['unique_graphs'] if stats else 0}")
    if ending.is_complete:
        here.log(f"best: {loop.load_best()}")
        state = engine.state()
        pieces = {**state.common, **state.own}
        held = {key.split("/")[0]: 0 for key in pieces}
        for key, piece in pieces.items():
            held[key.split("/")[0]] += piece.data.numel()
        if options["muon"]:
            here.record(event="held", **held)
        final = engine.full_weights()
        if here.is_first:
            torch.save(final, "final.pt")
