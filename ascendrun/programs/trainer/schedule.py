"""The learning rate as a share of its peak: a function of the step and of the true number of steps."""

from __future__ import annotations

import math

SHAPES = ("cosine", "linear", "constant")


def share_of_peak(step: int, steps: int, *, shape: str = "cosine", warmup_steps: int = 0, floor: float = 0.0) -> float:
    """In (0, 1]: rises in a line over `warmup_steps`, then falls to `floor` at the last of `steps`. Counts from 0.

    `steps` are optimizer steps of the whole training, epochs and accumulation taken into account; a step
    beyond them, of a training that was made longer, stays at the floor.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    way = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    fall = 0.5 * (1 + math.cos(math.pi * way)) if shape == "cosine" else 1 - way
    return floor + (1 - floor) * fall


def warmup_of(value: float, steps: int) -> int:
    """Below 1 a share of the steps, from 1 on a number of steps, at most all of them."""
    return min(steps, round(steps * value) if value < 1 else int(value))
