"""Ranks that sum fractions, each alone and among other numbers, and say how often the two sums differ in a bit."""

from __future__ import annotations

import random

from ascendrun.programs.trainer import runtime


def main(argv: list[str]) -> None:
    runtime.run(compare, timeout_s=60)


def compare(here: runtime.Runtime) -> None:
    chance = random.Random(here.rank)
    mine = [chance.random() for _ in range(100)]
    alone = [here.sum([value])[0] for value in mine]
    among = [here.sum([0.0] * 7 + [value] + [0.0] * 5)[7] for value in mine]
    here.log(f"{sum(one != other for one, other in zip(alone, among))} differ")
