"""Ranks that sum fractions, and report how many sums differ between ranks, or from the exact ones."""

import math
import random

from ascendrun.programs.trainer import runtime


def main(argv: list[str]) -> None:
    runtime.run(compare, timeout_s=60)


def compare(here: runtime.Runtime) -> None:
    chance = random.Random(here.rank)
    mine = [chance.random() for _ in range(100)]
    found = here.sum(mine)
    differ = [each for each in here.gather(found) if each != found]
    exact = [math.fsum(each) for each in zip(*here.gather(mine))]
    wrong = [one for one, other in zip(found, exact) if not math.isclose(one, other, rel_tol=1e-15)]
    here.log(f"{len(differ)} differ, {len(wrong)} wrong")
