"""This checkout beside another one of ascendrun, in one run, taking turns: what a change has cost.

python -m benchmarks.before OTHER_CHECKOUT [--device-key family] [--repeat 10] [--results FOLDER]

OTHER_CHECKOUT: a work tree of the commit to compare with (git worktree add).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.bed import Bed, Cost
from benchmarks.launchers import HOSTS, JOB, RANK, RANKS_PER_HOST
from benchmarks.ours import CHECKOUT, Ours
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, without_paths, write_page
from benchmarks.trial import Trial

COLUMNS = ("what", "side", "repeat", "wall_s", "cpu_s", "status", "load", "note")
THIS, OTHER = "this", "other"
EXEC, START, SUBMIT, SUBMIT_COLD = "exec true, cold", "ps", "submit to first lines", "submit to first lines, cold"
EXEC_HOSTS = (1, 8)
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Side:
    """One of the two. `device_key`: what its job file calls the type of the devices."""

    name: str
    ours: Ours
    device_key: str

    def write_job(self, bed: Bed) -> Path:
        job: dict[str, object] = {
            "name": JOB,
            "command": [sys.executable, str(RANK)],
            "nodes": HOSTS,
            "devices": {self.device_key: "cpu", "per_node": RANKS_PER_HOST},
            "hostfile": str(self.ours.hostfile(bed.cluster.hosts[:HOSTS])),
        }
        file = bed.folder / f"{self.name}.yaml"
        file.write_text(yaml.safe_dump(job))
        return file


def run(sides: Sequence[Side], bed: Bed, repeats: int, sheet: Sheet) -> None:
    """Every repetition measures both sides of each, each time beginning with the other one."""
    for repeat in range(-1, repeats):  # the first one puts agents and files in their places, and does not count
        turn = sides if repeat % 2 == 0 else sides[::-1]
        for count in EXEC_HOSTS:
            for side in turn:
                hosts = str(side.ours.hostfile(bed.cluster.hosts[:count]))
                cost = bed.measure(side.ours.argv("exec", "-H", hosts, "--", "true"), env=side.ours.environ())
                side.ours.stop_controller()
                add(sheet, f"{EXEC}, {count} host{'s' if count > 1 else ''}", side, repeat, cost)
        for what in (SUBMIT_COLD, SUBMIT):
            for side in turn:
                add(sheet, what, side, repeat, submit(bed, side, is_cold=what == SUBMIT_COLD))
                side.ours.stop_controller()
        for side in turn:
            add(sheet, START, side, repeat, bed.measure(side.ours.argv("ps"), env=side.ours.environ()))


def submit(bed: Bed, side: Side, *, is_cold: bool) -> Cost:
    """`wall_s`: until the first line of each rank is on the screen of who submitted."""
    if not is_cold:
        side.ours.run("nodes", "-H", str(side.ours.hostfile(bed.cluster.hosts[:HOSTS])))  # brings the agents
    argv = side.ours.argv("submit", str(side.write_job(bed)))
    bed.settle()
    head_s, hosts_s = bed.cpu_seconds()
    with Trial(bed, argv, side.ours.environ()) as trial:
        began = trial.await_ranks(HOSTS * RANKS_PER_HOST, patience_s=PATIENCE_S)
        bed.settle()
        head_end_s, hosts_end_s = bed.cpu_seconds()
        side.ours.run("stop", "--now", JOB)
        if began is None:
            return Cost(PATIENCE_S, None, None, 1, trial.tail())
        return Cost(began.seen_s, head_end_s - head_s, hosts_end_s - hosts_s, 0, "")


def add(sheet: Sheet, what: str, side: Side, repeat: int, cost: Cost) -> None:
    if repeat < 0:
        return
    cpu_s = None if cost.head_cpu_s is None or cost.hosts_cpu_s is None else cost.head_cpu_s + cost.hosts_cpu_s
    sheet.add(
        what=what,
        side=side.name,
        repeat=repeat,
        wall_s=cost.wall_s,
        cpu_s=cpu_s,
        status=cost.status,
        load=f"{os.getloadavg()[0]:.1f}",
        note=without_paths(cost.tail) if cost.status else "",
    )


def render(rows: Sequence[Row]) -> str:
    header = ["", "other, wall s", "this, wall s", "÷", "other, CPU s", "this, CPU s", "÷"]
    return table(header, (_line(rows, what) for what in dict.fromkeys(row["what"] for row in rows)))


def _line(rows: Sequence[Row], what: str) -> list[str]:
    cells = []
    for column in ("wall_s", "cpu_s"):
        good = [row for row in rows if row["what"] == what and row["status"] == "0"]
        other, this = (median((row for row in good if row["side"] == side), column) for side in (OTHER, THIS))
        cells += [shown(other), shown(this), shown(this / other if this and other else None)]
    return [what, *cells]


SAYS = (
    "Medians, both sides taking turns on one virtual cluster. *Cold*: no controller runs. CPU s: of the head and all "
    "hosts until both rest again. `÷`: this beside the other; above 1 this is slower."
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    options.add_argument("--device-key", default="type", metavar="KEY", help="of the other's job file")
    options.add_argument("--repeat", type=int, default=10, metavar="N", help="repetitions  [default: %(default)s]")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    with Bed(max(EXEC_HOSTS)) as bed, Sheet(given.results, "before", COLUMNS) as sheet:
        sides = [
            Side(OTHER, Ours(bed, given.other.resolve(), state=OTHER), given.device_key),
            Side(THIS, Ours(bed, CHECKOUT, state=THIS), "type"),
        ]
        run(sides, bed, given.repeat, sheet)
    write_page(
        sheet,
        title="before: this commit beside an earlier one",
        says=SAYS,
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.before OTHER_CHECKOUT --repeat {given.repeat}",
    )


if __name__ == "__main__":
    main()
