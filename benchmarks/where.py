"""Where the CPU time of a warm submit goes, process by process, until all ranks have written their first line.

python -m benchmarks.where [--repeat 5]
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks.bed import Bed
from benchmarks.before import PATIENCE_S, THIS, Side
from benchmarks.launchers import HOSTS, JOB, RANK, RANKS_PER_HOST
from benchmarks.ours import Ours
from benchmarks.results import table
from benchmarks.trial import Trial

KINDS = {"serve": "agents", "supervise": "supervisors", "sample": "samplers", str(RANK): "ranks"}
"""An argument of each process of ours on a host, and what it is."""


def cpu_ms(pids: Iterable[int]) -> float:
    """What live processes have used so far, all their threads together."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e6


def on_hosts(bed: Bed) -> dict[str, list[int]]:
    """The pids of our processes on the hosts, by what they are."""
    found: dict[str, list[int]] = defaultdict(list)
    for host in bed.cluster.hosts:
        for process in bed.cluster.processes(host):
            for word in process.argv:
                if word in KINDS:
                    found[KINDS[word]].append(process.pid)
    return found


def submit_once(bed: Bed, side: Side) -> dict[str, float]:
    """CPU time in ms of one warm submit on two hosts."""
    side.ours.run("nodes", "-H", str(side.ours.hostfile(bed.cluster.hosts[:HOSTS])))
    bed.settle()
    controller = side.ours.controller()
    assert controller is not None
    began = cpu_ms([controller.pid]), cpu_ms(on_hosts(bed)["agents"])
    head_s, hosts_s = bed.cpu_seconds()
    with Trial(bed, side.ours.argv("submit", str(side.write_job(bed))), side.ours.environ()) as trial:
        assert trial.await_ranks(HOSTS * RANKS_PER_HOST, patience_s=PATIENCE_S), trial.tail()
        bed.settle()
        head_end_s, hosts_end_s = bed.cpu_seconds()
        used = {kind: cpu_ms(pids) for kind, pids in on_hosts(bed).items()}
        used["controller"] = cpu_ms([controller.pid]) - began[0]
        side.ours.run("stop", "--now", JOB)
    used["agents"] -= began[1]
    used["the command"] = 1e3 * (head_end_s - head_s) - used["controller"]
    used["probes of the checks, logins"] = 1e3 * (hosts_end_s - hosts_s) - sum(used[kind] for kind in KINDS.values())
    return used


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=5, metavar="N", help="repetitions  [default: %(default)s]")
    given = options.parse_args()
    with Bed(HOSTS) as bed:
        side = Side(THIS, Ours(bed, state=THIS), "type")
        submit_once(bed, side)  # puts agents and files in their places
        first, later = [], []
        for _ in range(given.repeat):
            side.ours.stop_controller()
            first.append(submit_once(bed, side))
            later.append(submit_once(bed, side))
        side.ours.stop_controller()
    columns = [{name: median(run[name] for run in runs) for name in runs[0]} for runs in (first, later)]
    rows = sorted(zip(columns[0], *(column.values() for column in columns)), key=lambda row: -row[1])
    head = ["CPU, ms", "first job of a controller", "the next within a minute"]
    print(table(head, ([name, *(f"{ms:.0f}" for ms in both)] for name, *both in rows)))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
