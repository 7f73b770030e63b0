"""A trace of a few steps by torch's or torch_npu's profiler, in a directory for TensorBoard and MindStudio."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ascendrun.programs.trainer.runtime import Runtime

SKIPPED_STEPS = 3
"""The first steps open connections and compile; they are not representative."""


class Profiler(Protocol):
    def step(self) -> None: ...


class NoProfiler:
    def step(self) -> None:
        pass


@contextlib.contextmanager
def open_profiler(folder: str, here: Runtime, *, steps: int) -> Iterator[Profiler]:
    """Profile the training; call `step()` after each step. Empty `folder`: no trace. Every rank writes its own."""
    if not folder:
        yield NoProfiler()
        return
    module: Any = torch.profiler
    if here.family == "npu":
        import torch_npu

        module = torch_npu.profiler
    path = Path(folder) / f"rank-{here.rank:05d}"
    path.mkdir(parents=True, exist_ok=True)
    schedule = module.schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=steps, repeat=1)
    with module.profile(
        schedule=schedule,
        on_trace_ready=module.tensorboard_trace_handler(str(path)),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        here.log(
            "program.profile",
            "profiling steps {first} to {last}: {directory}",
            first=SKIPPED_STEPS + 1,
            last=SKIPPED_STEPS + steps,
            directory=folder,
        )
        yield profiler
