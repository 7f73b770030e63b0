"""Arithmetic of batches that spares a wasted start: do they divide among the ranks, are there rows enough."""

from __future__ import annotations


def nearest_multiples(value: int, of: int) -> tuple[int, int]:
    """The nearest valid numbers below and above; the one below is at least `of`."""
    below = max(of, value // of * of)
    return below, below if below == value else below + of if below < value else below


def batch_problems(*, batch_size: int, world_size: int, micro_batch: int, samples: int) -> list[str]:
    """`batch_size`: samples a step over all ranks; `micro_batch`: a rank's at once, 0: its share; `samples`: of all."""
    unit = world_size * (micro_batch or 1)
    problems = []
    if batch_size < world_size:
        problems.append(
            f"--global_batch_size={batch_size} on {world_size} ranks leaves {world_size - batch_size} without a "
            f"sample in every step; take {world_size} or more, or fewer devices"
        )
    elif batch_size % unit:
        below, above = nearest_multiples(batch_size, unit)
        shown = f"{world_size} ranks" + (f" x --micro_batch_size={micro_batch}" if micro_batch else "")
        problems.append(
            f"--global_batch_size={batch_size} does not divide by {unit} ({shown}), so ranks wait for others; "
            f"take {below}" + (f" or {above}" if above != below else "")
        )
    if batch_size > samples:
        problems.append(f"--global_batch_size={batch_size}, but there are {samples} samples")
    return problems
