"""The samples of each step: the scheduled number of each level, packed into rows that divide evenly over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import lcm
from typing import Any

import numpy as np

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora.rules import Stage, difficulty_problems, read_stages, stage_of
from ascendrun.programs.trainer.data import Unit
from ascendrun.text import Text, listed

Counts = Any
"""An array of int64, steps x levels."""
TRIES, MOST_CHOICES = 1000, 20_000


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
    unit = lcm(*(share.denominator for _, shares in stages for share in shares))
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


NO_DIFFICULTY = "Warning: 'difficulty' field not found"
"""Message that the guide specifies; scripts search for it."""
FEW_ROWS = 1000
EVERYTHING = "all"


@dataclass(frozen=True)
class Table:
    """Curriculum schedule. `levels` from easy to hard. `notes`: messages about deviations from the options."""

    levels: tuple[str, ...]
    stages: tuple[Stage, ...]
    notes: tuple[Text, ...] = ()

    @property
    def is_curriculum(self) -> bool:
        return len(self.levels) > 1


def choose_table(
    rows_of: Mapping[str | None, int], *, wanted: str, levels: Sequence[str], stages: Sequence[str]
) -> Table:
    """Choose the schedule. `rows_of`: number of samples by difficulty (None: not given). `wanted`: auto, on or off.

    Raises InvalidDataError if a level of the data is not in the schedule, or if only some samples have a level.
    """
    parsed = read_stages(stages, len(levels))
    flat = Table((EVERYTHING,), tuple(read_stages(["1=1"], 1)))
    named = {level: count for level, count in rows_of.items() if level is not None}
    if wanted == "off":
        return flat
    counts = {level or "": count for level, count in rows_of.items()}
    problems = [problem.text for problem in difficulty_problems(counts, levels, wanted)]
    if problems:
        raise InvalidDataError.of(problems)
    if not named:
        note = listed("program.no-curriculum", why=NO_DIFFICULTY)
        return Table(flat.levels, flat.stages, (note,))
    missing = [level for level in levels if level not in named]
    homes = homes_of([level in named for level in levels])
    merged = give_to_neighbours(parsed, homes)
    notes = [listed("program.level-missing", level=level, home=levels[homes[levels.index(level)]]) for level in missing]
    kept_levels = tuple(level for level in levels if level in named)
    notes += [
        listed("program.few-samples", count=named[level], level=level, advised=FEW_ROWS)
        for level in kept_levels
        if named[level] < FEW_ROWS
    ]
    return Table(kept_levels, tuple(merged), tuple(notes))


def homes_of(has_rows: Sequence[bool]) -> list[int]:
    """Return the level that receives the fraction of each level: itself if it has samples, else the next easier level
    with samples, else the easiest with samples."""
    first = list(has_rows).index(True)
    homes = []
    for level in range(len(has_rows)):
        easier = [other for other in range(level + 1) if has_rows[other]]
        homes.append(easier[-1] if easier else first)
    return homes


def give_to_neighbours(stages: Sequence[Stage], homes: Sequence[int]) -> list[Stage]:
    kept = sorted(set(homes))
    return [
        (end, tuple(sum((share for share, home in zip(shares, homes) if home == level), 0 * end) for level in kept))
        for end, shares in stages
    ]


class Course:
    """The trainer's plan: samples depend on the step alone, so a resume in mid-stage requires no saved state.

    The samples of a level are drawn in a shuffled order; all are drawn before any repeats, even in a short level.
    `spread`: the number of rows per step is a multiple of it, so that all ranks have equally many rows.
    `row_tokens` 0: no packing, every sample is a separate row.
    """

    def __init__(
        self,
        table: Table,
        numbers: Sequence[Any],
        lengths: Any,
        *,
        steps: int,
        batch_size: int,
        seed: int,
        row_tokens: int,
        spread: int = 1,
    ) -> None:
        self.table, self.numbers, self.lengths = table, [np.asarray(each) for each in numbers], np.asarray(lengths)
        self.steps, self.batch_size, self.seed = steps, batch_size, seed
        self.row_tokens, self.spread = row_tokens, spread
        self.steps_per_epoch = max(1, -(-sum(map(len, self.numbers)) // batch_size))
        self.given = quotas(table.stages, steps=steps, batch_size=batch_size)
        self.orders: dict[tuple[int, int], Any] = {}

    def units(self, step: int) -> Sequence[Unit]:
        samples = self.samples(step)
        if not self.row_tokens:
            return [(number,) for number in sorted(samples, key=lambda each: -self.lengths[each])]
        return pack_evenly(samples, self.lengths, row_tokens=self.row_tokens, spread=self.spread)

    def samples(self, step: int) -> list[int]:
        step = min(step, self.steps - 1)
        bounds = self.given[step : step + 2].tolist()
        return [
            self.draw(level, place)
            for level in range(len(self.numbers))
            for place in range(bounds[0][level], bounds[1][level])
        ]

    def draw(self, level: int, place: int) -> int:
        """Return the sample at index `place`, counted from 0, of this level's sequence."""
        rows = self.numbers[level]
        again, at = divmod(place, len(rows))
        if (level, again) not in self.orders:
            order = np.random.default_rng([self.seed, 7, level, again]).permutation(len(rows))
            self.orders[level, again] = order.astype(np.int32)
            self.orders.pop((level, again - 2), None)
        return int(rows[self.orders[level, again][at]])

    def stage(self, step: int) -> int:
        return stage_of(min(step, self.steps - 1), self.steps, self.table.stages)

    def given_of(self, step: int) -> dict[str, int]:
        """Return the number of samples of each level in the steps before this step."""
        return dict(zip(self.table.levels, self.given[step].tolist()))

    def describe(self) -> list[Text]:
        """Describe the schedule: the fractions of every stage, the number of uses of every level's samples."""
        if not self.table.is_curriculum:
            return [listed("program.steps", steps=self.steps, batch=self.batch_size, rows=len(self.numbers[0]))]
        lines, begin = [], 0
        for i, (_, shares) in enumerate(self.table.stages, start=1):
            last = sum(1 for step in range(self.steps) if self.stage(step) < i)
            parts = [f"{level} {float(share):.0%}" for level, share in zip(self.table.levels, shares)]
            lines.append(
                listed("program.stage", stage=i, first=begin + 1, last=last, parts=parts)
                if last > begin
                else listed("program.stage-empty", stage=i)
            )
            begin = last
        for level, rows in zip(self.table.levels, self.numbers):
            count = self.given_of(self.steps)[level]
            lines.append(listed("program.level-use", level=level, rows=len(rows), count=count, times=count / len(rows)))
        return lines


def pack_evenly(samples: Sequence[int], lengths: Any, *, row_tokens: int, spread: int) -> list[Unit]:
    """Pack all samples into the fewest rows, a multiple of `spread`, of similar length: longest first, each into the
    row with the most space. Fewer samples than `spread` make fewer rows."""
    lengths = {number: int(lengths[number]) for number in samples}
    order = sorted(samples, key=lambda number: (-lengths[number], number))
    total = sum(lengths.values())
    rows = max(1, -(-total // row_tokens))
    while True:
        rows = min(-(-rows // spread) * spread, len(order))
        filled: list[list[int]] = [[] for _ in range(rows)]
        used = [0] * rows
        for number in order:
            at = used.index(min(used))
            filled[at].append(number)
            used[at] += lengths[number]
        if max(used) <= row_tokens or rows == len(order):
            return [tuple(row) for row in filled]
        rows += 1
