"""Search for the largest micro-batch that fits: halved until no rank runs out of memory."""

from __future__ import annotations

import gc
from typing import Callable

from ascendrun.programs.errors import ProgramError
from ascendrun.programs.trainer.runtime import Runtime


class DeviceOutOfMemoryError(ProgramError):
    """A single sample does not fit in device memory."""


def find_micro_batch(here: Runtime, attempt: Callable[[int], None], *, largest: int) -> int:
    """Return the largest micro-batch up to `largest` that fits on every rank. Raises DeviceOutOfMemoryError.
    `attempt(size)`: a forward and backward pass with `size` of the longest rows, if possible without communication:
    a rank that fails in it leaves its peers waiting. All ranks call this together and get the same result.
    """
    size = largest
    while True:
        has_failed = runs_out(here, attempt, size)
        gc.collect()
        here.accelerator.empty_cache()
        ranks = [rank for rank, failed in enumerate(here.gather(has_failed)) if failed]
        if not ranks:
            here.log(
                "program.micro-batch-found", "micro-batch of {size}: the largest that fits on every rank", size=size
            )
            return size
        if size == 1:
            raise DeviceOutOfMemoryError(
                "program.sample-does-not-fit",
                "a single sample does not fit on the device of rank {rank}\n"
                "hint: shorten the samples, or set gradient_checkpointing: true",
                rank=ranks[0],
            )
        here.log(
            "program.micro-batch-too-large",
            "micro-batch of {size}: rank {rank} is out of memory",
            size=size,
            rank=ranks[0],
        )
        size //= 2


def runs_out(here: Runtime, attempt: Callable[[int], None], size: int) -> bool:
    """Return whether memory runs out. The error, which holds the tensors of its frames, is freed on return."""
    try:
        attempt(size)
        here.accelerator.synchronize()
    except Exception as error:
        if not here.accelerator.is_out_of_memory(error):
            raise
        return True
    return False
