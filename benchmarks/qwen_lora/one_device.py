"""`python -m benchmarks.qwen_lora.one_device [--out FILE]`: the training loop on one device, without network and data.

The same model, LoRA and made-up rows as beside_trainer. Prints JSON: our loop beside a plain loop over batches that
were made before, in turns; packed rows beside rows of similar length; what a step that logs nothing waits for, by the
profiler; float16 with loss scaling.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ascendrun.programs.devices import kernels
from ascendrun.programs.devices.accelerator import choose_precision, open_accelerator
from ascendrun.programs.qwen_lora import base
from ascendrun.programs.qwen_lora.sft_task import Rows, forward
from ascendrun.programs.trainer.data import deal
from ascendrun.programs.trainer.runtime import Runtime
from benchmarks.qwen_lora import beside_trainer as beside
from benchmarks.qwen_lora.beside_trainer import LR, Timed, alone, course_of, filled, make_loop, measured, wait

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
QUIET = {"logging_steps": 10**6}


class Bench:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.config = asked, base.shape_config(asked.shape)
        self.samples = beside.make_samples(asked.samples, asked.length, self.config.vocab_size)
        self.rows = Rows(self.samples, ("all",), 0, 64)

    def here(self, dtype: str) -> tuple[Runtime, Any]:
        here = alone(self.asked.family)
        precision = choose_precision(dtype, here.accelerator)
        kernels.sound_kernels(here.accelerator, precision.compute)
        beside.reset(self.asked.family)
        return here, precision

    def model(self, dtype: str) -> Any:
        return filled(self.config, *self.here(dtype))

    def loop(self, folder: Path) -> float:
        here, precision = self.here(self.asked.dtype)
        course = course_of(self.samples, self.asked.batch_size, row_tokens=self.asked.length, steps=self.asked.steps)
        settings = {"micro_batch_size": self.asked.rows, **QUIET}
        loop = make_loop(filled(self.config, here, precision), self.rows, course, here, precision, folder, **settings)
        return measured(loop, Timed(self.asked.warmup))

    def plain(self, *, packed: bool = True) -> float:
        here, precision = self.here(self.asked.dtype)
        steps = self.batches(packed=packed)
        model = filled(self.config, here, precision)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
        timed = Timed(self.asked.warmup)
        for step in range(self.asked.steps):
            pieces = steps[step]
            weight = sum(piece.weight for piece in pieces)
            for piece in pieces:
                tensors = {name: each.to(here.device, non_blocking=True) for name, each in piece.tensors.items()}
                with here.accelerator.autocast(precision.compute):
                    loss = forward(model, tensors).sum()
                (loss / weight).backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            timed.step(sum(piece.tokens for piece in pieces))
        return timed.per_second()

    def batches(self, *, packed: bool) -> list[list[Any]]:
        """Of each step. Unpacked, a pass has as many tokens at most, of rows of similar length."""
        tokens, lengths = self.asked.rows * self.asked.length, [len(each.ids) for each in self.samples]
        course = course_of(
            self.samples, self.asked.batch_size, row_tokens=self.asked.length if packed else 0, steps=self.asked.steps
        )
        found = []
        for step in range(self.asked.steps):
            if packed:
                pieces = deal(course.units(step), 0, 1, micro_batch=self.asked.rows)
            else:
                pieces = deal(course.units(step), 0, 1, micro_tokens=tokens, length_of=lambda unit: lengths[unit[0]])
            found.append([self.rows.batch(piece) for piece in pieces])
        return found

    def waits(self, folder: Path) -> dict[str, Any]:
        """What the host waited for in the steps after the first ones, by step."""
        here, precision = self.here(self.asked.dtype)
        counted, skipped = 2, self.asked.warmup
        course = course_of(
            self.samples, self.asked.batch_size, row_tokens=self.asked.length, steps=skipped + counted + 2
        )
        settings = {"micro_batch_size": self.asked.rows, **QUIET}
        loop = make_loop(filled(self.config, here, precision), self.rows, course, here, precision, folder, **settings)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.asked.family == "cuda" else [])]
        profiler, done = profile(activities=activities), [0]
        original = loop._step

        def step() -> None:
            if done[0] == skipped:
                profiler.start()
            original()
            done[0] += 1
            if done[0] == skipped + counted:
                profiler.stop()

        loop._step = step  # type: ignore[method-assign]
        loop.run()
        seen: Counter[str] = Counter()
        events: Any = profiler.events()  # type: ignore[no-untyped-call]
        for event in events or ():
            seen[event.name] += event.name in WAITS
        return {"steps": counted, **{name: seen[name] / counted for name in WAITS}}

    def half(self, folder: Path) -> dict[str, Any]:
        """Losses in float16 with loss scaling."""
        here, precision = self.here("float16")
        here.metrics = io.StringIO()
        course = course_of(self.samples, self.asked.batch_size, row_tokens=self.asked.length, steps=self.asked.steps)
        settings = {"micro_batch_size": self.asked.rows, "logging_steps": 1}
        loop = make_loop(filled(self.config, here, precision), self.rows, course, here, precision, folder, **settings)
        loop.run()
        losses = losses_of(here)
        scale = loop.engine.scaler.get_scale()
        return {"losses": [losses[0], losses[-1]], "finite": all(map(math.isfinite, losses)), "scale": scale}


def losses_of(here: Runtime) -> list[float]:
    assert isinstance(here.metrics, io.StringIO)
    lines = [json.loads(line) for line in here.metrics.getvalue().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def compare(ways: Sequence[Any], rounds: int) -> tuple[list[list[float]], float]:
    """Run both in turns; return the rates of each, and the median of their ratios."""
    rates: list[list[float]] = [[], []]
    for _ in range(rounds):
        for way, found in zip(ways, rates):
            found.append(round(way(), 1))
    return rates, round(median(one / other for one, other in zip(*rates)), 3)


def main() -> None:
    parser = beside.make_parser(__doc__, steps=16, warmup=4)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    bench = Bench(asked)
    found: dict[str, Any] = {
        "device": open_accelerator(asked.family, 0).name,
        "torch": torch.__version__,
        **{name: value for name, value in vars(asked).items() if name != "out"},
    }
    with tempfile.TemporaryDirectory() as given:
        folder, began_s = Path(given), time.monotonic()
        found["waits"] = bench.waits(folder / "waits")
        print(json.dumps(found), flush=True)
        rates, ratio = compare((lambda: bench.loop(folder / str(time.monotonic_ns())), bench.plain), asked.rounds)
        found["loop"] = {"tokens_per_s": dict(zip(("ours", "plain"), rates)), "ratio": ratio}
        here, model = alone(asked.family), bench.model("bfloat16")
        found["loop"]["mfu"] = beside.used(rates[0][-1], beside.flops_of(model, bench.config, bench.samples), here)
        del model
        print(json.dumps(found), flush=True)
        rates, ratio = compare((bench.plain, lambda: bench.plain(packed=False)), asked.rounds)
        found["packing"] = {"tokens_per_s": dict(zip(("packed", "unpacked"), rates)), "ratio": ratio}
        print(json.dumps(found), flush=True)
        if asked.family != "cpu":
            found["float16"] = bench.half(folder / "half")
        wait()
        found["seconds"] = round(time.monotonic() - began_s, 1)
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
