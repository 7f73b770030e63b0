"""The diagnosis of 1024 ranks with 3000 lines each, by this checkout beside another one, taking turns.

python -m benchmarks.verdicts OTHER_CHECKOUT [--ranks 1024] [--lines 3000] [--repeat 3] [--results FOLDER]

OTHER_CHECKOUT: a work tree of the commit to compare with (git worktree add). Only the time from the evidence in memory
to the diagnosis counts, in CPU seconds, and the memory that it adds; reading the files is in benchmarks.diagnosis.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import shapes
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, write_page

CHECKOUT = Path(__file__).parents[1]
COLUMNS = ("side", "repeat", "case", "cpu_s", "memory_mb", "code", "load")
CASES = (*shapes.SHAPES, "npu_out_of_memory", "one_silent_node_hccl")
MEASURE = """
import json, resource, runpy, sys, time, yaml
from pathlib import Path
case, ranks, lines, shapes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
folder = Path.cwd() / "tests" / "failures"
sys.path[:0] = [str(Path.cwd()), str(folder)]
from corpus import Builder
from ascendrun.health.diagnosis import diagnose
made = runpy.run_path(shapes)
if case in made["SHAPES"]:
    evidence = made["evidence"](case, ranks, lines)
else:
    row = yaml.safe_load((folder / "cases" / f"{case}.yaml").read_text())
    evidence = Builder({**row, "ranks": ranks, "per_host": 8, "steps": lines}, seed=case).evidence()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
found = diagnose(evidence)
cpu_s = time.process_time() - began
memory_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
json.dump({"cpu_s": cpu_s, "memory_mb": memory_mb, "code": found.code}, sys.stdout)
"""


def run(other: Path, ranks: int, lines: int, repeats: int, sheet: Sheet) -> None:
    sides = [("other", other), ("this", CHECKOUT)]
    for repeat in range(repeats):
        for case in CASES:
            for side, checkout in sides if repeat % 2 == 0 else sides[::-1]:
                argv = [sys.executable, "-c", MEASURE, case, str(ranks), str(lines), shapes.__file__]
                done = subprocess.run(argv, cwd=checkout, stdout=subprocess.PIPE, check=True)
                sheet.add(
                    side=side, repeat=repeat, case=case, load=f"{os.getloadavg()[0]:.1f}", **json.loads(done.stdout)
                )


def medians(rows: Sequence[Row], case: str, column: str) -> tuple[float | None, float | None]:
    """Return that of the other side and that of this."""
    other, this = (
        median([row for row in rows if (row["side"], row["case"]) == (side, case)], column)
        for side in ("other", "this")
    )
    return other, this


def worst(rows: Sequence[Row]) -> float | None:
    """Return the largest ratio of CPU time, this beside the other; None: not measured."""
    pairs = [medians(rows, case, "cpu_s") for case in dict.fromkeys(row["case"] for row in rows)]
    return max((this / other for other, this in pairs if this and other), default=None)


def render(rows: Sequence[Row]) -> str:
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        (other_s, this_s), (other_mb, this_mb) = (medians(mine, case, column) for column in ("cpu_s", "memory_mb"))
        ratio = this_s / other_s if this_s and other_s else None
        cells = [shown(value) for value in (other_s, this_s, ratio, other_mb, this_mb)]
        lines.append([case, *cells, str(len(mine) // 2), mine[-1]["code"]])
    header = ["failure", "other, CPU s", "this, CPU s", "÷", "other, MB", "this, MB", "repetitions", "diagnosis"]
    return table(header, lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    options.add_argument("--ranks", type=int, default=1024, metavar="N", help="[default: %(default)s]")
    options.add_argument("--lines", type=int, default=3000, metavar="N", help="lines a rank  [default: %(default)s]")
    options.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions  [default: %(default)s]")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    with Sheet(given.results, "verdicts", COLUMNS) as sheet:
        run(given.other.resolve(), given.ranks, given.lines, given.repeat, sheet)
    write_page(
        sheet,
        title="verdicts: the diagnosis compared with that of an earlier commit",
        says=(
            f"From the evidence of {given.ranks} ranks with {given.lines} lines each to the diagnosis: medians, both "
            "sides in turn. `÷`: this to the other; above 1 this is slower. MB: added to the evidence. "
            "`mixed`: one rank out of memory, tracebacks of the others. `bare`: the same without tracebacks. `plog`: "
            "half of the lines are of CANN. Three of four other lines are of steps, the rest warnings and logs."
        ),
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.verdicts OTHER_CHECKOUT --repeat {given.repeat}",
    )


if __name__ == "__main__":
    main()
