"""From GO to the first instruction of a rank, on one agent without ssh: this checkout beside another one, taking turns.

python -m benchmarks.go OTHER_CHECKOUT [--starts 10] [--repeat 3] [--results FOLDER]

OTHER_CHECKOUT: a work tree of the commit to compare with (git worktree add). Each start is prepared, and gets GO 0.1 s
later: on a cluster the other nodes prepare meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, write_page

CHECKOUT = Path(__file__).parents[1]
COLUMNS = ("side", "repeat", "prepare_s", "go_s", "first_s", "load")
FIRST_STARTS = 3
"""Of each repetition, not counted: the node compiles the modules of the agent."""
MEASURE = """
import json, statistics, sys, tempfile, time
from pathlib import Path
sys.path.insert(0, str(Path.cwd()))
from tests.agent.conftest import Node
first, starts = int(sys.argv[1]), int(sys.argv[2])
with tempfile.TemporaryDirectory() as folder:
    node = Node(Path(folder) / "node")
    agent, rows = node.connect(), []
    for number in range(first + starts):
        tag = f"head-job{number}.1"
        prepared = time.perf_counter()
        agent.do("prepare", **node.job(tag, ["sh", "-c", "date +%s.%N; exec sleep 600"]))
        prepare_s = time.perf_counter() - prepared
        agent.do("follow", tag=tag, offsets={})
        time.sleep(0.1)
        at_s, began = time.time(), time.perf_counter()
        agent.do("go", tag=tag, master_port=None)
        go_s = time.perf_counter() - began
        agent.wait(lambda: agent.output(tag))
        rows.append((prepare_s, go_s, float(agent.output(tag)) - at_s))
        agent.end(tag)
    node.clean()
print(json.dumps([statistics.median(column) for column in zip(*rows[first:])]))
"""


def run(other: Path, starts: int, repeats: int, sheet: Sheet) -> None:
    sides = [("other", other), ("this", CHECKOUT)]
    for repeat in range(repeats):
        for side, checkout in sides if repeat % 2 else sides[::-1]:
            command = [sys.executable, "-c", MEASURE, str(FIRST_STARTS), str(starts)]
            done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
            prepare_s, go_s, first_s = json.loads(done.stdout)
            load = f"{os.getloadavg()[0]:.1f}"
            sheet.add(side=side, repeat=repeat, prepare_s=prepare_s, go_s=go_s, first_s=first_s, load=load)


def render(rows: Sequence[Row]) -> str:
    lines = []
    for column, name in (("prepare_s", "prepare"), ("go_s", "GO"), ("first_s", "GO to first instruction")):
        other, this = (median((row for row in rows if row["side"] == side), column) for side in ("other", "this"))
        lines.append([name, shown(other, "ms"), shown(this, "ms"), shown(this / other if this and other else None)])
    return table(["", "other, ms", "this, ms", "÷"], lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    options.add_argument("--starts", type=int, default=10, metavar="N", help="[default: %(default)s]")
    options.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions  [default: %(default)s]")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    with Sheet(given.results, "go", COLUMNS) as sheet:
        run(given.other.resolve(), given.starts, given.repeat, sheet)
    write_page(
        sheet,
        title="go: from GO to the first instruction of a rank",
        says=f"Medians of {given.repeat} repetitions of {given.starts} starts, both sides in turn, on one agent over a "
        "pipe. `÷`: this to the other; above 1 this is slower.",
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.go OTHER_CHECKOUT --starts {given.starts} --repeat {given.repeat}",
    )


if __name__ == "__main__":
    main()
