"""The design's goals of speed beside what was measured: writes that table into README.md.

python -m benchmarks.goals [--check]      # --check: only say whether README.md tells the results as they are
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from benchmarks import doctor, files, jobs, start, verdicts
from benchmarks import exec as many_hosts
from benchmarks.launchers import WARM as WARM_JOB
from benchmarks.results import RESULTS, Row, median, read_rows, shown, table

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- goals: written by python -m benchmarks.goals -->", "<!-- end of goals -->"
CORES = 2
"""Of the machine of the results."""
COLD, WARM, WARM_ONES = many_hosts.COLD, many_hosts.WARM, many_hosts.WARM_ONES
Rows = Mapping[str, Sequence[Row]]
Measure = Callable[[Rows], Optional[float]]


def nothing(_: Rows) -> None:
    """No benchmark of ours yet."""


@dataclass(frozen=True)
class Goal:
    """`measured` in the unit of `at_most`; None: not measured, or the peer is not installed.

    `by_cpu`: the same by CPU time of head and hosts, where other work on the machine disturbs the wall.
    """

    what: str
    unit: str
    at_most: float
    measured: Measure
    by_cpu: Measure = nothing

    def verdict(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        return "met" if value <= self.at_most else "**not met yet**"


def files_ratio(count: int, column: str) -> Measure:
    return lambda rows: files.ratio(rows.get("files", ()), count, column)


def exec_goal(what: str, count: int, ours: str, peer: str, unit: str, at_most: float) -> Goal:
    """A goal that is a ratio of two medians of benchmarks.exec."""

    def measured(rows: Rows) -> float | None:
        return many_hosts.ratio(*(many_hosts.wall(rows["exec"], count, one) for one in (ours, peer)))

    def by_cpu(rows: Rows) -> float | None:
        return many_hosts.ratio(*(many_hosts.cpu(rows["exec"], count, one) for one in (ours, peer)))

    return Goal(what, unit, at_most, measured, by_cpu)


def floor_ratio(rows: Rows) -> float | None:
    """A cold `exec` by the least CPU that any contender needed, on the hosts and on the head, on all cores."""
    least_s = 0.0
    for side in ("head_cpu_s", "hosts_cpu_s"):
        found = [many_hosts.wall(rows["exec"], 256, one, side) for one in many_hosts.ORDER if one not in WARM_ONES]
        least_s += min((one for one in found if one is not None), default=0.0)
    return many_hosts.ratio(many_hosts.wall(rows["exec"], 256, COLD), least_s / CORES)


def head_cpu_ms(rows: Rows) -> float | None:
    used_s = many_hosts.wall(rows["exec"], 256, many_hosts.COLD, "head_cpu_s")
    return None if used_s is None else used_s * 1000 / 256


def idle_percent(rows: Rows) -> float | None:
    share = many_hosts.idle_share(rows["exec"], 256, "head_cpu_s")
    return None if share is None else share * 100


def start_ratio(peer: str) -> Measure:
    def measured(rows: Rows) -> float | None:
        return many_hosts.ratio(
            *(median((row for row in rows["jobs"] if row["what"] == what), "seen_s") for what in (WARM_JOB, peer))
        )

    return measured


def gone(event: str) -> Measure:
    return lambda rows: jobs.gone_s(rows["jobs"], WARM_JOB, event)


def start_ms(what: str) -> Measure:
    def measured(rows: Rows) -> float | None:
        wall_s = start.wall(rows["start"], what)
        return None if wall_s is None else wall_s * 1000

    return measured


def of_logs(what: str, case: str, measure: str, *, per_s_as_us: bool = False) -> Measure:
    """A median of benchmarks.logs; `per_s_as_us`: a rate, as microseconds each."""

    def measured(rows: Rows) -> float | None:
        value = median(
            (
                row
                for row in rows.get("logs", ())
                if (row["what"], row["case"], row["measure"]) == (what, case, measure)
            ),
            "value",
        )
        return 1e6 / value if value is not None and per_s_as_us else value

    return measured


def of_head(what: str, measure: str, *, run: str = "head") -> Measure:
    """A value of benchmarks.head, of its whole run or of that with 1000 nodes."""

    def is_meant(row: Row) -> bool:
        return (row["what"], row["measure"]) == (what, measure)

    return lambda rows: median(filter(is_meant, rows.get(run, ())), "value")


def lines_percent(rows: Rows) -> float | None:
    """What the lines cost more than the steady head."""
    steady, with_lines = of_head("steady", "CPU")(rows), of_head("64 hosts × 1000 lines/s", "CPU of all")(rows)
    return None if steady is None or with_lines is None else max(0.0, with_lines - steady)


def doctor_ratio(column: str) -> Measure:
    return lambda rows: doctor.to_goal(rows.get("doctor", ()), column)


GOALS = (
    exec_goal("`exec true` cold, 256 hosts", 256, COLD, many_hosts.CLUSH_CURVE, "× clush, curve25519", 0.70),
    exec_goal("", 256, COLD, many_hosts.CLUSH, "× clush as installed", 0.25),
    exec_goal("", 256, COLD, many_hosts.PDSH, "× pdsh as installed", 0.25),
    exec_goal("", 256, COLD, many_hosts.ASYNCSSH, "× asyncssh", 0.90),
    Goal("", "× floor: the least CPU of hosts and head", 1.2, floor_ratio),
    exec_goal("`exec true` cold, 8 hosts", 8, COLD, many_hosts.PDSH_CURVE, "× pdsh, curve25519", 0.80),
    exec_goal("`exec true` cold, one host", 1, COLD, many_hosts.SSH_CURVE, "× ssh, curve25519", 1.0),
    Goal("head CPU, cold, 256 hosts", "ms a host", 3.5, head_cpu_ms),
    exec_goal("`exec true` warm, 256 hosts", 256, WARM, COLD, "× cold", 0.05),
    exec_goal("", 256, WARM, many_hosts.MASTER, "× ControlMaster", 0.10),
    Goal("256 idle connections", "% of a core", 0.5, idle_percent),
    Goal("", "MB", 60.0, lambda rows: many_hosts.controller_mb(rows["exec"], 256)),
    Goal("5 MB to 64 hosts", "× the best peer", 0.8, files_ratio(64, "wall_s"), files_ratio(64, "cpu")),
    Goal("5 MB to 256 hosts", "× the best peer", 0.8, files_ratio(256, "wall_s"), files_ratio(256, "cpu")),
    Goal("bulk logs", "ms of head CPU a MB", 2.0, of_head("bulk", "CPU of all until stored")),
    Goal("64 hosts × 1000 lines/s", "% of a core", 10.0, lines_percent),
    Goal(
        "64 ranks' lines merged and folded, all alike",
        "µs of CPU a line",
        5.0,
        of_logs("fold", "all alike", "lines/s of CPU time", per_s_as_us=True),
    ),
    Goal(
        "the same, numbers differ on every rank",
        "µs of CPU a line",
        5.0,
        of_logs("fold", "numbers differ", "lines/s of CPU time", per_s_as_us=True),
    ),
    Goal("99 of 100 lines on the screen of whoever follows", "s", 1.0, of_logs("latency", "p99", "s")),
    Goal(
        "a rank that writes 1 GB a minute",
        "× with a plain file",
        1.05,
        of_logs("flood", "ascendrun", "slowed by writing, x a plain file"),
    ),
    Goal("warm submit to first line of all ranks, 2 hosts", "× mpirun", 1.0, start_ratio("mpirun")),
    Goal("", "× torchrun over pdsh", 1.0, start_ratio("torchrun over pdsh")),
    Goal("", "× deepspeed", 0.1, start_ratio("deepspeed")),
    Goal("stop to last process gone, none left", "s", 1.0, gone(jobs.STOP)),
    Goal("the same after SIGKILL of the controller", "s", 1.0, gone(jobs.HEAD_KILLED)),
    Goal("the same after a cut cable", "s", 1.0, gone(jobs.CABLE_CUT)),
    Goal("rank killed to all ranks of all hosts gone", "s", 1.0, gone(jobs.RANK_KILLED)),
    Goal("dead node: SUSPECT", "s", 6.0, of_head("lost", "until all are SUSPECT")),
    Goal("dead node: UNREACHABLE", "s", 15.0, of_head("lost", "until all are UNREACHABLE")),
    Goal("doctor on 256 hosts", "× cold exec and its slowest probe", 1.5, doctor_ratio("wall_s"), doctor_ratio("cpu")),
    Goal(
        "diagnosis of 1024 ranks × 3000 lines",
        "× commit e80e5bf6",
        1.0,
        lambda rows: verdicts.worst(rows.get("verdicts", ())),
    ),
    Goal("head with 1000 nodes, steady", "% of a core", 20.0, of_head("steady", "CPU", run="head-1000")),
    Goal("", "MB", 300.0, of_head("steady", "memory", run="head-1000")),
    Goal("`ascendrun --help`", "ms", 100.0, start_ms(start.HELP)),
    Goal("`ascendrun ps`", "ms", 150.0, start_ms(start.PS)),
)


def render(rows: Rows) -> str:
    lines = (_line(goal, goal.measured(rows), goal.by_cpu(rows)) for goal in GOALS)
    return table(["what", "goal", "measured", "in CPU time", ""], lines)


def _line(goal: Goal, value: float | None, cpu: float | None) -> tuple[str, ...]:
    measured = "processes left" if value == float("inf") else shown(value)
    by_cpu = "" if cpu is None else shown(cpu)
    return goal.what, f"≤ {goal.at_most:g} {goal.unit}", measured, by_cpu, goal.verdict(value)


def read_all(folder: Path) -> Rows:
    """A benchmark that has not run yet has no rows."""
    names = ("exec", "doctor", "jobs", "start", "logs", "head", "head-1000", "files", "verdicts")
    return {name: read_rows(folder / f"{name}.csv") if (folder / f"{name}.csv").exists() else [] for name in names}


def with_goals(readme: str, goals: str) -> str:
    """The README's text with its table replaced; raises ValueError when the marks around it are gone."""
    head, _, rest = readme.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"{README.name} has lost the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{goals}\n{END}{tail}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="write nothing; exit 1 when the table is not up to date")
    given = options.parse_args()
    old = README.read_text(encoding="utf-8")
    new = with_goals(old, render(read_all(RESULTS)))
    if given.check:
        if new != old:
            print("README.md does not tell the results as they are; run: python -m benchmarks.goals", file=sys.stderr)
        return int(new != old)
    fresh = README.with_suffix(".new")
    fresh.write_text(new, encoding="utf-8")
    os.replace(fresh, README)
    return 0


if __name__ == "__main__":
    sys.exit(main())
