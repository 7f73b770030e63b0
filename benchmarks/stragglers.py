"""Stragglers: how often the slow rank of a simulated training is found, and how often another is blamed.

    python -m benchmarks.stragglers [--seeds 10] [--before EARLIER.csv] [--results FOLDER]

The simulation (tests/lib/training_world.py) is a synchronous training of 16 ranks: all wait for the last one. Rank 5 is
slower by a factor, or every tenth of its steps takes three times as long. A program tells the time of its collectives
(own), only that of its steps (steps), or nothing (nothing). Devices that wait in a collective are idle, as NPUs are, or
show full use, as GPUs do; without devices the CPU of the ranks is known.

found   the slow rank is named, and nobody else
blamed  somebody is named who is not slow, out of all runs of the row
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from ascendrun.core.samples import Newest
from ascendrun.health.stragglers.detect import find_stragglers
from benchmarks.results import RESULTS, Row, Sheet, read_rows, table, write_page
from tests.lib.training_world import Own, World

COLUMNS = ("tells", "devices", "slow", "runs", "found", "blamed", "load")
PAIRS = (("own", "none"), *((tells, kind) for tells in ("steps", "nothing") for kind in ("npu", "cuda", "cpu")))
SLOW: dict[str, Own] = {
    "nobody": lambda rank, step: 1.0,
    "x1.12": lambda rank, step: 1.12 if rank == 5 else 1.0,
    "x1.2": lambda rank, step: 1.2 if rank == 5 else 1.0,
    "x1.3": lambda rank, step: 1.3 if rank == 5 else 1.0,
    "x1.5": lambda rank, step: 1.5 if rank == 5 else 1.0,
    "one step in ten x3": lambda rank, step: 3.0 if rank == 5 and step % 10 == 3 else 1.0,
}
SLOW_DATA = "data +0.4 s"
SHAPES = ((2, 8, 1.0, 0.03), (2, 8, 0.3, 0.1), (4, 4, 6.0, 0.05), (2, 8, 1.0, 0.2))
"""Nodes, ranks of each, seconds of a step, noise of its time."""


def world_of(slow: str, seed: int) -> World:
    nodes, per_node, compute_s, noise = SHAPES[seed % len(SHAPES)]
    return World(
        nodes=nodes,
        per_node=per_node,
        compute_s=compute_s,
        shared_s=0.2 * compute_s,
        data_s=0.02 * compute_s,
        noise=noise,
        seed=seed,
        steps=int(700 / compute_s / 1.2),
        slower=SLOW.get(slow, SLOW["nobody"]),
        data_more_s=lambda rank, step: 0.4 * compute_s if slow == SLOW_DATA and rank == 5 else 0.0,
    ).run()


def named(world: World, tells: str, samples: Newest) -> list[int]:
    """Return the ranks that are called slow."""
    steps = {}
    for rank, found in world.step_times().items() if tells != "nothing" else ():
        steps[rank] = [replace(one, own_s=one.own_s if tells == "own" else None, data_s=None) for one in found[-400:]]
    slow = find_stragglers(steps, samples, hosts_of_ranks=world.hosts_of_ranks, now_s=world.ended_s)
    return sorted({rank for one in slow for rank in one.ranks})


def run(sheet: Sheet, seeds: int) -> None:
    for slow in (*SLOW, SLOW_DATA):
        called: dict[tuple[str, str], list[list[int]]] = {}
        for seed in range(seeds):
            world = world_of(slow, seed)
            samples = {"none": Newest(), **{kind: world.used(kind) for kind in ("npu", "cuda", "cpu")}}
            for tells, devices in PAIRS:
                called.setdefault((tells, devices), []).append(named(world, tells, samples[devices]))
        guilty = [] if slow == "nobody" else [5]
        for (tells, devices), ranks in called.items():
            found = sum(one == guilty for one in ranks) if guilty else None
            blamed = sum(bool(set(one) - set(guilty)) for one in ranks)
            load = os.getloadavg()[0]
            sheet.add(tells=tells, devices=devices, slow=slow, runs=seeds, found=found, blamed=blamed, load=load)


def write_results(sheet: Sheet, before: Path | None, command: str) -> None:
    def by_row(path: Path) -> dict[tuple[str, ...], Row]:
        return {(row["tells"], row["devices"], row["slow"]): row for row in read_rows(path)}

    def cell(row: Row | None) -> str:
        return "–" if row is None else f"{row['found'] or '–'} of {row['runs']}, {row['blamed']} blamed"

    earlier = by_row(before) if before is not None else {}
    rows = [[*key, cell(earlier.get(key)), cell(row)] for key, row in by_row(sheet.path).items()]
    says = "Runs of a simulated training in which the slow rank is found, and in which another is blamed."
    body = table(["program tells", "devices", "slow", "before", "now"], rows)
    write_page(sheet, title="Stragglers", says=says, body=body, command=command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--name", default="stragglers", help="of the files of results")
    parser.add_argument("--before", type=Path, help="the CSV of an earlier run, for the page")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with Sheet(options.results, options.name, COLUMNS) as sheet:
        run(sheet, options.seeds)
    write_results(sheet, options.before, f"python -m benchmarks.stragglers --seeds {options.seeds}")


if __name__ == "__main__":
    main()
