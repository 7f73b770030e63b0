"""Number of samples of each level in every step, such that every window of steps matches the schedule's fractions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import gcd
from typing import Any

import numpy as np

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora.stages import InvalidStagesError, Stage, read_stages, stage_of

Counts = Any
"""An array of int64, steps x levels."""
TRIES, MOST_CHOICES = 1000, 20_000


def parse_stages(texts: Sequence[str], levels: int) -> list[Stage]:
    """Return the stages of a schedule. Raises InvalidDataError."""
    try:
        return read_stages(texts, levels)
    except InvalidStagesError as error:
        raise InvalidDataError(error.problem.text) from None


def quotas(stages: Sequence[Stage], *, steps: int, batch_size: int) -> Counts:
    """Return the cumulative samples of each level before each step: (steps + 1) x levels; a step adds `batch_size`.

    In any window of steps a level's count differs from the schedule's by at most one sample where numbers allow it
    (with the guide's schedule: every even batch_size), else by less than two; from the first step on, by less than one.
    """
    unit, wanted = targets(stages, steps=steps, batch_size=batch_size)
    for ahead in leads(unit, wanted):
        given = schedule(wanted, unit, ahead=ahead, behind=unit - ahead, batch_size=batch_size)
        if given is not None:
            return given
    most = np.full(wanted.shape[1], unit - 1, dtype=np.int64)
    given = schedule(wanted, unit, ahead=most, behind=most, batch_size=batch_size)
    assert given is not None, "there always is a schedule within one sample"
    return given


def targets(stages: Sequence[Stage], *, steps: int, batch_size: int) -> tuple[int, Counts]:
    """Return (units per sample, scheduled units before each step): exact integers, without rounding."""
    unit = lcm_of([share.denominator for _, shares in stages for share in shares])
    rows = [[int(share * unit) * batch_size for share in shares] for _, shares in stages]
    each = np.array([rows[stage_of(step, steps, stages)] for step in range(steps)], dtype=np.int64)
    return unit, np.concatenate([np.zeros((1, each.shape[1]), dtype=np.int64), each.cumsum(0)])


def leads(unit: int, wanted: Counts) -> Iterator[Counts]:
    """Yield limits of how far each level may be ahead of the schedule, in units, even limits first. A level ahead by at
    most x and behind by at most one sample less x is within one sample over any window."""
    grain = int(np.gcd.reduce(np.append(np.unique(wanted % unit), unit)))
    levels, points = wanted.shape[1], list(range(0, unit + 1, grain))
    while len(points) ** levels > MOST_CHOICES:
        points = points[::2]
    choices = sorted(product(points, repeat=levels), key=lambda each: sum(abs(2 * point - unit) for point in each))
    return (np.array(choice, dtype=np.int64) for choice in islice(choices, TRIES))


def lcm_of(numbers: Sequence[int]) -> int:
    found = 1
    for number in numbers:
        found = found * number // gcd(found, number)
    return found


def schedule(wanted: Counts, unit: int, *, ahead: Counts, behind: Counts, batch_size: int) -> Counts | None:
    """Schedule earliest deadline first, which finds a schedule within `ahead` and `behind` if it exists; else None."""
    most, least = (wanted + ahead) // unit, -((behind - wanted) // unit)
    given = np.zeros_like(wanted)
    for step in range(len(wanted) - 1):
        now = np.maximum(given[step], least[step + 1])
        rest = batch_size - int(now.sum() - given[step].sum())
        if rest < 0:
            return None
        for _ in range(rest):
            open_levels = [level for level in range(len(now)) if now[level] < most[step + 1, level]]
            if not open_levels:
                return None
            # The level with the earlier deadline is first; `least` increases with every step, so its index is the time.
            due = [int(np.searchsorted(least[:, level], now[level] + 1)) for level in open_levels]
            now[open_levels[due.index(min(due))]] += 1
        given[step + 1] = now
    return given
