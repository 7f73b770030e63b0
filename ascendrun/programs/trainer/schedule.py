"""The learning rate as a fraction of its peak: a function of the step and of the total steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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


def warmup_of(options: Mapping[str, Any], steps: int) -> int:
    """Warm-up steps of a training of `steps`: `warmup_steps`, or the fraction `warmup_ratio` where that is None."""
    given = options["warmup_steps"]
    return min(steps, round(steps * options["warmup_ratio"]) if given is None else int(given))
