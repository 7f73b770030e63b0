"""The diagnosis of a failed attempt, as the controller has it made in a child, for jobs of 64 and 1000 ranks.

python -m benchmarks.diagnosis [--cases 6] [--seed 1] [--steps 2000] [--results FOLDER]

The failures are those of the corpus of tests/failures in which one rank fails and the rest follows, drawn by the seed,
with so many ranks instead of their own. About five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import RESULTS, Row, Sheet, read_rows, shown, table, write_page

CORPUS = Path(__file__).parents[1] / "tests" / "failures"
COLUMNS = ("ranks", "case", "log_mb", "wall_s", "cpu_s", "memory_mb", "code", "load")
SIZES = (64, 1000)
PER_HOST = 8
GOALS_S = {64: 3.0, 1000: 20.0}
MEASURE = """
import json, resource, subprocess, sys, time
began = time.monotonic()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE)
wall_s = time.monotonic() - began
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu_s, memory_mb = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
found = {"wall_s": wall_s, "cpu_s": cpu_s, "memory_mb": memory_mb}
json.dump({**found, "status": done.returncode, "said": done.stdout.decode()}, sys.stdout)
"""


def drawn(count: int, seed: int) -> list[Path]:
    """Case files in which all ranks but those of one group do the same, and that do not say how many ranks matter."""
    fitting = [path for path in sorted((CORPUS / "cases").glob("*.yaml")) if fits(yaml.safe_load(path.read_text()))]
    return random.Random(seed).sample(fitting, count)


def fits(row: dict[str, Any]) -> bool:
    others = [group for group in row["groups"] if group["ranks"] != "rest"]
    return len(others) < len(row["groups"]) and not isinstance(row.get("clocks"), dict) and row["ranks"] <= min(SIZES)


def run(paths: Sequence[Path], steps: int, sheet: Sheet) -> None:
    sys.path.insert(0, str(CORPUS))  # its modules import each other by name, as its tests have it
    from corpus import Builder, Case, _expected  # type: ignore[import-not-found]
    from spooling import spool_case  # type: ignore[import-not-found]

    for size in SIZES:
        for path in paths:
            row = {**yaml.safe_load(path.read_text()), "ranks": size, "per_host": PER_HOST, "steps": steps}
            case = Case(path.stem, Builder(row, seed=path.stem).evidence(), _expected(row["expect"]))
            with tempfile.TemporaryDirectory(prefix="ascendrun-bench-") as folder:
                job = spool_case(case, Path(folder))
                found = judged(Path(folder), job)
            sheet.add(
                ranks=size,
                case=path.stem,
                log_mb=sum(len(line.text) + 1 for rank in case.evidence.ranks for line in rank.lines) / 1e6,
                wall_s=found["wall_s"],
                cpu_s=found["cpu_s"],
                memory_mb=found["memory_mb"],
                code=json.loads(found["said"])["failure"]["code"],
                load=f"{os.getloadavg()[0]:.1f}",
            )


def judged(state_dir: Path, job: str) -> dict[str, Any]:
    child = [sys.executable, "-m", "ascendrun.query.explain", str(state_dir), job, "1"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *child], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["status"] == 0, found
    return found


def render(rows: Sequence[Row]) -> str:
    lines = []
    for size in SIZES:
        mine = [row for row in rows if row["ranks"] == str(size)]
        cells = [
            shown(max((float(row[column]) for row in mine), default=None))
            for column in ("log_mb", "wall_s", "cpu_s", "memory_mb")
        ]
        lines.append([str(size), *cells, f"{GOALS_S[size]:g}", str(len(mine))])
    header = ["ranks", "logs, MB", "wall, s", "CPU, s", "memory, MB", "goal, wall s", "failures"]
    return table(header, lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=6, metavar="N", help="failures  [default: %(default)s]")
    options.add_argument("--seed", type=int, default=1, metavar="N", help="what draws them  [default: %(default)s]")
    options.add_argument("--steps", type=int, default=2000, metavar="N", help="lines a rank  [default: %(default)s]")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    with Sheet(given.results, "diagnosis", COLUMNS) as sheet:
        run(drawn(given.cases, given.seed), given.steps, sheet)
    write_page(
        sheet,
        title="diagnosis: from the files of an attempt to its cause",
        says=(
            f"The child process that the controller starts after a failure: {given.cases} failures of the corpus, "
            f"drawn by seed {given.seed}, with 64 and 1000 ranks, {PER_HOST} a host, and {given.steps} lines of steps "
            "a rank before the failure. The largest of each figure."
        ),
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.diagnosis --cases {given.cases} --seed {given.seed} --steps {given.steps}",
    )


if __name__ == "__main__":
    main()
