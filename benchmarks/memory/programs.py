"""`python -m benchmarks.memory.programs [--out FILE]`: what trainings of both programs take of one device, beside the
estimate of the planner. Random weights, synthetic samples; a few steps each.

Writes a table in Markdown. Without a GPU nothing is measured, and the estimates for one are printed.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ascendrun.planner import cost
from ascendrun.planner.models import Workload, shape_of
from ascendrun.programs.devices import kernels
from ascendrun.programs.devices.accelerator import choose_precision, open_accelerator
from ascendrun.programs.qwen_lora import base, lora
from ascendrun.programs.qwen_lora.rules import work_of
from ascendrun.programs.qwen_lora.sft_task import Rows, largest_micro_batch
from ascendrun.programs.trainer.runtime import Runtime
from benchmarks.qwen_lora import beside_trainer as beside
from benchmarks.trajectory import throughput

STEPS = 3


@dataclass(frozen=True)
class Case:
    """`rows`, `length`: of a pass; a step has `pieces` passes. `shape`: of qwen_lora; trajectory: hidden x layers."""

    program: str
    shape: Any
    dtype: str
    recomputes: bool
    rows: int
    length: int
    pieces: int = 1
    dropout: float = 0.0


QWEN, SMALL, LARGE = "qwen2.5-0.5b", (512, 8), (896, 24)
CASES = (
    Case("qwen_lora", QWEN, "bfloat16", False, 4, 1024),
    Case("qwen_lora", QWEN, "bfloat16", False, 4, 2048),
    Case("qwen_lora", QWEN, "bfloat16", True, 8, 2048),
    Case("qwen_lora", QWEN, "bfloat16", False, 4, 2048, pieces=2),
    Case("qwen_lora", QWEN, "bfloat16", False, 1, 512),
    Case("qwen_lora", QWEN, "bfloat16", False, 4, 1024, dropout=0.05),
    Case("qwen_lora", QWEN, "float32", False, 4, 1024),
    Case("qwen_lora", QWEN, "float32", True, 4, 1024),
    Case("trajectory", SMALL, "bfloat16", False, 64, 512),
    Case("trajectory", LARGE, "bfloat16", False, 32, 512),
    Case("trajectory", LARGE, "bfloat16", True, 64, 512),
    Case("trajectory", LARGE, "bfloat16", False, 16, 512, pieces=2),
    Case("trajectory", LARGE, "float32", False, 16, 512),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="a program")
    parser.add_argument("--scale", type=int, default=1, help="divide rows and lengths, to try the script")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lines = [
        "| program | model | dtype | activations | a pass | passes | measured | estimated | off |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        if asked.only in ("", case.program):
            case = replace(case, rows=max(1, case.rows // asked.scale), length=case.length // asked.scale)
            lines.append(line_of(case, asked.family))
            print(lines[-1], flush=True)
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def line_of(case: Case, family: str) -> str:
    here = Runtime(0, 0, 1, None, open_accelerator(family, 0))
    precision = choose_precision(case.dtype, here.accelerator)
    gc.collect()
    here.accelerator.empty_cache()
    if here.accelerator.module is not None:
        here.accelerator.module.reset_peak_memory_stats()
    left = here.accelerator.module.memory_allocated() if here.accelerator.module is not None else 0
    with tempfile.TemporaryDirectory() as folder:
        run = qwen_lora if case.program == "qwen_lora" else trajectory
        work = run(case, here, precision, Path(folder))
    assert work is not None
    target = "cuda" if family == "cpu" else family
    devices = cost.Devices(target, 1, 1, compute_bytes=precision.compute.itemsize)
    formula = cost.memory_of(work, devices, cost.Layout("ddp", case.recomputes))
    measured = here.accelerator.memory_bytes() if here.accelerator.module is not None else 0
    print(f"  left before: {left / 2**20:.0f} MiB; {dict(formula.parts)}")
    size = formula.allocated(target)
    off = f"{size / measured - 1:+.1%}" if measured else "-"
    model = case.shape if case.program == "qwen_lora" else f"{case.shape[0]} x {case.shape[1]} layers"
    return (
        f"| {case.program} | {model} | {case.dtype} | {'recomputed' if case.recomputes else 'kept'} | "
        f"{case.rows} x {case.length} | {case.pieces} | {measured / 2**30:.2f} | {size / 2**30:.2f} | {off} |"
    )


def qwen_lora(case: Case, here: Runtime, precision: Any, folder: Path) -> Workload | None:
    config = base.shape_config(case.shape)
    options = {**beside.SETTINGS, "gradient_checkpointing": case.recomputes, "lora_dropout": case.dropout}
    samples = beside.make_samples(400, case.length, config.vocab_size)
    mean = sum(len(each.ids) for each in samples) / len(samples)
    batch = max(1, int(0.9 * case.pieces * case.rows * case.length / mean))
    course = beside.course_of(samples, batch, row_tokens=case.length, steps=STEPS)
    rows = Rows(samples, ("all",), 0, 64)
    kernels.sound_kernels(here.accelerator, precision.compute)
    pass_of = largest_micro_batch(rows, course.units, steps=STEPS, world_size=1, micro_batch=case.rows)
    options["global_batch_size"] = batch
    if here.accelerator.module is not None:
        model = lora.add_lora(base.empty_model(config), options)
        if case.recomputes:
            base.checkpoint_activations(model, strategy="ddp")
        model = beside.filled_with(model, here, precision)
        settings = {"micro_batch_size": case.rows, "logging_steps": 10**6}
        beside.make_loop(model.train(), rows, course, here, precision, folder, **settings).run()
    return work_of(options, shape_of(config.to_dict()), pass_of, steps=STEPS, tokens=1.0, mean=1.0)


def trajectory(case: Case, here: Runtime, precision: Any, folder: Path) -> Workload | None:
    from ascendrun.programs.trainer import options as option_table
    from ascendrun.programs.trajectory.__main__ import OPTIONS
    from ascendrun.programs.trajectory.model import make_model
    from ascendrun.programs.trajectory.train import make_loop, plan_of, work_on

    hidden, layers = case.shape
    batch = case.rows * case.pieces
    samples = throughput.make_samples(batch * STEPS)
    options = {
        **option_table.parse([], option_table.read_table(OPTIONS)),
        **throughput.OPTIONS,
        "global_batch_size": batch,
        "micro_batch_size": case.rows,
        "num_train_epochs": 2,  # so that the longest rows come again, beside the moments of the optimizer
        "dtype": case.dtype,
        "gradient_checkpointing": case.recomputes,
        "dropout": 0.1,
    }
    sizes = throughput.make_sizes(argparse.Namespace(hidden=hidden, layers=layers))
    sizes = replace(sizes, dropout=0.1)
    plan = plan_of(samples.encoded["train"], options)
    if here.accelerator.module is not None:
        make_loop(options, samples, make_model(sizes, seed=0), here, folder).run()
    return work_on(plan, options, sizes, ranks=1, family="cuda" if here.family == "cpu" else here.family)


if __name__ == "__main__":
    main()
