"""A job on two hosts, two ranks each: its start, its end on request, and what a death leaves behind.

python -m benchmarks.jobs [--repeat 3] [--patience 15] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bed import Bed
from benchmarks.launchers import COLD, HOSTS, MPIRUN, RANKS_PER_HOST, WARM, Launcher, launchers
from benchmarks.ours import Ours
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, without_paths, write_page
from benchmarks.trial import Trial

COLUMNS = (
    "what",
    "event",
    "repeat",
    "alive_s",
    "seen_s",
    "head_cpu_s",
    "hosts_cpu_s",
    "back_s",
    "status",
    "gone_s",
    "left",
    "load",
    "note",
)
STOP, RANK_KILLED, HEAD_KILLED, CABLE_CUT = "stop", "rank killed", "head killed", "cable cut"
EVENTS = (STOP, RANK_KILLED, HEAD_KILLED, CABLE_CUT)
CUT_S = 4.0
"""How long the cable of one host is cut: shorter than the time after which its connection is given up."""
WORLD = HOSTS * RANKS_PER_HOST
VICTIM = WORLD - 1
START_PATIENCE_S = 60.0


def run(repeats: int, patience_s: float, sheet: Sheet) -> None:
    """Each repetition plays every event with every launcher, each time beginning with another one."""
    with Bed(HOSTS) as bed:
        ours = Ours(bed)
        able = launchers(bed, ours)
        for repeat in range(repeats):
            turn = repeat % len(able)
            for event in EVENTS:
                for launcher in able[turn:] + able[:turn]:
                    if launcher.name == COLD and event != STOP:
                        continue  # once it runs, a job started cold is like any other
                    if event == CABLE_CUT and launcher.name not in (MPIRUN, WARM):
                        continue  # the others leave processes on the host that hold the next trial
                    play(bed, ours, launcher, event, repeat=repeat, patience_s=patience_s, sheet=sheet)
        ours.stop_controller()


def play(bed: Bed, ours: Ours, launcher: Launcher, event: str, *, repeat: int, patience_s: float, sheet: Sheet) -> None:
    """One start and one end; what the end leaves is killed, so that the next trial has the hosts to itself."""
    launcher.prepare()
    bed.settle()
    load, before_s = os.getloadavg()[0], bed.cpu_seconds()
    with Trial(bed, launcher.argv, launcher.env) as trial:
        began = trial.await_ranks(WORLD, patience_s=START_PATIENCE_S)
        if began is None:
            note = f"did not start: {without_paths(trial.tail())}"
            sheet.add(what=launcher.name, event=event, repeat=repeat, load=f"{load:.1f}", note=note)
            return
        bed.settle()
        head_cpu_s, hosts_cpu_s = (now - before for now, before in zip(bed.cpu_seconds(), before_s))
        since_s = cause_cut(bed, launcher, trial) if event == CABLE_CUT else cause(event, launcher, trial, ours)
        ended = trial.await_end(since_s, patience_s=patience_s)
        sheet.add(
            what=launcher.name,
            event=event,
            repeat=repeat,
            alive_s=began.alive_s,
            seen_s=began.seen_s,
            head_cpu_s=head_cpu_s,
            hosts_cpu_s=hosts_cpu_s,
            back_s=ended.back_s,
            status=ended.status,
            gone_s=ended.gone_s,
            left=ended.left,
            load=f"{load:.1f}",
            note=without_paths(trial.describe_left()),
        )


def cause(event: str, launcher: Launcher, trial: Trial, ours: Ours) -> float:
    """Makes the event happen; returns its moment (`time.time`).

    "head killed" is SIGKILL to what the launcher runs on the head. ascendrun's job is meant to survive that: there the
    next command is `stop`, which has to find the job again, and the time counts from it.
    """
    if event == RANK_KILLED:
        return trial.kill_rank(VICTIM)
    if event == STOP:
        return trial.interrupt(launcher.interrupts) if launcher.stop is None else trial.stop_by(launcher.stop)
    if launcher.stop is None:
        return trial.kill_launcher()
    for process in ours.on_head():
        os.kill(process.pid, signal.SIGKILL)
    trial.kill_launcher()
    return trial.stop_by(launcher.stop)


def cause_cut(bed: Bed, launcher: Launcher, trial: Trial) -> float:
    """Stop the job while the cable of its last host is cut; return the moment when it is plugged in again."""
    host = bed.cluster.hosts[HOSTS - 1]
    bed.cluster.cut(host)
    try:
        if launcher.stop is None:
            trial.interrupt(launcher.interrupts)
        else:
            trial.stop_by(launcher.stop)
        trial.watch(CUT_S, lambda: False)
    finally:
        bed.cluster.heal(host)
    return time.time()


def render(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row["what"] for row in rows))
    start = [_start_line(rows, name) for name in names]
    ends = [[name, *(_end_cell(rows, name, event) for event in EVENTS)] for name in names]
    starting = ["", "last rank alive, s", "its line at the head, s", "÷ mpirun", "head CPU s", "hosts CPU s"]
    ending = ["", "^C or stop", "one rank SIGKILLed", "launcher SIGKILLed", "cable cut"]
    return (
        f"## Start\n\n{table(starting, start)}\n"
        "## End: seconds until the last process of the job was gone from all hosts, exit code of the command\n\n"
        f"{table(ending, ends)}"
    )


def _start_line(rows: Sequence[Row], name: str) -> list[str]:
    mine = [row for row in rows if row["what"] == name]
    failed = sum(not row["seen_s"] for row in mine)
    label = f"{name} ({failed} of {len(mine)} did not start)" if failed else name
    seen_s, peer_s = median(mine, "seen_s"), median((row for row in rows if row["what"] == "mpirun"), "seen_s")
    ratio = None if seen_s is None or not peer_s else seen_s / peer_s
    cpu = [shown(median(mine, column)) for column in ("head_cpu_s", "hosts_cpu_s")]
    return [label, shown(median(mine, "alive_s")), shown(seen_s), shown(ratio), *cpu]


def _end_cell(rows: Sequence[Row], name: str, event: str) -> str:
    mine = [row for row in rows if row["what"] == name and row["event"] == event and row["seen_s"]]
    if not mine:
        return "–"
    left = [int(row["left"]) for row in mine]
    if any(left):
        return f"**{max(left)} processes left**"
    codes = "/".join(sorted({row["status"] for row in mine if row["status"]}))
    return f"{shown(median(mine, 'gone_s'))} (exit {codes or '–'})"


def gone_s(rows: Sequence[Row], what: str, event: str) -> float | None:
    """The median; None when it never ran, infinity when any trial left a process behind."""
    mine = [row for row in rows if row["what"] == what and row["event"] == event and row["seen_s"]]
    if any(row["left"] != "0" for row in mine):
        return float("inf")
    return median(mine, "gone_s")


def says(patience_s: float) -> str:
    return (
        f"{HOSTS} hosts, {RANKS_PER_HOST} ranks each, a rank that prints one line and waits; medians, from outside.\n\n"
        "*Start*: from the typed command to the line of the last rank. ascendrun has a controller and connections from "
        "a command before, as at the second command of a day; “cold” has neither; the peers connect anew each time, "
        "they have no other way.\n\n"
        "*End*: ^C at the launcher's terminal (twice within a second for pdsh, which asks for it); for ascendrun it is "
        "`ascendrun stop`. Launcher SIGKILLed: ascendrun's job is meant to go on without its controller and its "
        "follower, so the time is that of an `ascendrun stop` right after. "
        f"Cable cut: that of one host, {CUT_S:g} s long; ^C or `stop` is given meanwhile, and the time is that from "
        f"the moment when it is plugged in again. “Processes left” were still there after {patience_s:g} s."
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions  [default: %(default)s]")
    options.add_argument(
        "--patience",
        type=float,
        default=15.0,
        metavar="S",
        help="how long an end is watched, in seconds  [default: %(default)g]",
    )
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    with Sheet(given.results, "jobs", COLUMNS) as sheet:
        run(given.repeat, given.patience, sheet)
    write_page(
        sheet,
        title="jobs: start, stop and deaths on two hosts",
        says=says(given.patience),
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.jobs --repeat {given.repeat} --patience {given.patience:g}",
    )


if __name__ == "__main__":
    main()
