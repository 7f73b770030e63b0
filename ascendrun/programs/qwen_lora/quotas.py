"""How many samples of each level every step takes, so that no window of steps strays from the table's shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice, product
from math import gcd
from typing import Any

import numpy as np

from ascendrun.programs.trainer.errors import InvalidDataError

Stage = tuple[Fraction, tuple[Fraction, ...]]
"""(where it ends, as a share of all steps; shares of the levels, adding up to 1)."""
Counts = Any
"""An array of int64, steps x levels."""
TRIES, MOST_CHOICES = 1000, 20_000


def parse_stages(texts: Sequence[str], levels: int) -> list[Stage]:
    """Of `0.3=80/20/0` for each stage: up to which share of the steps, and the levels' parts in it. Raises
    InvalidDataError."""
    stages: list[Stage] = []
    for text in texts:
        end_text, _, parts_text = text.partition("=")
        try:
            end, parts = Fraction(end_text.strip()), [Fraction(part.strip()) for part in parts_text.split("/")]
        except (ValueError, ZeroDivisionError):
            raise InvalidDataError(
                "program.stage-form",
                "--curriculum_schedule: {text:quote}: expected END=PART/PART/…, such as 0.3=80/20/0",
                text=text,
            ) from None
        if len(parts) != levels:
            raise InvalidDataError(
                "program.stage-parts",
                "--curriculum_schedule: {text:quote} has {parts} parts; expected {levels}, one for each level",
                text=text,
                parts=len(parts),
                levels=levels,
            )
        if min(parts) < 0 or sum(parts) == 0:
            raise InvalidDataError(
                "program.stage-zero",
                "--curriculum_schedule: {text:quote}: parts must be 0 or more, and not all 0",
                text=text,
            )
        if end <= (stages[-1][0] if stages else 0):
            raise InvalidDataError(
                "program.stage-order", "--curriculum_schedule: {text:quote} ends before the previous stage", text=text
            )
        stages.append((end, tuple(part / sum(parts) for part in parts)))
    if not stages or stages[-1][0] != 1:
        raise InvalidDataError("program.stage-end", "--curriculum_schedule: the last stage must end at 1")
    return stages


def stage_of(step: int, steps: int, stages: Sequence[Stage]) -> int:
    """By the steps done, not by epochs: three epochs would never see a stage that begins at 70 %."""
    return next(i for i, (end, _) in enumerate(stages) if Fraction(step, steps) < end)


def quotas(stages: Sequence[Stage], *, steps: int, batch_size: int) -> Counts:
    """Samples of each level given before each step: (steps + 1) x levels, every step adding `batch_size`.

    Over any window of steps a level's count differs from the table's by at most one sample wherever numbers allow it
    (with the guide's table: for every even batch_size), else by less than two; from the first step on always by less.
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
    """(how many units a sample is, what the table asks for before each step, in units), without rounding."""
    unit = lcm_of([share.denominator for _, shares in stages for share in shares])
    rows = [[int(share * unit) * batch_size for share in shares] for _, shares in stages]
    each = np.array([rows[stage_of(step, steps, stages)] for step in range(steps)], dtype=np.int64)
    return unit, np.concatenate([np.zeros((1, each.shape[1]), dtype=np.int64), each.cumsum(0)])


def leads(unit: int, wanted: Counts) -> Iterator[Counts]:
    """How far each level may be ahead of the table, in units, the even ones first. Who is ahead by at most x and
    behind by at most one sample less x is within one sample over any window."""
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
    """Earliest deadline first, which finds a schedule whenever there is one that stays within `ahead` and `behind`."""
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
            # A level that is due sooner goes first; `least` rises with every step, so its place is the time.
            due = [int(np.searchsorted(least[:, level], now[level] + 1)) for level in open_levels]
            now[open_levels[due.index(min(due))]] += 1
        given[step + 1] = now
    return given
