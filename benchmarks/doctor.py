"""`doctor` on many hosts, next to `exec true`, which costs what the connections cost.

python -m benchmarks.doctor [--hosts 1,8,64,256] [--repeat 3] [--results FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.bed import Bed, Cost
from benchmarks.exec import COLUMNS, add, ratio
from benchmarks.ours import Ours
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, write_page

EXEC, FIRST, COLD, WARM = "exec true, cold", "doctor, first time", "doctor, cold", "doctor, warm"
ORDER = (EXEC, FIRST, COLD, WARM)
UNFIT = 3
"""Exit code of `doctor` that examined all hosts and found one unfit."""


def measure(ours: Ours, bed: Bed, hosts: Sequence[str]) -> Iterator[tuple[str, Cost]]:
    """First on hosts without an agent, then without a controller, then with controller and agents."""
    on = ("-H", str(ours.hostfile(hosts)))
    doctor, command = ours.argv("doctor", *on), ours.argv("exec", *on, "--", "true")
    ours.forget(hosts)
    try:
        for what, argv in ((FIRST, doctor), (EXEC, command), (COLD, doctor)):
            yield what, bed.measure(argv, env=ours.environ())
            if what != COLD:
                ours.stop_controller()
        yield WARM, bed.measure(doctor, env=ours.environ())
    finally:
        ours.stop_controller()


def values(rows: Sequence[Row], count: int, what: str, column: str) -> list[float]:
    """Return what the repetitions that examined all hosts measured; `column` "cpu": head and hosts together."""
    columns = ("head_cpu_s", "hosts_cpu_s") if column == "cpu" else (column,)
    mine = (row for row in rows if row["hosts"] == str(count) and row["what"] == what)
    return [sum(float(row[one]) for one in columns) for row in mine if row["status"] in ("0", str(UNFIT))]


def middle(rows: Sequence[Row], count: int, what: str, column: str = "wall_s") -> float | None:
    """Return the median; None: not measured."""
    return median(({"value": str(one)} for one in values(rows, count, what, column)), "value")


def to_goal(rows: Sequence[Row], column: str = "wall_s") -> float | None:
    """Return `doctor` on 256 hosts by `exec` there and the slowest probe: what one host takes longer than `exec`."""
    found = [middle(rows, count, what, column) for count in (1, 256) for what in (EXEC, COLD)]
    if any(one is None for one in found):
        return None
    exec_one, doctor_one, exec_many, doctor_many = (one for one in found if one is not None)
    return ratio(doctor_many, exec_many + doctor_one - exec_one)


def render(rows: Sequence[Row]) -> str:
    lines = []
    for count in sorted({int(row["hosts"]) for row in rows}):
        for what in ORDER:
            walls = values(rows, count, what, "wall_s")
            spread = f"{shown(min(walls))}–{shown(max(walls))}" if walls else ""
            a_host = (ratio(middle(rows, count, what, one), float(count)) for one in ("head_cpu_s", "hosts_cpu_s"))
            cells = [shown(middle(rows, count, what)), spread, *(shown(one, "ms") for one in a_host)]
            lines.append([str(count), what, *cells])
    return table(["hosts", "", "wall s", "from–to", "head CPU ms a host", "hosts CPU ms a host"], lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hosts", default="1,8,64,256", metavar="N,N", help="host counts  [default: %(default)s]")
    options.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions  [default: %(default)s]")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    counts = [int(count) for count in given.hosts.split(",")]
    with Sheet(given.results, "doctor", COLUMNS) as sheet, Bed(max(counts)) as bed:
        ours = Ours(bed)
        for count in counts:
            hosts = bed.cluster.hosts[:count]
            for repeat in range(given.repeat):
                for what, cost in measure(ours, bed, hosts):
                    add(sheet, count, what, repeat, cost, None)
    write_page(
        sheet,
        title="doctor: all checks on many hosts",
        says="All probes of `doctor` on virtual hosts without NPUs; medians. All hosts share the processors of the "
        "head; on a cluster each has its own. *First time*: no host has the agent, which then compiles what it runs. "
        "*Cold*: no controller runs. *Warm*: controller and agents run.",
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.doctor --hosts {given.hosts} --repeat {given.repeat}",
    )


if __name__ == "__main__":
    main()
