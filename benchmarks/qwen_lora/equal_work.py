"""Samples a CPU second of the same LoRA training four ways, in turns, in one process on one core.

    OMP_NUM_THREADS=1 taskset -c 1 python -m benchmarks.qwen_lora.equal_work --out FILE

    trainer    transformers' Trainer
    plain      a loop of a few lines: collate, forward, backward, norm, AdamW
    unpacked   ours, one sample in a row
    packed     ours, several samples in a row of at most `--length` tokens

Model, LoRA, the samples of each step and their order are equal; a step is one pass, padded to its longest row in all
ways but `packed`; float32. A turn is `--steps` steps of each way after `--warmup`;
CPU seconds of all threads count, so that other work on the machine changes little. The result is the median over
`--rounds` rounds, and of the ratios within a round. `outside` is the share of the seconds of a packed step that is not
in the model's forward and backward pass, by part.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

from ascendrun.programs.devices.accelerator import choose_precision
from ascendrun.programs.qwen_lora import base
from ascendrun.programs.qwen_lora.sft_task import Rows
from benchmarks.qwen_lora import beside_trainer as beside

QUIET = {"logging_steps": 10**6}
PARTS = {
    "optimizer": ("engine.py", "finish"),
    "waiting for batches": ("data.py", "share"),
    "copies, seeds, times": ("loop.py", "_pass"),
    "sums": ("metrics.py", "add"),
}
"""The functions of our loop whose time is counted, and where they are."""


class Ways:
    def __init__(self, asked: Namespace, folder: Path) -> None:
        self.asked, self.folder, self.config = asked, folder, base.shape_config(asked.shape)
        self.here = beside.alone("cpu")
        self.precision = choose_precision("float32", self.here.accelerator)
        self.samples = beside.make_samples(asked.samples, asked.length, self.config.vocab_size)
        course = self.course(0)
        order = [number for step in range(asked.steps) for (number,) in course.units(step)]
        self.in_order = beside.Listed([self.samples[number] for number in order])

    def course(self, row_tokens: int) -> Any:
        return beside.course_of(self.samples, self.asked.batch_size, row_tokens=row_tokens, steps=self.asked.steps)

    def model(self) -> Any:
        return beside.filled(self.config, self.here, self.precision)

    def rate(self, timed: beside.Timed) -> float:
        return float((self.asked.steps - self.asked.warmup) * self.asked.batch_size / (timed.clock() - timed.began_s))

    def trainer(self) -> float:
        from transformers import Trainer, TrainerCallback

        timed, model = beside.Timed(self.asked.warmup), self.model()
        model.config._attn_implementation = "sdpa"

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *given: Any, **more: Any) -> None:
                timed.step(0)

        class InOrder(Trainer):  # type: ignore[misc]
            def get_train_dataloader(self) -> Any:
                size = self.args.per_device_train_batch_size
                return torch.utils.data.DataLoader(self.train_dataset, batch_size=size, collate_fn=beside.collate)

        arguments = beside.arguments_of(self.folder, self.asked, self.asked.steps, self.asked.batch_size, 1, **QUIET)
        InOrder(model=model, args=arguments, train_dataset=self.in_order, callbacks=[Clock()]).train()
        return self.rate(timed)

    def plain(self) -> float:
        timed, model = beside.Timed(self.asked.warmup), self.model()
        model.config._attn_implementation = "sdpa"
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=beside.LR, weight_decay=0.0, fused=True)
        size = self.asked.batch_size
        for step in range(self.asked.steps):
            batch = beside.collate([self.in_order[step * size + place] for place in range(size)])
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits[:, :-1].float()
            loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            timed.step(0)
        return self.rate(timed)

    def ours(self, row_tokens: int, timed: Any = None) -> float:
        rows = Rows(self.samples, ("all",), 0, 8)
        folder = self.folder / str(time.monotonic_ns())
        loop = beside.make_loop(self.model(), rows, self.course(row_tokens), self.here, self.precision, folder, **QUIET)
        timed = timed or beside.Timed(self.asked.warmup)
        beside.measured(loop, timed)
        return self.rate(timed)

    def outside(self) -> dict[str, float]:
        """Return the shares of the parts in the seconds of packed steps, the first ones included."""
        profiler = cProfile.Profile()
        profiler.runcall(self.ours, self.asked.length)
        stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        whole = next(each[3] for (file, _, name), each in stats.items() if name == "run" and file.endswith("loop.py"))
        found = {}
        for part, (file, name) in PARTS.items():
            ends = f"trainer/{file}", f"strategies/{file}"
            column = 2 if name == "_pass" else 3  # of a pass what is neither the model nor another function
            seconds = [each[column] for (path, _, own), each in stats.items() if own == name and path.endswith(ends)]
            found[part] = sum(seconds) / whole
        return {name: round(share, 4) for name, share in found.items()}


def main() -> None:
    parser = beside.make_parser(__doc__, steps=14, warmup=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(family="cpu", shape="small", dtype="float32", length=256, batch_size=16, samples=800)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        ways = Ways(asked, Path(name))
        arms: dict[str, Callable[[], float]] = {
            "trainer": ways.trainer, "plain": ways.plain,
            "unpacked": lambda: ways.ours(0), "packed": lambda: ways.ours(asked.length),
        }  # fmt: skip
        for each in arms.values():
            each()
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(asked.rounds):
            for name, each in arms.items():
                rates[name].append(round(each(), 2))
                print(name, rates[name][-1], flush=True)
        outside = ways.outside()
    pairs = [("unpacked", "trainer"), ("packed", "trainer"), ("unpacked", "plain"), ("packed", "unpacked")]
    result = {
        "samples_per_cpu_s": {name: median(each) for name, each in rates.items()},
        "ratios": {f"{one} / {other}": round(median(a / b for a, b in zip(rates[one], rates[other])), 3)
                   for one, other in pairs},
        "outside": outside,
        "turns": rates,
        "mean_length": round(sum(len(each.ids) for each in ways.samples) / len(ways.samples), 1),
        "torch": torch.__version__,
        **{name: value for name, value in vars(asked).items() if name not in ("out", "rows", "losses")},
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
