"""Batch arithmetic that prevents a failed start: divisibility among the ranks, sufficient rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.text import Text


def nearest_multiples(value: int, of: int) -> tuple[int, int]:
    """Return the nearest valid numbers below and above; the lower is at least `of`."""
    below = max(of, value // of * of)
    return below, below if below == value else below + of if below < value else below


def batch_problems(options: Mapping[str, Any], world_size: int, samples: int) -> list[Text]:
    """Report batch sizes that do not suit the ranks or the data. `samples`: of all ranks together."""
    batch_size, micro_batch = options["global_batch_size"], options["micro_batch_size"]
    unit = world_size * (micro_batch or 1)
    problems = []
    if batch_size < world_size:
        problems.append(
            Text(
                "program.ranks-without-sample",
                "--global_batch_size={batch} on {ranks} ranks leaves {idle} ranks without a sample in every "
                "step\n"
                "hint: set {least} or more, or use fewer devices",
                batch=batch_size,
                ranks=world_size,
                idle=world_size - batch_size,
                least=world_size,
            )
        )
    elif batch_size % unit:
        below, above = nearest_multiples(batch_size, unit)
        problems.append(
            Text(
                "program.batch-not-divisible",
                "--global_batch_size={batch} is not divisible by {unit} ({ranks:plural rank ranks}{micro}), "
                "so some "
                "ranks wait\nhint: set it to {nearest}",
                batch=batch_size,
                unit=unit,
                ranks=world_size,
                micro=f" x --micro_batch_size={micro_batch}" if micro_batch else "",
                nearest=sorted({below, above}),
            )
        )
    if batch_size > samples:
        problems.append(
            Text(
                "program.batch-over-data",
                "--global_batch_size={batch} exceeds the {samples} samples of the data",
                batch=batch_size,
                samples=samples,
            )
        )
    return problems
