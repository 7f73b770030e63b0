"""One rank of one case: trains two steps and writes the most bytes that its tensors held at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable

import torch

from ascendrun.planner import cost
from ascendrun.programs.devices import kernels
from ascendrun.programs.trainer import distributed, runtime
from ascendrun.programs.trainer.optim import adamw
from ascendrun.programs.trainer.strategies.parallel import wrap
from benchmarks.memory.cases import CASES, SMALL, Case, builder, step

STEPS = 2
"""The second one has the optimizer's moments from its beginning."""


def main(argv: list[str]) -> None:
    """ARGV: the case's name, the device family, the file for the result."""
    name, family, out = argv
    case = (CASES if os.environ.get("MEMORY_CASES") == "large" else SMALL)[name]
    runtime.run(lambda here: measure(case, here, Path(out)), family=family, timeout_s=120)


def measure(case: Case, here: runtime.Runtime, out: Path) -> None:
    if here.control is None and case.strategy in ("fsdp2", "zero3"):
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29581")
        here.control = distributed.join(0, 1, here.accelerator.backend, 60)
    kernels.sound_kernels(here.accelerator, case.precision().compute)
    measured = peak_of(lambda: train(case, here), here)
    peaks = here.gather(measured)
    if here.is_first:
        need = estimate(case, here.world_size, here.family)
        out.write_text(
            json.dumps({"measured": max(peaks), "estimated": need.allocated(here.family), "need": dict(need.parts)})
        )


def estimate(case: Case, world_size: int, family: str) -> cost.Memory:
    compute_bytes = case.precision().compute.itemsize
    devices = cost.Devices(family, world_size, world_size, compute_bytes=compute_bytes)
    return cost.memory_of(case.work(), devices, cost.Layout(case.strategy, case.checkpointed))


def train(case: Case, here: runtime.Runtime) -> None:
    torch.manual_seed(1)
    engine = wrap(
        builder(case)().train(),
        here,
        strategy=case.strategy,
        make_optimizer=lambda module: adamw(module, 1e-3),
        precision=case.precision(),
    )
    for _ in range(STEPS):
        for piece in range(case.pieces):
            tensors = {
                name: torch.ones(shape, dtype=torch.int64, device=here.device) for name, shape in case.shapes().items()
            }
            with engine.accumulate(last=piece + 1 == case.pieces):
                with engine.autocast():
                    loss = step(engine.model, tensors)
                engine.backward(loss / 1000)
        engine.finish(1.0)


def peak_of(body: Callable[[], None], here: runtime.Runtime) -> int:
    """By the device's allocator; on the CPU by torch's own account of its allocations."""
    if here.accelerator.module is not None:
        body()
        here.accelerator.synchronize()
        return here.accelerator.memory_bytes()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        body()
    found: list[tuple[int, int, int]] = []
    gather_allocations(profiler.profiler.kineto_results.experimental_event_tree(), found)
    _, total, size = min(found)
    # Torch's count is of the process: what an earlier profile saw allocated, and not freed, is still in it.
    return max(total for _, total, _ in found) - (total - size)


def gather_allocations(events: Any, found: list[tuple[int, int, int]]) -> None:
    """Add (time, bytes of all allocations then, bytes of this one) of every allocation and release."""
    for event in events:
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            found.append((event.start_time_ns, int(fields.total_allocated), int(fields.alloc_size)))
        gather_allocations(event.children, found)


if __name__ == "__main__":
    main(sys.argv[1:])
